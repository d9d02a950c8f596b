"""argosy probe and argosy profile: they say what they do, keep what they have, and go on from
it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.cluster.probe_notes import ProbeNotes, read_notes
from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink, cluster_toml
from argosy.dtype import Dtype
from argosy.measure import profile_shape as shape_module
from argosy.measure.cards import card_facts
from argosy.measure.probe import probe_all
from argosy.workload.profile_file import read_profile

TINY = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 96,
}
DEVICE = ProbedDevice(
    rank=0, host="x", kind="Card", memory=1e10, memory_bandwidth=1e11, flops=((Dtype.FP32, 1e12),),
    by_size=((Dtype.FP32, 256, 1e12),), facts="driver 1, PCIe 5.0 x16",
)  # fmt: skip


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_notes_are_read_back() -> None:
    link = ProbedLink(source=0, target=1, bandwidth=1e9, latency=1e-5)
    notes = ProbeNotes(
        devices=[DEVICE], links=[link], hosts=[ProbedHost(host="x", out=1e9, into=2e9)]
    )
    again = read_notes(notes.text())
    assert (again.devices, again.links, again.hosts) == (notes.devices, notes.links, notes.hosts)
    assert again.link(0, 1) == link
    assert again.link(1, 0) is None
    again.keep_if_made_by(["x", "y"])
    assert again.devices == again.links == again.hosts == []
    assert read_notes("").devices == read_notes('{"version": 99}').devices == []


def test_what_the_driver_says_is_a_comment(tmp_path: Path) -> None:
    text = cluster_toml("probed", [DEVICE, replace(DEVICE, rank=1)], [])
    assert text.count("# driver 1, PCIe 5.0 x16\n") == 1
    (tmp_path / "c.toml").write_text(text)
    assert len(load_cluster(tmp_path / "c.toml").devices) == 2


def test_a_probe_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.measure.probe._SIZES", {"cpu": (64,)})
    told: list[str] = []
    notes = ProbeNotes(path=tmp_path / "notes.json")
    probe_all(notes, seconds=0.01, report=told.append)
    assert told == ["this machine's device"]
    again = read_notes((tmp_path / "notes.json").read_text())
    probe_all(again, seconds=0.01, report=told.append)
    assert len(told) == 1
    assert again.devices == notes.devices


def test_a_probe_under_torchrun_goes_on_from_its_notes(tmp_path: Path) -> None:
    """Two ranks; one direction of the link is in the notes, with a figure that no machine would
    measure."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    probe = [*start, "-m", "argosy", "probe", "--seconds", "0.01", "-o", "c.toml", "--json"]

    def run(*more: str) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [*probe, *more], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=120
        )
        return json.loads(done.stdout), done.stderr

    first, told = run()
    assert "measuring link 1 to 0, 2 of 2" in told
    assert [(link["source"], link["target"]) for link in first["links"]] == [(0, 1), (1, 0)]
    assert not (tmp_path / "c.toml.partial.json").exists()
    kept = {name: first[name] for name in ("devices", "hosts")} | {"version": 1}
    kept["links"] = [first["links"][0] | {"bandwidth": 123.0}]
    (tmp_path / "c.toml.partial.json").write_text(json.dumps(kept))
    again, told = run("--resume")
    assert "devices, all at once" not in told
    assert "link 0 to 1" not in told
    assert "measuring link 1 to 0" in told
    assert again["links"][0]["bandwidth"] == 123.0
    assert again["devices"] == first["devices"]
    assert load_cluster(tmp_path / "c.toml").devices


def test_resuming_needs_to_know_from_what(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "probe", "--resume")
    assert code == 2
    assert "--resume needs --output with the file of the interrupted probe" in err


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers on many threads of a busy machine wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path


PROFILE = (
    "profile",
    "--model",
    "tiny.json",
    "--samples",
    "1,2",
    "--seconds",
    "0.001",
    "--kind",
    "CPU-core",
)


def test_a_model_s_shape_is_profiled_by_width(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, *PROFILE, "--widths", "1,2,3", "-o", "p.json")
    assert code == 0
    assert out == "wrote p.json: tiny on CPU-core, 12 rows\n"
    assert "no width 3" in err
    assert "head with 2 x 32 tokens, width 2, fp32, 12 of 12" in err
    profile = read_profile(tiny / "p.json")
    assert profile.sequence_length == 32
    assert profile.measured.endswith(torch.__version__)
    assert {(row.layer, row.micro_batch, row.tensor_width, row.dtype) for row in profile.rows} == {
        (layer, samples, width, Dtype.FP32)
        for layer in ("embedding", "block", "head")
        for samples in (1, 2)
        for width in (1, 2)
    }


def test_a_profile_that_was_cut_goes_on(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = shape_module.measure_stack, 0

    def cut(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    monkeypatch.setattr(shape_module, "measure_stack", cut)
    assert command(capsys, *PROFILE, "-o", "p.json")[0] == 130
    kept = read_profile(tiny / "p.json").rows
    assert len(kept) == 3
    code, _, err = command(capsys, *PROFILE, "-o", "p.json", "--resume")
    assert code == 0
    assert "3 of 3" in err
    assert read_profile(tiny / "p.json").rows[:3] == kept
    code, _, err = command(capsys, *PROFILE, "--sequence-length", "16", "-o", "p.json", "--resume")
    assert code == 2
    assert "p.json: sequence_length: found 32, expected 16, to go on from it" in err


def test_a_program_s_profile_goes_on(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "train.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "    return model, lambda model, batch: model(batch).square().mean(), torch.ones(4, 8)\n"
    )
    call = ("profile", "train.py:build", "--seconds", "0.001", "-o", "p.json")
    assert command(capsys, *call, "--samples", "1")[0] == 0
    code, _, err = command(capsys, *call, "--samples", "1,2", "--resume")
    assert code == 0
    assert "with 1 sample," not in err
    assert "layer0 with 2 samples, 3 of 4" in err
    assert len(read_profile(tiny / "p.json").layers) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("profile",), "needs either FILE.py:build or --model"),
        (
            ("profile", "train.py:build", "--dtype", "fp32,bf16"),
            "one of fp32, bf16 and fp16 for a program",
        ),
        (("profile", "--model", "gpt2", "--widths", "0"), "whole numbers such as"),
        (("profile", "--model", "mixtral-8x7b"), "a mixture of experts"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    code, _, err = command(capsys, *arguments)
    assert code == 2
    assert says in err


def test_a_card_s_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for NVIDIA's module; without one, and where it does not answer, there are
    none."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert card_facts(0) == ""

    class NVMLError(Exception):
        pass

    fake: Any = ModuleType("pynvml")
    fake.NVMLError, fake.NVML_NVLINK_MAX_LINKS = NVMLError, 18
    fake.nvmlInit = fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    fake.nvmlDeviceGetMaxPcieLinkGeneration, fake.nvmlDeviceGetMaxPcieLinkWidth = (
        lambda card: 5,
        lambda card: 16,
    )
    fake.nvmlDeviceGetPowerManagementLimit = lambda card: 700_000
    fake.nvmlDeviceGetNvLinkState = lambda card, link: int(link < 18)
    fake.nvmlSystemGetDriverVersion = lambda: b"580.1"
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Card", (), {"uuid": "abc"})()
    )
    assert card_facts(0) == "driver 580.1, PCIe 5.0 x16, 18 NVLinks, 700 W"

    def broken() -> None:
        raise NVMLError

    fake.nvmlInit = broken
    assert card_facts(0) == ""
