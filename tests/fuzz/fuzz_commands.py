"""Command lines out of the registered commands: any of their options, with values that fit, nearly
fit or do not.

They run in this process, in a folder with valid files of which one may be changed, on models and
clusters that are small. What would start a process, measure this machine or touch its network is
stopped there: nothing but the folder is ever changed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import typer
from fuzz.fuzz_inputs import Files, mutated
from fuzz.fuzz_trees import TEXTS

import argosy.cli
from argosy.cli.app import app

CODES = (0, 2, 3, 4)
ABORTED = 1
"""Of ``argosy init`` where nobody answers."""
ARGUMENTS = "arguments.json"
"""In a kept input, beside the files: the command line."""

NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "17",
    "64",
    "0.5",
    "0.01",
    "1e-9",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "x",
    "",
)
HUGE = ("1000000000", "999999999999999999999", "1e18")
PLAIN_TEXTS = tuple(
    text for text in TEXTS if not text.startswith("/") and ".." not in text and "\x00" not in text
)
VALUES: dict[str, tuple[str, ...]] = {
    "cluster": (
        "cluster.toml",
        "two-cards",
        "two-cards",
        "mixed-8",
        "calm.toml",
        "missing.toml",
        "nothing",
    ),
    "source": ("cluster.toml", "two-cards", "calm.toml", "missing.toml", "hosts.txt"),
    "model": (
        "config.json",
        "config.json",
        "model.toml",
        "gpt2",
        "bert-base",
        "gpt9",
        "profile.json",
        "gravity:8^3",
    ),
    "plan": (
        "plan.json",
        "plan.json",
        "gpt2-xl-on-two-cards",
        "gravity.json",
        "missing.json",
        "cluster.toml",
    ),
    "profile": ("profile.json", "h200-gpt2", "toy-4-pbs-2.txt", "missing.json", "plan.json"),
    "calibration": ("calibration.json", "missing.json", "plan.json"),
    "trace": (
        "changes.toml",
        "wan=trace.csv",
        "box0.pcie=trace.csv",
        "none",
        "a0.0=speed.csv",
        "x=y.csv",
        "changes.txt",
    ),
    "scenario": (
        "none",
        "wan=on-off",
        "*=flap:every=10 s,outage=1 s",
        "a0.0=straggler",
        "changes.toml",
        "x=markov",
        "=",
    ),
    "for_trace": ("none", "changes.toml", "wan=on-off:seed=x"),
    "under": ("none", "changes.toml", "box*=random-walk"),
    "program": ("train.py:nothing", "missing.py:build", "train.py", "train", ":"),
    "timeline": ("timeline.json", "plan.json", "missing.json"),
    "decisions": ("decisions.jsonl", "plan.json"),
    "compare": ("comparison.json", "plan.json"),
    "snapshot": ("box.hdf5", "box.hdf5", "missing.hdf5", "plan.json"),
    "file": ("hosts.txt", "topology.xml", "missing.txt", "plan.json"),
    "runs": ("runs.json", "runs.json", "vtrain.csv", "missing.json", "plan.json"),
    "measured": ("runs.json", "runs.json", "vtrain.csv", "missing.json"),
    "global_batch": ("4", "8", "16", "0", "-1", "3", "x"),
    "level": ("1", "0", "9", "x"),
    "robust": ("mean", "p95", "worst", "best"),
    "objective": ("throughput", "cost", "speed"),
    "dtype": ("fp16", "fp32", "bf16", "fp64", "int8"),
    "optimizer": ("adamw", "sgd", "adam", "lion"),
    "schedule": ("gpipe", "1f1b", "kfkb", "kfkb:2", "interleaved", "zero-bubble", "none"),
    "until": ("1 s", "10 s", "0 s", "5", "-1 s"),
    "time_budget": ("1 s", "0 s", "x", "1 ms"),
    "memory_budget": ("1 GB", "0 B", "x", "4"),
    "adapt": ("off", "k", "shares", "full", "x"),
    "to": ("torchtitan", "megatron", "deepspeed", "flagscale", "torchrun", "sailor", "jax"),
    "executor": ("thread", "process", "x"),
    "node": (
        "1 x 1 H200",
        "2 x 2 A100-80GB, intra 300 GB/s, nic 1 Gbit/s",
        "x",
        "99999999999 x 1 H200",
    ),
    "particles": ("8^3", "64", "0", "x", "99999^9"),
    "per_side": ("4", "8", "0", "-1", "x"),
    "width": ("40", "80", "10", "100000"),
    "steps": ("1", "2", "0", "-1", "x"),
    "samples": ("1,2", "0", "x", ",", "1"),
    "what": ("a0.nic", "box0.0", "x"),
    "value": ("1 Gbit/s", "0", "0.5", "x"),
    "shell": ("bash", "zsh", "fish", "csh"),
    "snapshots": ("0", "1", "-2", "nan"),
    "pixels": ("8", "0", "-1", "1000000000"),
    "only": ("megatron", "data-parallel", "nobody"),
}
"""By the name of a parameter; where one is not here, its type decides."""
COSTLY = {"demo": 0.02, "compare": 0.5, "nbody run": 0.3, "plan": 0.5, "doctor": 0.2}
"""How often a command comes, beside others."""


_MEASURING = ("argosy.measure.profile", "argosy.measure.probe_worker")


class ReachedWorkError(BaseException):
    """Everything was checked, and a process would have started: as good as an answer."""


@cache
def commands() -> dict[str, Any]:
    """Every registered command by the words that call it."""

    def below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return dict(below(typer.main.get_command(app), ()))


def command_line(random: Random) -> list[str]:
    """A command with some of its options, now and then one of another's or a stray word."""
    known = commands()
    name = random.choices(list(known), [COSTLY.get(name, 1.0) for name in known])[0]
    words = name.split()
    for parameter in known[name].params:
        if random.random() < (
            0.95 if parameter.required else 0.0 if parameter.name == "help" else 0.2
        ):
            words += _given(random, parameter)
    if known[name].params and random.random() < 0.05:
        words.insert(random.randrange(len(words) + 1), random.choice(PLAIN_TEXTS))
    return words


def _given(random: Random, parameter: Any) -> list[str]:
    """A parameter as it is written, once or, where it may be repeated, more than once."""
    option = (
        random.choice([*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "option"
        else None
    )
    if getattr(parameter, "is_flag", False):
        return [option or ""]
    words: list[str] = []
    for _ in range(random.choice((1, 2)) if parameter.multiple or parameter.nargs != 1 else 1):
        words += [word for word in (option, _value(random, parameter)) if word is not None]
    return words


def _value(random: Random, parameter: Any) -> str:
    if random.random() < 0.05:
        return random.choice((*PLAIN_TEXTS, *HUGE))
    if parameter.name in VALUES:
        return random.choice(VALUES[parameter.name])
    described = getattr(parameter, "type_descriptor", None)
    kind = str(parameter.type if described is None else described.annotation).lower()
    if "int" in kind or "float" in kind:
        return random.choice(NUMBERS)
    if "path" in kind:
        return random.choice(("out", "out.json", "missing/out.json", ".", "plan.json"))
    return random.choice(PLAIN_TEXTS)


@cache
def folder_files() -> Files:
    """Valid files of every kind that a command takes."""
    from fuzz.fuzz_targets import SEEDS, snapshot_files

    names = {
        "cluster.toml": "cluster/cluster.toml",
        "trace.csv": "cluster/trace.csv",
        "speed.csv": "speed/trace.csv",
        "changes.toml": "changes/changes.toml",
        "config.json": "llama/config.json",
        "model.toml": "preset/model.toml",
        "plan.json": "plan/plan.json",
        "gravity.json": "gravity-plan/plan.json",
        "profile.json": "profile/profile.json",
        "toy-4-pbs-2.txt": "dapple/toy-4-pbs-2.txt",
        "calibration.json": "calibration/calibration.json",
        "timeline.json": "timeline/timeline.json",
        "decisions.jsonl": "decisions/decisions.jsonl",
        "hosts.txt": "hostfile/hosts.txt",
        "topology.xml": "nccl/topology.xml",
        "runs.json": "runs/runs.json",
        "vtrain.csv": "vtrain/vtrain.csv",
    }
    files = {name: (SEEDS / path).read_bytes() for name, path in names.items()}
    files["calm.toml"] = b"".join(files["cluster.toml"].partition(b"[[changes]]")[:1])
    rows = [
        {"name": "even", "iteration_seconds": 1.5, "feasible": True},
        {"name": "x", "reason": "<b>", "feasible": False},
    ]
    files["comparison.json"] = json.dumps(
        {"model": "gpt2-xl", "global_batch": 64, "rows": rows}
    ).encode()
    files["train.py"] = b"def build():\n    raise SystemError('this program is broken')\n"
    return {**files, **snapshot_files()}


def command_files(random: Random) -> Files:
    """A command line, and the files beside it, one of which may be changed."""
    words = command_line(random)
    files = folder_files()
    if random.random() < 0.4:
        named = {
            name: content for name, content in files.items() if any(name in word for word in words)
        }
        files = {**files, **mutated(random, named)} if named else files
    return {**files, ARGUMENTS: json.dumps(words).encode()}


def run_command(folder: Path) -> None:
    """Run the command line that lies in a folder, there; ``AssertionError`` where it ends as none
    may."""
    words = json.loads((folder / ARGUMENTS).read_text())
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with _harmless(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = argosy.cli._run(words)
            except ReachedWorkError:
                return
    finally:
        os.chdir(before)
    assert code in CODES or (code == ABORTED and words[0] == "init"), (
        f"{words} ended with {code}: {err.getvalue()}"
    )
    assert code == 0 or err.getvalue().strip() or out.getvalue().strip(), (
        f"{words} ended with {code} and no word"
    )


@contextlib.contextmanager
def _harmless(folder: Path) -> Iterator[None]:
    """No process is started, nothing is measured, and no lab of this machine is seen."""

    def stop(*_: object, **__: object) -> None:
        raise ReachedWorkError

    # Not ``patch.dict``: that would forget every module that a command is the first to import.
    before = {name: sys.modules.get(name) for name in _MEASURING}
    sys.modules.update(dict.fromkeys(_MEASURING))  # type: ignore[arg-type] (as where they are not installed)
    with (
        patch.object(subprocess, "Popen", stop),
        patch.object(BaseProcess, "start", stop),
        patch("argosy.lab.record.FOLDER", folder / "labs"),
        patch("sys.stdin", io.StringIO()),
        patch.dict(os.environ, {"COLUMNS": "80"}),
    ):
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
