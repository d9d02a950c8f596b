"""Load a model that a user names: a preset, a config, a preset file, or a measured profile.

The caller's choice takes precedence over the file, and the file over these defaults: the longest
sequence that the config names but at most 4096 tokens, bf16, adamw. A preset's name takes
precedence over a file of that name: write ``./gpt2`` for the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from argosy.document import Document, is_there, read_json, read_toml
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, bad_input, closest, invalid, raise_any, refused
from argosy.workload.architecture import Architecture, Length
from argosy.workload.chain import Chain
from argosy.workload.finetune import tuned_chain
from argosy.workload.hub import cached_config, is_hub_name
from argosy.workload.huggingface import read_config
from argosy.workload.imports.dapple import read_dapple
from argosy.workload.powersgd import factored_chain
from argosy.workload.preset import Preset, preset_names, preset_of, read_preset
from argosy.workload.profile import Profile
from argosy.workload.profile_file import profile_of, read_profile
from argosy.workload.settings import WorkloadSettings, parse_settings
from argosy.workload.transformer import build_chain
from argosy.workload.tuning import FULL, Tuning

__all__ = ["load_architecture", "load_model", "preset_names", "read_profiles"]

# Name that stands for no profile.
NO_PROFILE = "none"

# Largest sequence length, in tokens, that is chosen by default.
_DEFAULT_LENGTH = 4096
# Dtype if neither the caller nor the file states one.
_DEFAULT_DTYPE = Dtype.BF16
# Optimizer if neither the caller nor the file states one.
_DEFAULT_OPTIMIZER = "adamw"


def load_model(
    model: str | Path,
    *,
    sequence_length: int | None = None,
    dtype: Dtype | str | None = None,
    optimizer: str | None = None,
    fused_attention: bool = True,
    tuning: Tuning = FULL,
    powersgd: int = 0,
) -> Chain:
    """Return the chain of a preset's name, a ``config.json`` or its folder, a preset's TOML, or a
    measured profile.

    ``tuning`` chooses the weights that are trained; in a measured profile they are those of the
    measurement. ``powersgd`` is the rank of the matrices as which gradients are summed; 0:
    gradients are summed whole.

    >>> load_model("gpt2", sequence_length=512)
    gpt2: 14 layers, 0.1244 B parameters, sequence 512, bf16
    """
    settings = parse_settings(
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer,
        fused_attention=fused_attention,
    )
    settings = replace(settings, tuning=tuning, powersgd=powersgd)
    if str(model) in preset_names():
        return _preset_chain(read_preset(str(model)), settings)
    path = _located(model)
    match path.suffix:
        case ".toml":
            return _preset_chain(preset_of(read_toml(path)), settings)
        case ".txt":
            chain, _ = read_dapple(path, optimizer=settings.optimizer or _DEFAULT_OPTIMIZER)
            return _as_measured(chain, settings)
        case ".json":
            return _json_chain(read_json(path), path, settings)
    expected = "a .json, .toml or .txt file, or a folder with a config.json"
    raise invalid(file=str(path), expected=expected)


def load_architecture(model: str | Path) -> Architecture:
    """Return the shape of a preset, of a ``config.json`` or its folder, or of a preset's TOML."""
    if str(model) in preset_names():
        return read_preset(str(model)).config.architecture
    path = _located(model)
    if path.suffix == ".toml":
        return preset_of(read_toml(path)).config.architecture
    if path.suffix != ".json" or "model_type" not in (document := read_json(path)).data:
        raise invalid(
            file=str(path), expected="a model whose shape is known: a preset or a config.json"
        )
    return read_config(document).architecture


def _located(model: str | Path) -> Path:
    """Return the file of a model; for a folder its config, for a name on the hub its config in the
    local cache."""
    if not str(model) or not is_there(model):
        if cached := cached_config(str(model)):
            return cached
        raise _unknown(str(model))
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def _unknown(name: str) -> InputError:
    names = preset_names()
    if is_hub_name(name) and Path(name).suffix not in (".toml", ".txt", ".json"):
        own = name.partition("/")[2].lower()
        near = next((known for known in names if known in (own, own.replace("meta-", ""))), None)
        command = f"hf download {name} config.json"
        return bad_input(
            f"a model in the local Hugging Face cache; download its shape with: {command}",
            name,
            "model",
            suggestion=f'"{near}" is the same shape' if near else None,
        )
    if Path(name).suffix in (".toml", ".txt", ".json") or "/" in name:
        return refused("there is no such file or folder", file=name)
    expected = "a file, a folder or one of the presets that `argosy models` lists"
    return bad_input(expected, name, "model", suggestion=closest(name, names))


def _json_chain(document: Document, path: Path, settings: WorkloadSettings) -> Chain:
    if "rows" in document.data:
        profile = profile_of(document)
        optimizer = settings.optimizer or _DEFAULT_OPTIMIZER
        return _as_measured(profile.chain(dtype=settings.dtype, optimizer=optimizer), settings)
    if "model_type" not in document.data:
        expected = '"model_type" of a Hugging Face config, or "rows" of a measured profile'
        raise invalid(file=document.file, expected=expected)
    name = _model_name(path)
    return _preset_chain(
        Preset(name=name, config=read_config(document), source=document.file), settings
    )


def _model_name(path: Path) -> str:
    """Return the name of a model: the folder of its config, or the file; for a config in the hub's
    cache the name on the hub."""
    if path.name != "config.json":
        return path.stem
    parents = path.parents
    if (
        len(parents) > 2
        and parents[1].name == "snapshots"
        and parents[2].name.startswith("models--")
    ):
        return parents[2].name.removeprefix("models--").replace("--", "/")
    return path.parent.resolve().name


def _preset_chain(preset: Preset, settings: WorkloadSettings) -> Chain:
    architecture = preset.config.architecture
    chain = build_chain(
        architecture,
        name=preset.name,
        sequence_length=_length(preset, architecture, settings),
        dtype=settings.dtype or preset.dtype or preset.config.dtype or _DEFAULT_DTYPE,
        optimizer=settings.optimizer or preset.optimizer or _DEFAULT_OPTIMIZER,
        source=preset.source,
        fused_attention=settings.fused_attention,
    )
    chain = tuned_chain(
        chain, architecture, settings.tuning, fused_attention=settings.fused_attention
    )
    return factored_chain(chain, architecture, settings.powersgd) if settings.powersgd else chain


def _length(preset: Preset, architecture: Architecture, settings: WorkloadSettings) -> int:
    """Return the sequence length; raise an ``InputError`` if the model has no positions for it."""
    context = architecture.context
    longest = context if architecture.length is Length.EXACTLY else min(context, _DEFAULT_LENGTH)
    length = settings.sequence_length or preset.sequence_length or longest
    if architecture.length is Length.EXACTLY and length != context:
        expected = (
            f"{context}: an image of {preset.name} is {context - 1} patches and a class token"
        )
        raise bad_input(expected, length, "sequence_length")
    if architecture.length is Length.AT_MOST and length > context:
        expected = f"at most {context}: {preset.name} has learned no position beyond"
        raise bad_input(expected, length, "sequence_length")
    return length


def _as_measured(chain: Chain, settings: WorkloadSettings) -> Chain:
    """Return the chain; raise an ``InputError`` if another length or dtype than the measured one is
    requested."""
    problems = [
        Problem(name, str(requested), f"{measured}, as {chain.name} was measured")
        for name, requested, measured in (
            ("sequence_length", settings.sequence_length, chain.sequence_length),
            ("dtype", settings.dtype, chain.dtype),
        )
        if requested not in (None, measured)
    ]
    if not settings.tuning.is_full:
        expected = (
            "a model whose matrices are known; "
            "freeze the weights of a measured model before it is measured"
        )
        problems.append(Problem(chain.name, settings.tuning.options, expected))
    if settings.powersgd:
        expected = "a model whose matrices are known: a preset, a config.json or --program"
        problems.append(Problem(chain.name, f"--powersgd {settings.powersgd}", expected))
    raise_any(problems)
    return chain


def read_profiles(paths: Sequence[str]) -> tuple[Profile, ...]:
    """Read profiles from JSON files, DAPPLE's text files or by their bundled names; ``none`` alone
    stands for no profile."""
    if list(paths) == [NO_PROFILE]:
        return ()
    return tuple(
        read_dapple(path)[1] if path.endswith(".txt") else read_profile(path) for path in paths
    )
