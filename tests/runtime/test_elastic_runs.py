"""Elastic runs on real processes: what is lost comes back, and the losses are those of one
process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.elastic_cases import PROGRAM, ElasticRun, losses_alone

from argosy.runtime.state.checkpoint import read_state_dict


def test_the_command_goes_on_after_a_member_of_a_group_was_killed(tmp_path: Path) -> None:
    """A tensor-parallel group over two hosts."""
    run = ElasticRun(tmp_path, hosts=2, is_grouped=True)
    command = [
        sys.executable,
        "-m",
        "argosy",
        "run",
        str(tmp_path / "plan.json"),
        f"{PROGRAM}:build",
    ]
    command += [
        "--elastic",
        "--here",
        "--steps",
        "6",
        "--out",
        str(run.run),
        "--any-device",
        "--json",
    ]
    command += ["--adapt", "k", "--model", str(tmp_path / "costs" / "config.json")]
    environment = {
        **os.environ,
        **run.environment,
        "DEATH": str(tmp_path / "died"),
        "ELASTIC_TEST": run.mark,
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr + run.told()
    assert json.loads(done.stdout)["losses"] == pytest.approx(losses_alone(6), rel=1e-7)
    assert "h1.0: was killed by SIGKILL" in done.stderr
    assert "generation 2 (h1.0 was killed by SIGKILL): h0.0, h1.0 from step " in done.stderr
    assert "step 5  loss" in done.stderr
    assert read_state_dict(run.run / "checkpoints" / "step-00000006")
    again = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 2
    assert "the run there is over (6 steps done). Try another --out, or --resume" in again.stderr
    assert not run.processes()
    command[command.index("6")] = "7"
    more = subprocess.run(
        [*command, "--resume"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert more.returncode == 0, more.stderr + run.told()
    assert len(json.loads(more.stdout)["losses"]) == 1
    assert list(dict.fromkeys(line["step"] for line in run.lines())) == list(range(7)), (
        "what was told is kept"
    )
    run.await_(lambda: not run.processes(), 20)


@pytest.mark.parametrize(
    ("shared", "chain"),
    [
        ("sequence", False),
        pytest.param("sequence", True, marks=pytest.mark.exhaustive),
        pytest.param("experts", False, marks=pytest.mark.exhaustive),
        pytest.param("experts", True, marks=pytest.mark.exhaustive),
        pytest.param("sequence experts", False, marks=pytest.mark.exhaustive),
        pytest.param("sequence experts", True, marks=pytest.mark.exhaustive),
    ],
)
def test_what_devices_share_survives_a_killed_worker_and_a_lost_host(
    tmp_path: Path, shared: str, chain: bool
) -> None:
    """With known costs, the smaller plan is searched for; otherwise two holders are left of
    three."""
    sharing: dict[str, Any] = {f"shares_{what}": True for what in shared.split()}
    with ElasticRun(tmp_path, hosts=3, steps=9, gate=3, chain=chain, adapt="off", **sharing) as run:
        run.start()
        run.await_step(3)
        assert run.kill_worker("h1")
        again = run.await_event("generation", generation=2)
        assert again["devices"] == ["h0.0", "h1.0", "h2.0"]
        assert again["base"] == "copies"
        run.open_gate(6)
        run.await_step(6)
        run.kill_host("h1")
        assert run.await_event("generation", generation=3)["devices"] == ["h0.0", "h2.0"]
        run.open_gate(9)
        run.await_end()
        run.check(survivors=["h0", "h2"])


def test_hosts_are_lost_come_back_and_are_told_to_go(tmp_path: Path) -> None:
    """Whatever each generation's controller makes of it."""
    with ElasticRun(tmp_path, hosts=3, steps=16, gate=4, adapt="full") as run:
        run.start()
        run.await_step(4)
        run.kill_host("h1")
        smaller = run.await_event("generation", generation=2)
        assert smaller["devices"] == ["h0.0", "h2.0"]
        assert smaller["base"] == "copies"
        assert smaller["why"].startswith("h1 was lost")
        run.open_gate(8)
        run.await_step(8)
        run.start("h1")
        run.await_(lambda: sum(event["host"] == "h1" for event in run.events("joined")) == 2, 240)
        run.open_gate(12)
        wider = run.await_event("generation", generation=3)
        assert wider["why"] == "h1 came"
        assert wider["devices"] == ["h0.0", "h1.0", "h2.0"]
        assert wider["repeats"] is None, "a host that comes is taken in between two steps"
        run.await_step(12)
        run.tell_to_go("h0")
        run.await_event("pausing", why="h0 leaves")
        run.open_gate(16)
        run.await_end()
        last = run.events("generation")[-1]
        assert last["by"] == "h1", "the next host leads"
        assert last["hosts"] == ["h1", "h2"]
        assert last["repeats"] is None, "a host that is told to go takes nothing with it"
        run.check()


def test_a_host_with_other_options_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, hosts=2, steps=6, gate=3) as run:
        run.start()
        run.await_step(3)
        run.kill_host("h1")
        run.await_event("generation", generation=2)
        run.settings["seed"] = 1
        run.start("h1")
        sentence = "--seed: found 1 on h1, expected 0, as on h0"
        assert run.await_event("refused", host="h1")["why"] == sentence
        run.await_(lambda: run.agents["h1"].poll() is not None, 60)
        assert run.agents["h1"].returncode == 2
        assert (tmp_path / "agent-h1.log").read_text() == f"{sentence}\n"
        run.open_gate(6)
        run.await_end()
        run.check(survivors=["h0"])


def test_told_to_go_all_together_and_started_again(tmp_path: Path) -> None:
    """The checkpoint that they leave is gone on from; without costs, too."""
    with ElasticRun(tmp_path, hosts=2, steps=8, gate=3, chain=False, copy_every=2) as run:
        run.start()
        run.await_step(3)
        for host in run.hosts:
            run.tell_to_go(host)
        run.await_event("leaving", host="h1")
        run.await_event("pausing")
        run.open_gate(8)
        run.await_end()
        done = run.lines()[-1]["step"] + 1
        assert [path.name for path in (run.run / "checkpoints").iterdir()] == [f"step-{done:08d}"]
        run.start()
        run.await_end()
        assert run.events("generation")[-1]["base"] == "checkpoint"
        run.check()


def test_a_fault_of_the_program_ends_the_job(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, hosts=1, environment={"FAULT": "no such shard"}) as run:
        run.start()
        run.await_end()
        assert run.agents["h0"].returncode == 4
        assert "h0.0: KeyError: 'no such shard' (" in (tmp_path / "agent-h0.log").read_text()
        assert len(run.events("generation")) == 1
