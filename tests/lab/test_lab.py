"""A real lab: namespaces, shaped traffic, shares of a core, and nothing left behind. Needs root and
a kernel that has them."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.errors import InputError, RunError
from argosy.lab import Lab
from argosy.lab import lab as labs
from argosy.lab.record import FOLDER, prefix_of, records
from argosy.lab.system import namespaces, why_no_core_share, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no lab here: {REASON}"),
    pytest.mark.flaky(reruns=4),  # it measures real time
]
NO_SHARES = REASON or why_no_core_share()
needs_shares = pytest.mark.skipif(
    NO_SHARES is not None, reason=f"no shares of a core here: {NO_SHARES}"
)
PROGRAMS = str(Path(__file__).with_name("lab_programs.py"))


def cluster_of(folder: Path, *nodes: str, more: str = "") -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(
        'name = "test"\n' + "".join(f"[[nodes]]\n{node}\n" for node in nodes) + more,
        encoding="utf-8",
    )
    return load_cluster(str(path))


def host(name: str, rate: str, kind: str = "CPU-core", efficiency: float = 1.0) -> str:
    return (
        f'name = "{name}"\ndevices = {{ kind = "{kind}", efficiency = {efficiency} }}\n'
        f'nic = {{ bandwidth = "{rate}" }}\n'
    )


def traces_left(lab: Lab) -> list[str]:
    """Whatever a lab has left on the machine."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{lab.prefix}*")]
    files = [str(path) for path in FOLDER.glob(f"{lab.name}.*")]
    return [*namespaces(lab.prefix), *groups, *files]


def traffic(lab: Lab, seconds: int) -> list[float]:
    job = lab.run([sys.executable, PROGRAMS, "traffic", str(seconds)], timeout=60)
    return [float(line) for line in job.output["a0.0"]]


def test_traffic_has_the_rate_that_the_file_says(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, host("a", "200 Mbit/s"), host("b", "40 Mbit/s"))
    with Lab(cluster, shares=False) as lab:
        rates = traffic(lab, 3)
        assert statistics.median(rates) == pytest.approx(40, rel=0.15)
        lab.change("a0.nic", 10e6 / 8)
        job = lab.start([sys.executable, PROGRAMS, "traffic", "3"])
        with job:
            job.wait(60)
        assert statistics.median(float(line) for line in job.output["a0.0"]) == pytest.approx(
            10, rel=0.15
        )
    assert traces_left(lab) == []


def test_two_senders_share_the_receivers_nic(tmp_path: Path) -> None:
    cluster = cluster_of(
        tmp_path, host("a", "40 Mbit/s"), host("b", "100 Mbit/s"), host("c", "100 Mbit/s")
    )
    with Lab(cluster, shares=False) as lab:
        assert statistics.median(traffic(lab, 3)) == pytest.approx(40, rel=0.15)


def test_a_link_between_two_sides_is_shared(tmp_path: Path) -> None:
    wan = '[[links]]\nbetween = ["a*", "b*"]\nname = "wan"\nbandwidth = "20 Mbit/s"\n'
    cluster = cluster_of(
        tmp_path, host("a", "100 Mbit/s"), host("b", "100 Mbit/s") + "count = 2\n", more=wan
    )
    with Lab(cluster, shares=False) as lab:
        assert statistics.median(traffic(lab, 3)) == pytest.approx(20, rel=0.15)


def test_links_follow_their_traces_while_a_job_runs(tmp_path: Path) -> None:
    steps = '[[changes]]\nlink = "b0.nic"\nsteps = [["0 s", "80 Mbit/s"], ["3 s", "10 Mbit/s"]]\n'
    cluster = cluster_of(tmp_path, host("a", "200 Mbit/s"), host("b", "80 Mbit/s"), more=steps)
    with Lab(cluster, shares=False) as lab:
        rates = traffic(lab, 6)
    assert rates[1] == pytest.approx(80, rel=0.15)
    assert rates[-1] == pytest.approx(10, rel=0.25)


@needs_shares
def test_devices_get_shares_of_a_core_by_their_speed(tmp_path: Path) -> None:
    slow = host("b", "100 Mbit/s", efficiency=0.25)
    with Lab(cluster_of(tmp_path, host("a", "100 Mbit/s"), slow)) as lab:
        assert lab.share_of("a0.0") == pytest.approx(4 * lab.share_of("b0.0"))
        source = str(Path(labs.__file__).parents[2])
        job = lab.run(
            [sys.executable, PROGRAMS, "spin", "2"], environment={"PYTHONPATH": source}, timeout=60
        )
        for device in (
            "a0.0",
            "b0.0",
        ):  # other work on the machine can take from it, nothing can add to it
            assert (
                0.2 * lab.share_of(device)
                < float(job.output[device][-1])
                < 1.15 * lab.share_of(device)
            )
    assert traces_left(lab) == []


def test_a_worker_that_fails_is_named_and_the_others_end(tmp_path: Path) -> None:
    lab = Lab(cluster_of(tmp_path, host("a", "100 Mbit/s"), host("b", "100 Mbit/s")), shares=False)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"b0.0 ended with exit code 1\n  rank 1 gives up"), lab:
        lab.run([sys.executable, PROGRAMS, "fail"])
    assert time.monotonic() - began < 30
    assert traces_left(lab) == []


def test_a_device_at_speed_0_loses_its_processes(tmp_path: Path) -> None:
    lab = Lab(cluster_of(tmp_path, host("a", "100 Mbit/s"), host("b", "100 Mbit/s")), shares=False)
    sleeping = [sys.executable, PROGRAMS, "sleep"]
    with (
        pytest.raises(RunError, match=r"b0.0 was killed|b0.0 ended with"),
        lab,
        lab.start(sleeping) as job,
    ):
        while not all(lab._processes(device) for device in ("a0.0", "b0.0")):
            time.sleep(0.05)
        lab.change("b0.0", 0.0)
        job.wait(60)
    assert traces_left(lab) == []


def test_a_job_that_does_not_end_is_ended(tmp_path: Path) -> None:
    lab = Lab(cluster_of(tmp_path, host("a", "100 Mbit/s")), shares=False)
    with pytest.raises(RunError, match=r"a0.0 did not end within 1 s"), lab:
        lab.run([sys.executable, PROGRAMS, "sleep"], timeout=1)
    assert traces_left(lab) == []


@needs_shares
def test_two_labs_of_one_cluster_do_not_collide(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, host("a", "50 Mbit/s"), host("b", "50 Mbit/s"))
    with Lab(cluster, name="test-one") as one, Lab(cluster, name="test-one-2") as two:
        built = traces_left(two)
        with pytest.raises(InputError, match="because it is already running"):
            Lab(cluster, name="test-one").up()
        labs.down("test-one")
        assert traces_left(one) == []
        assert traces_left(two) == built != []
    assert traces_left(one) == traces_left(two) == []


@needs_shares
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_its_owner_ends(tmp_path: Path, number: signal.Signals) -> None:
    """After Ctrl-C at once; after kill -9 at the next ``sweep``, which every ``up`` does."""
    cluster_of(tmp_path, host("a", "50 Mbit/s"), host("b", "50 Mbit/s"))
    script = (
        "import signal, sys; from argosy.cluster.file import load_cluster; from argosy.lab import Lab\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have\n"
        f"with Lab(load_cluster({str(tmp_path / 'cluster.toml')!r}), name='test-owner') as lab:\n"
        f"    print('up', flush=True); lab.run([sys.executable, {PROGRAMS!r}, 'sleep'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(labs.__file__).parents[2])}
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert owner.stdout is not None and owner.stderr is not None
    assert owner.stdout.readline() == "up\n", owner.communicate(timeout=30)
    time.sleep(0.5)
    owner.send_signal(number)
    owner.wait(30)
    owner.stdout.close()
    owner.stderr.close()
    lab = next((record for record in records() if record.name == "test-owner"), None)
    if number is signal.SIGKILL:
        assert lab is not None
        assert lab.is_orphan
        assert "test-owner" in labs.sweep()
    assert namespaces(prefix_of("test-owner")) == []
    assert all(record.name != "test-owner" for record in records())
    ended = subprocess.run(
        ["pgrep", "-f", f"{PROGRAMS} sleep"], capture_output=True, text=True, check=False
    )
    assert ended.stdout == ""


@needs_shares
def test_probing_a_lab_finds_its_links_and_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(labs.__file__).parents[2]))
    slow = host("b", "40 Mbit/s", efficiency=0.25)
    measured = tmp_path / "probed.toml"
    with (
        Lab(cluster_of(tmp_path, host("a", "80 Mbit/s"), slow), name="test-probe"),
        pytest.raises(SystemExit) as stop,
    ):
        main(["probe", "--lab", "test-probe", "--seconds", "0.2", "-o", str(measured), "-q"])
    assert stop.value.code == 0, capsys.readouterr().err
    probed = load_cluster(str(measured))
    assert len(probed.devices) == 2
    route = probed.fastest(probed.devices[0].name, probed.devices[-1].name, 1e9)
    assert 8e-6 * probed.bandwidth(route).at(0) == pytest.approx(40, rel=0.15)
    if os.getloadavg()[0] < 2 * (
        os.cpu_count() or 1
    ):  # on a busier machine all get the same little
        assert min(device.efficiency for device in probed.devices) < 0.6


def test_probing_finds_a_nic_that_is_wider_than_its_peers(tmp_path: Path) -> None:
    """Two peers of 40 Mbit/s each cannot fill the third's NIC alone; both at once show what it
    shares between them."""
    measured = tmp_path / "probed.toml"
    hosts = host("a", "60 Mbit/s"), host("b", "40 Mbit/s"), host("c", "40 Mbit/s")
    with Lab(cluster_of(tmp_path, *hosts), shares=False) as lab:
        worker = [
            sys.executable,
            "-m",
            "argosy.measure.probe_worker",
            "probed",
            "0.3",
            str(measured),
        ]
        lab.run(
            worker, environment={"PYTHONPATH": str(Path(labs.__file__).parents[2])}, timeout=120
        )
    rates = sorted(
        {
            link.edge: 8e-6 * link.bandwidth.at(0) for link in load_cluster(str(measured)).links
        }.values()
    )
    assert rates == pytest.approx([40, 40, 60], rel=0.15)
