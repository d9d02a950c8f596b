"""What a training script gets wrong is named before it costs anything, and what it defines is
used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.run_cases import written_plan
from torch.utils.data import DataLoader

from argosy.cli.running.run_checks import check_steps
from argosy.errors import InputError
from argosy.runtime.job.program import check_loader, check_program, load_program
from argosy.runtime.processes.manifest import write_manifest
from argosy.runtime.processes.run_spec import RunSpec
from argosy.runtime.sources.optimizing import make_updating

BUILD = "import torch\nfrom torch import nn\ndef build(): ...\n"
LOADER = "torch.utils.data.DataLoader([1, 2])"


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(BUILD + text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "biuld",
            "",
            'train.py: found no function "biuld", expected build(); did you mean "build"?',
        ),
        ("build", "def f(:\n", "train.py:4: found SyntaxError"),
    ],
)
def test_a_file_is_read_before_a_process_is_started(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = script(tmp_path, text)
    words = [sys.executable, "-m", "argosy", "run", str(written_plan(tmp_path)), f"{path}:{name}"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "run").exists(), "nothing was started"


@pytest.mark.parametrize(
    "text",
    [
        "from other import train",
        "if True:\n    def train(): ...",
        "train = build",
        "from other import *",
        "globals()['train'] = build",
        "for train in [build]: pass",
    ],
)
def test_a_function_may_come_about_in_any_way(tmp_path: Path, text: str) -> None:
    check_program(f"{script(tmp_path, text)}:train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)",
            "optimizer: found an object of class SGD, expected a f",
        ),
        (
            "opt = torch.optim.SGD([torch.zeros(1)], 0.1)",
            "opt: found an object of class SGD, expected a function o",
        ),
        (
            "optimizer = 3",
            "optimizer: found an object of class int, expected a function optimizer(parameters)",
        ),
        (
            "scheduler = 'cosine'",
            "scheduler: found an object of class str, expected a function scheduler(optimizer)",
        ),
        (
            f"train_loader = {LOADER}",
            "train_loader: found a DataLoader that is not used, expected its name to be data",
        ),
        (
            f"data = iter({LOADER})",
            "data: found a _SingleProcessDataLoaderIter, which can be read only once, exp",
        ),
        (
            "data = {'x': 1}",
            "data: found an object of class dict, expected a function data(step), or an iterable",
        ),
        (
            "data = torch.zeros(3)",
            "data: found an object of class Tensor, expected a function data(step), or an iter",
        ),
        (
            "callbacks = print",
            "callbacks: found builtin_function_or_method, expected a list of functions",
        ),
        (
            "def optimiser(parameters): ...",
            "optimiser: found a function that nothing calls, expected the name in o",
        ),
        (
            "def lr_scheduler(optimizer): ...",
            "lr_scheduler: found a function that nothing calls, expected the name i",
        ),
        (
            "callback = [print]",
            "callback: found functions that nothing calls, expected the name in callbacks = [",
        ),
        (
            "lr_scheduler = lambda optimizer: None",
            "lr_scheduler: found a function that nothing calls, expected the name i",
        ),
        (
            "def callback(metrics): ...",
            "callback: found a function that nothing calls, expected the name in callbacks = [",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_program(str(script(tmp_path, text)), trains=True)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils import data",
        "from torch.optim import lr_scheduler",
        "def make_optimizer(p): ...\ndef optimizer(p): return make_optimizer(p)",
        "def schedule(x): ...\nLIMIT = schedule(3)",
        f"loader = {LOADER}\ndef data(step): return loader",
        "import functools\noptimizer = functools.partial(torch.optim.SGD, lr=0.1)\ncallbacks = [print]",
    ],
)
def test_what_is_meant_so_is_taken(tmp_path: Path, text: str) -> None:
    load_program(str(script(tmp_path, text)), trains=True)


@pytest.mark.parametrize(("size", "is_refused"), [(8, False), (None, False), (4, True)])
def test_a_loader_of_other_batches_is_refused(
    tmp_path: Path, size: int | None, is_refused: bool
) -> None:
    """A loader with half the plan's batch would train on half of it in every step."""
    loader = f"data = torch.utils.data.DataLoader([1] * 16, batch_size={size})"
    program = load_program(str(script(tmp_path, loader)), trains=True)
    if not is_refused:
        check_loader(program, 8)
        return
    message = "data: found a DataLoader with batch_size=4, expected batch_size=8, the plan's global"
    with pytest.raises(InputError, match=message):
        check_loader(program, 8)


def test_a_scheduler_that_is_not_returned_is_refused() -> None:
    """A forgotten ``return`` would leave the learning rate as it is."""
    named = [("weight", torch.nn.Parameter(torch.zeros(2)))]
    with pytest.raises(InputError, match=r'scheduler\(optimizer\): found "NoneType", expected a'):
        make_updating(torch.optim.SGD, lambda optimizer: None, named, 0)  # type: ignore


TRAINED = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, {folder!r})
from runtime.loop_cases import batch_of, masked, model_of, sgd, warm_up

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = batch_of(14, seed=9)
    def __len__(self):
        return 14
    def __getitem__(self, at):
        return {{key: value[at] for key, value in self.rows.items()}}

def build():
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(11, 8), *blocks, nn.Linear(8, 11))
    return model, masked, batch_of(8)

def optimizer(parameters):
    made = torch.optim.SGD(parameters, lr=0.2)
    return made, warm_up(made)

data = DataLoader(Rows(), batch_size=8, shuffle=True)
from argosy.runtime.step.writers import CsvWriter
callbacks = [CsvWriter({csv!r})]
"""


def test_a_script_with_loader_scheduler_and_callbacks_trains_resumes_and_counts_steps(
    tmp_path: Path,
) -> None:
    """Two stages; batches of 8 and 6, masked unevenly; resumed in the middle of an epoch."""
    from runtime.loop_cases import masked, warm_up

    from argosy.runtime.step.loading import BatchStream

    folder, csv = str(Path(__file__).parents[1]), str(tmp_path / "metrics.csv")
    path, plan = tmp_path / "train.py", written_plan(tmp_path)
    path.write_text(TRAINED.format(folder=folder, csv=csv))

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = [
            sys.executable,
            "-m",
            "argosy",
            "run",
            str(plan),
            str(path),
            "--out",
            str(tmp_path / "run"),
        ]
        words += ["--here", "--any-device", "--seed", "4", "--quiet", "--json", *options]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)

    first, more = run("--steps", "3"), run("--steps", "5", "--resume")
    assert first.returncode == 0, first.stderr
    assert more.returncode == 0, more.stderr
    losses = [*json.loads(first.stdout)["losses"], *json.loads(more.stdout)["losses"]]
    over = run("--steps", "5", "--resume")
    assert over.returncode == 2
    assert (
        "--steps: found 5, expected more than the 5 that the run has done: steps are those of"
        in over.stderr
    )
    program: Any = load_program(str(path), trains=True)
    torch.manual_seed(4)
    model, _, _ = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    rates, stream, wanted = warm_up(optimizer), BatchStream(program.data, seed=4), []
    assert isinstance(program.data, DataLoader)
    for step in range(5):
        loss = masked(model, stream(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert len(Path(csv).read_text().splitlines()) == 6


def test_steps_are_those_of_the_whole_run(tmp_path: Path) -> None:
    spec = RunSpec(plan="p", program="t.py", out=str(tmp_path), steps=4, resume=True)
    check_steps(spec)
    saved = tmp_path / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    write_manifest(saved, {"steps": 4, "scale": 1.0, "aliases": {}}, {})
    with pytest.raises(
        InputError, match="--steps: found 4, expected more than the 4 that the run has done"
    ):
        check_steps(spec)
