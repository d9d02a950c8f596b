"""What a user got wrong ends in exit code 2 and a line that says what to do, never in a
traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

from argosy.cluster.file import bundled_clusters
from argosy.errors import InfeasibleError, RunError

FILES = {
    "list.json": "[1]",
    "broken.json": '{\n"version": 1,',
    "plain.txt": "hello",
    "ok.csv": "seconds,bandwidth\n0,25 Gbit/s\n",
    "speed.csv": "seconds,speed\n0,1\n",
    "unknown.toml": '[[changes]]\nlink = "v9.nic"\nsteps = [["0 s", "1 GB/s"]]\n',
    "misspelt.toml": '[[changes]]\nlink = "v1.nic"\nstep = [["0 s", "1 GB/s"]]\n',
}

CASES = {
    ("simulate", "missing.json"): "missing.json: there is no such file",
    ("simulate", "list.json"): "list.json:1: found a list of 1, expected a JSON object",
    (
        "simulate",
        "broken.json",
    ): "broken.json:2: found no property name enclosed in double quotes, expected valid JSON",
    (
        "simulate",
        "llama-3-8b-on-mixed-61",
    ): 'found "llama-3-8b-on-mixed-61", expected a plan.json or one of the '
    "bundled plans gpt2-xl-on-two-cards, llama-3-8b-on-mixed-16; "
    'did you mean "llama-3-8b-on-mixed-16"?',
    (
        "simulate",
        PLAN,
        "--cluster",
        "mixed",
    ): 'found "mixed", expected a cluster file or one of the bundled '
    f'clusters {", ".join(bundled_clusters())}; did you mean "mixed-8"?',
    ("simulate", PLAN, "--k", "0"): "--k: found 0, expected a whole number of at least 1",
    (
        "simulate",
        PLAN,
        "--k",
        "2",
        "--schedule",
        "1f1b",
    ): "--k cannot be combined with --schedule 1f1b; it applies to kfkb",
    (
        "simulate",
        PLAN,
        "--schedule",
        "gpipes",
    ): '--schedule: found "gpipes", expected one of the schedules gpipe, '
    '1f1b, eager-1f1b, kfkb, interleaved, zero-bubble, zero-bubble-v, dualpipe-v; did you mean "gpipe"?',
    ("simulate", PLAN, "-n", "0"): "--iterations: found 0, expected a whole number of at least 1",
    (
        "simulate",
        PLAN,
        "--iteration",
        "-1",
    ): "--iteration: found -1, expected a whole number of at least 0",
    (
        "simulate",
        PLAN,
        "--iteration",
        "3",
    ): "iteration: found 3, expected one of the 1 recorded iterations, from 0",
    ("simulate", PLAN, "--until", "120"): '--until: found "120", expected a time such as "30 s"',
    (
        "simulate",
        PLAN,
        "--trace",
        "v0.nic",
    ): '--trace: found "v0.nic", expected LINK=FILE.csv, DEVICE=FILE.csv, '
    "a .toml with [[changes]], or none",
    (
        "simulate",
        PLAN,
        "--trace",
        "v9.nic=ok.csv",
    ): '--trace: found "v9.nic", expected a link or device of '
    'mixed-16, such as a0.nic or a0.0; did you mean "v1.nic"?',
    ("simulate", PLAN, "--trace", "v0.nic=no.csv"): "no.csv: there is no such file",
    (
        "simulate",
        PLAN,
        "--trace",
        "v0.nic=speed.csv",
    ): '--trace: changes[0].trace: found "speed.csv", expected a '
    "trace with a bandwidth or latency column for a link",
    (
        "simulate",
        PLAN,
        "--trace",
        "unknown.toml",
    ): 'unknown.toml:2: changes[0].link: found "v9.nic", expected an '
    'edge of the cluster, such as a0.nic, a0.nvlink, a0.pcie, a1.nic; did you mean "v1.nic"?',
    (
        "simulate",
        PLAN,
        "--trace",
        "misspelt.toml",
    ): "misspelt.toml:3: changes[0].step: found an unknown field, "
    "expected one of the fields device, generator, horizon, latency_steps, link, parameters, seed, steps, trace; "
    'did you mean "steps"?',
    (
        "simulate",
        PLAN,
        "-o",
        "plain.txt/x.json",
    ): 'Cannot write plain.txt/x.json because the system reports "Not a directory". '
    "Try another file.",
    ("trace", "missing.json"): "missing.json: there is no such file",
    ("cluster", "check", "nowhere.toml"): "nowhere.toml: there is no such file",
    (
        "cluster",
        "show",
        "geo8",
    ): 'found "geo8", expected a cluster file or one of the bundled clusters '
    f'{", ".join(bundled_clusters())}; did you mean "geo-8"?',
}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_message(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    quiet = ["--quiet"] if arguments[0] != "cluster" else []
    result = run(*arguments, *quiet)
    assert result.err == f"error: {CASES[arguments]}\n"
    assert result.code == 2
    assert result.out == ""


def test_every_problem_has_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 2, "micro_batch_size": 0}')
    lines = run("simulate", "plan.json").err.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("error: plan.json") for line in lines)


def test_plan_on_a_foreign_cluster_names_the_file(run: Run) -> None:
    result = run("simulate", PLAN, "--cluster", "geo-8")
    assert result.code == 2
    assert result.err.splitlines()[0] == (
        f"error: {PLAN}.json:294: stages[0].replicas[0].devices: "
        'found "a0.0", expected a device of geo-8; did you mean "east0.0"?'
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfeasibleError("nothing fits"), 3),
        (RunError("rank 3 died"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("argosy.cli.catalogue.devices.catalogue", fail)
    result = run("devices")
    assert result.code == code
    assert result.err == ("" if code == 130 else f"error: {error}\n")
