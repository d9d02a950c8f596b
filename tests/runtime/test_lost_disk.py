"""An elastic run outlives a full disk, the removal of its folder and a torn checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime.elastic_cases import ElasticRun, losses_alone

STEPS = 16


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 16 MiB; skips the test where none may be mounted."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "argosy-test", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def test_a_run_outlives_a_full_disk_a_removed_folder_and_a_torn_checkpoint(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    environment = {"REACHED": str(reached)}
    run = ElasticRun(tmp_path, hosts=2, steps=STEPS, gate=3, save_every=2, environment=environment)
    saved = run.run / "checkpoints"
    with small_disk(run.run), run:
        run.start()
        run.await_((saved / "step-00000002").exists, 240)
        fill(run.run / "filler")
        run.open_gate(7)
        run.await_(lambda: reached.read_text() == "7", 240)
        (run.run / "filler").unlink()
        run.open_gate(9)
        run.await_((saved / "step-00000008").exists, 240)
        run.await_event("not written")
        run.await_step(9)
        why = run.events("not written")[0]["why"]
        assert "the checkpoint of step 4 could not be written into " in why
        assert "No space left on device" in why
        assert [line["step"] for line in run.lines()] == list(range(9)), (
            "lines wait until they can be written"
        )

        for path in run.run.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elastic = run.run / "elastic"
        names = ["token", "generation-000001.json", "hosts/h0.json", "hosts/h1.json"]
        run.await_(lambda: all((elastic / name).exists() for name in names), 240)
        run.open_gate(13)
        run.await_((saved / "step-00000012").exists, 240)

        for host in run.hosts:
            run.kill_host(host)
        torn = next((saved / "step-00000012").glob("__1_*"))
        torn.write_bytes(torn.read_bytes()[:-1])
        run.start()
        again = run.await_event("generation", generation=2)
        assert (again["base"], again["step"]) == ("checkpoint", 10)
        [skipped] = run.events("skipped")
        assert skipped["checkpoint"] == "step-00000012"
        assert skipped["why"].startswith(f"{torn.name} has ")
        run.open_gate(STEPS)
        run.await_end()
        assert [agent.returncode for agent in run.agents.values()] == [0, 0], run.told()
        alone = losses_alone(STEPS)
        final = {line["step"]: line["loss"] for line in run.lines()}
        assert sorted(final) == list(range(9, STEPS)), "what was removed is gone, and nothing else"
        assert [final[step] for step in sorted(final)] == pytest.approx(alone[9:], rel=1e-7)
        assert sorted(path.name for path in elastic.iterdir()) == ["outcome.json"]
        assert [path.name for path in sorted(saved.iterdir())] == ["step-00000014", "step-00000016"]
