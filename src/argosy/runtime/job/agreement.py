"""Compare what all ranks of a run must have in common before the first step, so that they train the
same model on the same data.

    (1)  given    options, plan, the program's file, Argosy's own source, Python: available before
                  torch is loaded
    (2)  loaded   files of the program beside that one, and versions of the packages that it uses
    (3)  built    what determines the initial values, numbers of the model, its loss and its
                  optimizer (``built``), and the data of the first batch

A fact is a name with a text: a value, or the hash of a content. The module needs torch only to
compare facts between ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import argosy.errors
from argosy.errors import InputError, Problem
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.runtime.job.program import split_name
from argosy.runtime.processes.run_spec import RunSpec

if TYPE_CHECKING:
    import torch

Facts = Mapping[str, str]
"""Facts by name: values, or hashes of contents."""

_PACKAGE = Path(argosy.errors.__file__).parent
"""The folder of Argosy's own source, all of which ranks must share."""
_OPTIONS = ("save_every", "clip", "seed", "adapt", "horizon", "min_gain")
"""Options of a run that must be equal on all ranks."""
_OF_PLAIN_RUNS, _OF_ELASTIC_RUNS = ("steps", "resume"), ("copy_every",)
"""Further such options that only plain runs, or only elastic runs, have."""
# Hexadecimal digits of a hash that a message shows; twelve are unlikely to collide.
_SHOWN = 12
# Differences that a message lists; one number may differ in every module of a model.
_LISTED = 5


def given_facts(spec: RunSpec, plan: Plan, *, elastic: bool = False) -> dict[str, str]:
    """Return the facts (1). Paths and timeouts are omitted, since they may differ between hosts."""
    names = (*_OPTIONS, *(_OF_ELASTIC_RUNS if elastic else _OF_PLAIN_RUNS))
    facts = {f"--{name.replace('_', '-')}": spec.shown(name) for name in names}
    program, function = split_name(spec.program)
    facts |= {"plan": _hash([dumps_plan(plan).encode()]), "program": _hash([program.read_bytes()])}
    facts |= {"the program's function": function, "Argosy's source": _own_source()}
    facts["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    if spec.init is not None:
        facts["--init"] = _hash(path.read_bytes() for path in _files(Path(spec.init)))
    return facts


def _files(path: Path) -> list[Path]:
    """Return a file of weights itself, or the files that describe a checkpoint, which all hosts can
    read."""
    return (
        [path] if path.is_file() else sorted(path.glob("*.json")) + sorted(path.glob(".metadata"))
    )


@cache
def _own_source() -> str:
    return _hash(path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py")))


def loaded_facts(program: str) -> dict[str, str]:
    """Return the facts (2) of the modules that this process has loaded so far."""
    folder = split_name(program)[0].resolve().parent
    facts = {}
    for name, module in sorted(sys.modules.items()):
        # A module may compute an attribute when it is looked up, so its dict is read instead.
        known = getattr(module, "__dict__", {})
        version, file = known.get("__version__"), known.get("__file__")
        if "." not in name and isinstance(version, str):
            # What follows "+" names a build for another device.
            facts[f"package {name}"] = version.partition("+")[0]
        path = Path(file) if isinstance(file, str) else Path()
        is_installed = any(map(path.is_relative_to, (sys.prefix, sys.base_prefix)))
        if path.suffix == ".py" and path.is_relative_to(folder) and not is_installed:
            facts[str(path.relative_to(folder))] = _hash([path.read_bytes()])
    return facts


def batch_digest(batch: Any) -> str:
    """Return a hash of all tensors and numbers of a batch."""
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten(batch)
    from argosy.workload.capture.digest import described

    return _hash([str(structure).encode(), *map(described, leaves)])


def _hash(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def differences(facts: Sequence[Facts], names: Sequence[str]) -> list[Problem]:
    """Return the facts that differ from those of the first process that has them, with the name of
    one process that differs. A fact that a process lacks is not compared for it."""
    problems = []
    for fact in sorted({name for process_facts in facts for name in process_facts}):
        known = [
            (who, process_facts[fact])
            for who, process_facts in zip(names, facts, strict=True)
            if fact in process_facts
        ]
        (first, expected), *others = known
        for who, value in others:
            if value != expected:
                texts = [f"{_short(value)} on {who}", f"{_short(expected)}, as on {first}"]
                problems.append(Problem(fact, texts[0], texts[1]))
                break
    return problems


def _short(text: str) -> str:
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return f"content {text[:_SHOWN]}" if is_hash else text


def check_agreed(own: Facts, roster: Sequence[str], device: torch.device) -> None:
    """Raise an ``InputError`` on every rank if facts differ between ranks. Every rank calls
    this."""
    from argosy.runtime.processes.failure import in_contact
    from argosy.runtime.processes.world import gather_texts

    text = json.dumps(own, sort_keys=True)
    with in_contact("while the ranks compared their inputs"):
        if len(set(gather_texts(_hash([text.encode()]), device))) == 1:
            return
        gathered = [json.loads(text) for text in gather_texts(text, device)]
    names = [f"rank {rank} ({device_name})" for rank, device_name in enumerate(roster)]
    problems = differences(gathered, names)
    if problems:
        raise InputError(problems[:_LISTED])


def with_first_compared(
    data: Callable[[int], Any], compare: Callable[[Facts], None]
) -> Callable[[int], Any]:
    """Return ``data`` with the first batch that it returns compared between ranks."""
    is_first = True

    def compared(step: int) -> Any:
        nonlocal is_first
        batch = data(step)
        if is_first:
            is_first = False
            compare({f"the data of step {step}": batch_digest(batch)})
        return batch

    return compared
