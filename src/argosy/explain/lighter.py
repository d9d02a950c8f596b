"""Find changes with which a plan fits on the same devices: offload, and a model that needs less.

(1)  one change: adapters instead of full training, frozen weights in 8 or 4 bits, an optimizer with
     less state, shorter sequences, a 16-bit dtype
(2)  if no single one helps: adapters, frozen weights in 4 bits and 8-bit state together, with the
     longest sequences that fit
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from argosy.dtype import Dtype
from argosy.errors import ArgosyError
from argosy.explain.remedy import Change, ChangeKind, RemedyTrial, least_that_fits
from argosy.plan.offload import parse_offload
from argosy.workload.chain import Chain
from argosy.workload.optimizer import OPTIMIZERS, optimizer_bytes_per_weight
from argosy.workload.tuning import BaseFormat, Train, Tuning

Reload = Callable[..., Chain]
"""A function that loads the model with another ``sequence_length``, ``dtype``, ``optimizer`` or
``tuning``."""
# Sequences are shortened in steps of this number of tokens.
_STEP_TOKENS = 64
# The optimizer with 8-bit state.
_EIGHT_BITS = "adamw8bit"
_OFFLOADS = ("optimizer", "activations", "optimizer,activations", "optimizer,activations,weights")
"""Combinations that may be kept in host memory, the smallest first."""


def offload_changes(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the first offload beyond the present setting with which a plan fits."""
    settings = trial.settings
    if settings.target is not None:
        return
    for text in _OFFLOADS[:-1] if settings.runnable else _OFFLOADS:
        offload = parse_offload(text)
        if not settings.offload.named.keys() < offload.named.keys():
            continue
        if offload.activations is not None and any(
            spec.kind.is_split for spec in settings.schedules
        ):
            continue
        changed = replace(trial, settings=replace(settings, offload=offload))
        if changed.fit() is not None:
            yield Change(
                kind=ChangeKind.OFFLOAD,
                sentence=f"{_listed(text)} in host memory",
                target=trial.chain.name,
                value=text,
                options=(("--offload", text),),
                seconds=changed.seconds,
            )
            return


def _listed(text: str) -> str:
    """Return the parts of an offload setting as words.

    >>> _listed("optimizer"), _listed("optimizer,activations")
    ('optimizer state', 'optimizer state and activations')
    """
    *first_parts, last = text.replace("optimizer", "optimizer state").split(",")
    return f"{', '.join(first_parts)} and {last}" if first_parts else last


def lighter_changes(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield every single change that helps (1), or a combination if none does (2)."""
    single_changes = [
        *_tuned(trial, reload),
        *_optimizers(trial, reload),
        *_dtypes(trial, reload),
        *_shorter(trial, reload),
    ]
    yield from single_changes or _several(trial, reload)


def _tuned(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield the first that fits of adapters, and of frozen weights in fewer bits."""
    if trial.settings.target is not None:
        return  # no other system trains adapters of ours
    now = trial.chain.tuning
    adapted = replace(now, train=Train.LORA)
    bases = [base for base in BaseFormat if now.base is None]
    steps = [] if now.is_full else [replace(now, base=base) for base in bases]
    if now.train is not Train.LORA:
        steps += [adapted, *(replace(adapted, base=base) for base in bases)]
    with contextlib.suppress(ArgosyError):  # a model whose matrices are not known
        for tuning in steps:
            changed = replace(trial, chain=reload(tuning=tuning))
            if changed.fit() is not None:
                kind, target = ChangeKind.TUNING, trial.chain.name
                yield Change(
                    kind=kind,
                    sentence=_tuning_words(tuning, now),
                    target=target,
                    value=str(tuning),
                    options=_tuning_options(tuning),
                    seconds=changed.seconds,
                )
                return


def _tuning_words(tuning: Tuning, now: Tuning) -> str:
    """Describe a change of the trained weights."""
    if tuning.train is now.train:
        return f"base weights in {tuning.base}"
    weights = "all weights" if now.is_full else "the weights of other layers"
    return f"{tuning}, in place of training {weights}"


def _tuning_options(tuning: Tuning) -> tuple[tuple[str, str], ...]:
    """Return the command-line options of a tuning."""
    options = []
    if tuning.train is Train.LORA:
        options.append(("--lora", f"rank={tuning.rank},targets={','.join(tuning.targets)}"))
    if tuning.base is not None:
        options.append(("--base-weights", str(tuning.base)))
    return tuple(options)


def _optimizers(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield 8-bit state if it fits, and the fitting optimizer with the most state among the
    others."""
    chain, target = trial.chain, trial.settings.target
    allowed = None if target is None else target.optimizers
    width = chain.dtype.bytes
    size = {name: optimizer_bytes_per_weight(name, width) for name in OPTIMIZERS}
    names = [name for name in OPTIMIZERS if allowed is None or name in allowed]
    lighter = [name for name in names if size[name] < size[chain.optimizer]]
    ranked = sorted(lighter, key=lambda name: (name != _EIGHT_BITS, -size[name]))
    num_found = 0
    for name in ranked:
        changed = replace(trial, chain=reload(optimizer=name))
        if changed.fit() is not None:
            num_found += name != _EIGHT_BITS
            yield Change(
                kind=ChangeKind.OPTIMIZER,
                sentence=f"the optimizer {name} in place of {chain.optimizer}",
                target=chain.name,
                value=name,
                options=(("--optimizer", name),),
                seconds=changed.seconds,
            )
        if num_found:
            return


def _dtypes(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield the first 16-bit dtype with which a plan fits."""
    chain, target = trial.chain, trial.settings.target
    for dtype in (Dtype.BF16, Dtype.FP16):
        if target is not None and dtype not in target.dtypes:
            continue
        with contextlib.suppress(ArgosyError):  # a model that was measured in one dtype
            changed = replace(trial, chain=reload(dtype=str(dtype)))
            if dtype is not chain.dtype and changed.fit() is not None:
                yield Change(
                    kind=ChangeKind.DTYPE,
                    sentence=f"{dtype} in place of {chain.dtype}",
                    target=chain.name,
                    value=str(dtype),
                    options=(("--dtype", str(dtype)),),
                    seconds=changed.seconds,
                )
                return


def _shorter(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield the longest sequences with which a plan fits."""
    length = trial.chain.sequence_length
    if any(profile.sequence_length != 1 for profile in (trial.model.profiles or {}).values()):
        return  # profiles have the times of one length only
    with contextlib.suppress(ArgosyError):  # a model of one length only
        tokens = _longest(trial, reload)
        if tokens is not None:
            yield Change(
                kind=ChangeKind.SEQUENCE_LENGTH,
                sentence=f"sequences of {tokens} tokens in place of {length}",
                target=trial.chain.name,
                value=tokens,
                options=(("--sequence-length", str(tokens)),),
                seconds=replace(trial, chain=reload(sequence_length=tokens)).seconds,
            )


def _longest(trial: RemedyTrial, reload: Reload) -> int | None:
    """Return the largest number of tokens, below the present one, with which a plan fits."""
    length = trial.chain.sequence_length
    step = min(_STEP_TOKENS, max(1, length // 8))
    cuts = (length - 1) // step

    def fits(cut: int) -> bool:
        """Return whether a plan fits with sequences that are ``cut`` steps shorter."""
        return (
            replace(trial, chain=reload(sequence_length=step * (cuts + 1 - cut))).fit() is not None
        )

    least = least_that_fits(fits, cuts) if cuts else None
    return None if least is None else step * (cuts + 1 - least)


def _several(trial: RemedyTrial, reload: Reload) -> Iterator[Change]:
    """Yield adapters, 4-bit weights and 8-bit state together, if they fit (2)."""
    if trial.settings.target is not None:
        return
    now = trial.chain.tuning
    tuning = replace(now, train=Train.LORA, base=now.base or BaseFormat.NF4)
    lightest = {"tuning": tuning, "optimizer": _EIGHT_BITS}
    with contextlib.suppress(ArgosyError):  # a model whose matrices are not known

        def lighter(**changes: object) -> Chain:
            """Load the model with all of these changes."""
            return reload(**{**lightest, **changes})

        changed = replace(trial, chain=lighter())
        options = (*_tuning_options(tuning), ("--optimizer", _EIGHT_BITS))
        sentence = f"{tuning} and the optimizer {_EIGHT_BITS}"
        if changed.fit() is None:
            tokens = _longest(changed, lighter)
            if tokens is None:
                return
            changed = replace(trial, chain=lighter(sequence_length=tokens))
            options = (*options, ("--sequence-length", str(tokens)))
            sentence = f"{sentence}, with sequences of {tokens} tokens"
        yield Change(
            kind=ChangeKind.SEVERAL,
            sentence=sentence,
            target=trial.chain.name,
            value=str(tuning),
            options=options,
            seconds=changed.seconds,
        )
