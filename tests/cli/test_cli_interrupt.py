"""What ends a search early: a real Ctrl-C, a time budget and a memory budget. Either way there is a
plan."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.cluster.file import load_cluster
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.planner import Settings, find_plan
from argosy.solve.budget import held_bytes
from argosy.workload.load import load_model

ENDLESS = ("--level", "2", "--gap", "0", "--time-budget", "10 min")
SEARCH = (
    "plan",
    "-m",
    "llama-3-8b",
    "-c",
    "mixed-16",
    "-b",
    "128",
    "--sequence-length",
    "1024",
    "--dtype",
    "fp16",
)


def test_an_interrupt_ends_the_search_with_the_best_so_far(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "argosy", *SEARCH, *ENDLESS, "-o", str(tmp_path / "plan.json")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("best "):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "wrote" in out
    plan = load_plan(tmp_path / "plan.json")
    chain = load_model("llama-3-8b", sequence_length=1024, dtype="fp16")
    check_plan(plan, chain, load_cluster("mixed-16"))
    assert plan.predicted is not None and plan.certificate is not None and plan.search is not None
    assert plan.certificate.lower_bound_seconds <= plan.predicted.iteration_seconds
    assert plan.search.cpu_seconds < 500


def test_a_time_budget_ends_the_search_with_the_best_so_far() -> None:
    chain, cluster = (
        load_model("llama-3-8b", sequence_length=1024, dtype="fp16"),
        load_cluster("mixed-16"),
    )
    plans = {
        budget: find_plan(
            chain, cluster, global_batch=128, settings=Settings(level=2, gap=0, time_budget=budget)
        )
        for budget in (0.0, 1.5)
    }
    short, longer = plans[0.0].search, plans[1.5].search
    assert short is not None and longer is not None
    assert short.candidates < longer.candidates
    assert short.cpu_seconds < longer.cpu_seconds < 60


def test_a_memory_budget_ends_the_search_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that grows by a megabyte with every look at it."""
    looks = itertools.count()
    monkeypatch.setattr("argosy.solve.budget.held_bytes", lambda: 10**6 * next(looks))
    chain, cluster = (
        load_model("llama-3-8b", sequence_length=1024, dtype="fp16"),
        load_cluster("mixed-16"),
    )
    plans = [
        find_plan(
            chain,
            cluster,
            global_batch=128,
            settings=Settings(level=2, gap=0, memory_budget=budget),
        )
        for budget in (0.0, 60e6)
    ]
    short, longer = (plan.search for plan in plans)
    assert short is not None and longer is not None
    assert short.candidates < longer.candidates
    assert longer.cpu_seconds < 300


def test_what_a_process_holds_is_seen() -> None:
    before = held_bytes()
    block = mmap.mmap(
        -1, 50_000_000
    )  # pages of its own: a large process may have freed as much before
    block.write(b"x" * len(block))
    assert before == 0 or held_bytes() - before > 0.9 * len(block)
