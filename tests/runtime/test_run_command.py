"""``argosy run`` with real processes: what it writes, and what it says when something goes
wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runtime.run_cases import PROGRAM, losses_alone, written_plan
from runtime.training_cases import Case

from argosy.errors import InputError
from argosy.runtime.processes.run_folder import held
from argosy.runtime.processes.run_spec import dumps_run_spec, loads_run_spec
from argosy.runtime.state.checkpoint import read_state_dict
from argosy.timeline.file import load_timeline

PAIR = """
name = "pair"
[[nodes]]
name = "n"
devices = { kind = "V100-32GB", count = 2 }
intra = [{ medium = "pcie", bandwidth = "1 GB/s" }]
"""
SECONDS = 60


def command(plan: Path, *options: str, program: Path = PROGRAM) -> list[str]:
    return [sys.executable, "-m", "argosy", "run", str(plan), f"{program}:build", *options]


def environment(fault: str = "") -> dict[str, str]:
    return {**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1"}


def run(
    plan: Path, *options: str, fault: str = "", program: Path = PROGRAM
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(plan, "--out", str(plan.parent / "run"), *options, program=program),
        env=environment(fault),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def processes_of(folder: Path) -> list[int]:
    """Processes that were told to write into a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder / "run").encode() in words:
                found.append(int(entry.name))
    return found


def test_a_run_trains_resumes_and_writes_what_it_measured(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    first = run(plan, "--steps", "3", "--json")
    assert first.returncode == 0, first.stderr
    anew = run(plan, "--steps", "2")
    assert (
        anew.returncode == 2 and "of an earlier run. Try another --out, or --resume" in anew.stderr
    )
    log = tmp_path / "run" / "torchrun.log"
    log.write_text("what the first run printed\n")
    again = run(plan, "--steps", "5", "--resume")
    assert again.returncode == 0, again.stderr
    assert log.read_text().startswith("what the first run printed\n")
    figures = json.loads(first.stdout)
    resumed = [float(text) for text in re.findall(r"loss ([\d.]+)  ", again.stderr)]
    assert [*figures["losses"], *resumed] == pytest.approx(losses_alone(5), rel=1e-4)
    assert "step 4  loss" in again.stderr and "step 2  loss" not in again.stderr
    told = [
        json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in told] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in told[:3]] == figures["losses"]
    assert load_timeline(tmp_path / "run" / "timeline.json").clock == "measured"
    assert read_state_dict(tmp_path / "run" / "checkpoints" / "step-00000005")
    readable = [path for path in (tmp_path / "run").rglob("*") if path.stat().st_mode & 0o007]
    assert not readable, "other users see nothing of a run"
    assert not processes_of(tmp_path)


def test_a_program_without_layers_trains_the_same_on_one_device_and_on_two(tmp_path: Path) -> None:
    losses = []
    for shares in (((2,),), ((2,), (2,))):
        folder = tmp_path / str(len(shares))
        folder.mkdir()
        plan = written_plan(folder, Case(shares=shares, num_micro_batches=4))
        done = run(plan, "--steps", "3", "--json", program=PROGRAM.with_name("small_unet.py"))
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]


@pytest.mark.exhaustive
def test_what_is_planned_for_a_captured_program_is_run(tmp_path: Path) -> None:
    program = PROGRAM.with_name("small_unet.py")
    whole = written_plan(tmp_path, Case(shares=((2,),), num_micro_batches=4))
    alone = run(whole, "--steps", "2", "--json", program=program)
    (tmp_path / "pair.toml").write_text(PAIR)
    folder = tmp_path / "shared"
    folder.mkdir()
    planned = [
        sys.executable,
        "-m",
        "argosy",
        "plan",
        "--program",
        f"{program}:build",
        "-c",
        str(tmp_path / "pair.toml"),
    ]
    subprocess.run(
        [*planned, "-o", str(folder / "plan.json")],
        env=environment(),
        capture_output=True,
        check=True,
    )
    done = run(folder / "plan.json", "--steps", "2", "--json", "--any-device", program=program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(
        json.loads(alone.stdout)["losses"], rel=1e-4
    )


@pytest.mark.parametrize(
    ("fault", "exit_code", "sentences"),
    [
        ("nan", 4, ["rank 1 (n0.1): the loss of step 2 is nan, first in micro-batch 0"]),
        pytest.param(
            "batch",
            2,
            ["batch['tokens']: found a tensor of shape (9, 6), expected a first dim of 8"],
            marks=pytest.mark.exhaustive,
        ),
        ("killed", 4, ["rank 1 (n0.1) was killed by SIGKILL", "lost contact with rank 1 (n0.1)"]),
        pytest.param(
            "broken",
            4,
            ["rank 1 (n0.1): KeyError: 'no such shard'", "small_gpt.py:"],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["nan", "batch", "killed", "broken"],
)
def test_the_rank_that_saw_it_first_says_what_went_wrong(
    tmp_path: Path, fault: str, exit_code: int, sentences: list[str]
) -> None:
    done = run(written_plan(tmp_path), "--steps", "5", fault=fault)
    assert done.returncode == exit_code, done.stderr
    for sentence in sentences:
        assert sentence in done.stderr
    assert not processes_of(tmp_path)


def test_a_plan_for_other_hardware_is_refused(tmp_path: Path) -> None:
    done = run(written_plan(tmp_path, kind="A100-80GB"))
    assert done.returncode == 2
    assert "n0." in done.stderr
    assert (
        "expected A100-80GB, which the plan was made for; --any-device runs it anyway"
        in done.stderr
    )


def test_a_port_in_use_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(written_plan(tmp_path), "--port", str(port))
    assert done.returncode == 2
    assert (
        f'Cannot use port {port} because the system reports "Address already in use"' in done.stderr
    )


def test_weights_that_are_not_there_are_missed_at_once(tmp_path: Path) -> None:
    for options in ((), ("--elastic", "--here")):
        done = run(written_plan(tmp_path), "--init", "missing.pt", *options)
        assert done.returncode == 2
        told = "error: Cannot read --init missing.pt because it does not exist. "
        assert done.stderr == f"{told}Try a file of weights, or the folder of a checkpoint.\n"
        assert not (tmp_path / "run").exists(), "nothing was started"


def is_free(folder: Path) -> bool:
    try:
        with held(folder, "0"):
            return True
    except InputError:
        return False


def test_a_killed_command_leaves_no_process_behind(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    started = subprocess.Popen(
        command(plan, "--out", str(tmp_path / "run"), "--steps", "100000", "--quiet"),
        env=environment(),
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "run" / "progress.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_of(tmp_path)) >= 4, "the command, torchrun and two workers"
        for options in ((), ("--resume",)):
            second = run(plan, *options)
            assert second.returncode == 2
            assert (
                f"in {tmp_path / 'run'} because a run is still writing into it (node 0)"
                in second.stderr
            )
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    deadline = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(tmp_path)
    while (
        not is_free(tmp_path / "run") and time.monotonic() < deadline
    ):  # a process has no name while it ends
        time.sleep(0.1)
    assert is_free(tmp_path / "run")


def test_commands_for_several_nodes_are_printed(tmp_path: Path) -> None:
    plan = written_plan(tmp_path, Case(shares=((3, 1), (2, 2))), nodes=2)
    printed = run(plan, "--dry-run", "--port", "29601").stdout
    content = json.loads(run(plan, "--dry-run", "--port", "29601", "--json").stdout)
    told, spec = content["commands"], loads_run_spec(json.dumps(content["run"]))
    assert dumps_run_spec(spec) == printed.partition("<<'END'\n")[2].partition("END\n")[0]
    assert content["run_file"] == str(spec.folder / "run.json")
    assert [one["node"] for one in told] == ["n0", "n1"]
    for rank, one in enumerate(told):
        assert (
            f"n{rank}|n{rank}.*)  # n{rank}: n{rank}.0, n{rank}.1\n  command=({one['command']}) ;;"
            in printed
        )
        place = f"--nproc-per-node 2 --nnodes 2 --rdzv-endpoint n0:29601 --rdzv-conf rank={rank} "
        assert place in one["command"]
    script = tmp_path / "job.sh"
    assert json.loads(run(plan, "--slurm", str(script), "--json").stdout)["file"] == str(script)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "#SBATCH --nodes=2" in script.read_text()
