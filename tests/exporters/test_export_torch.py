"""Plans for torch.distributed.pipelining: the exported module runs on two processes, its gradients
are those of one, and its loss is that of Argosy's own runtime by the same plan."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from exporters.target_readers import plan, with_stage
from torch import nn

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.exporters.torch import export_torch
from argosy.plan.plan import Plan, Recompute
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_model

CHAIN = load_model("llama-3-8b", sequence_length=2048)
SPECS = {
    "1f1b": ScheduleSpec(),
    "gpipe": ScheduleSpec(kind=ScheduleKind.GPIPE),
    "kfkb": ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    "eager": ScheduleSpec(kind=ScheduleKind.EAGER),
    "depths": ScheduleSpec(kind=ScheduleKind.EAGER, depth=(4, 1)),
    "zero-bubble": ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    "interleaved": ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
}
VOCABULARY, WIDTH, SAMPLES, MICRO_BATCHES = 11, 8, 2, 4


def small_plan(name: str) -> Plan:
    """Two processes: three layers and one, or in turns under an interleaved schedule; stage 0
    recomputes."""
    if name == "replicas":
        return plan(
            [4], hosts=("a0",), width=1, data=2, samples=SAMPLES, micro_batches=MICRO_BATCHES
        )
    is_woven = name == "interleaved"
    ends, hosts = ([1, 2, 3, 4], ("a0", "a1", "a0", "a1")) if is_woven else ([3, 4], ("a0", "a1"))
    made = plan(
        ends,
        hosts=hosts,
        width=1,
        data=1,
        samples=SAMPLES,
        micro_batches=MICRO_BATCHES,
        schedule=SPECS[name],
    )
    made = with_stage(made, 0, recompute=Recompute.FULL)
    return replace(made, model=replace(made.model, dtype=Dtype.FP32))


class Head(nn.Module):
    """Logits by the table of the embedding, which is another stage's."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.weight.T


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    table = nn.Embedding(VOCABULARY, WIDTH)
    return [
        table,
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        Head(table),
    ]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    rows = SAMPLES * MICRO_BATCHES * 2
    return torch.randint(VOCABULARY, (rows, 3)), torch.randint(VOCABULARY, (rows, 3))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def load(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("argosy_pipeline", folder / "argosy_pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(rank: int, folder: Path, kind: str) -> None:
    """One of two processes: every export in turn; the gradients of its layers as files."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    inputs, targets = (values.to(device) for values in batch())
    for name in (*SPECS, "replicas"):
        module, mine = load(folder / name), [layer.to(device) for layer in layers()]
        pipeline = module.Pipeline(mine, loss_fn, device=device)
        rows = len(inputs) // 2
        part = slice(pipeline.replica * rows, (pipeline.replica + 1) * rows)
        loss = pipeline.step(inputs[part] if 0 in pipeline.stages else None, targets[part])
        found = {
            f"{index}.{key}": None if parameter.grad is None else parameter.grad.cpu()
            for stage in pipeline.stages
            for index in range(module.CUTS[stage], module.CUTS[stage + 1])
            for key, parameter in mine[index].named_parameters()
        }
        shown = None if loss is None else float(loss.detach())
        own = own_loss(name) if kind == "cpu" else shown
        torch.save((found, shown, own), folder / name / f"{rank}.pt")
    dist.destroy_process_group()


def own_loss(name: str) -> float:
    """The loss of a step of Argosy's own runtime by the same plan; on every rank of it."""
    made = small_plan(name)
    inputs, targets = (values[: made.global_batch] for values in batch())
    rows = {"x": inputs, "y": targets}
    trainer = parallelize(
        nn.Sequential(*layers()),
        lambda model, part: loss_fn(model(part["x"]), part["y"]),
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        rows,
        made,
    )
    return trainer.step(rows)


def alone(parts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of the first ``parts`` halves of the batch, computed at once."""
    whole = layers()
    rows = SAMPLES * MICRO_BATCHES * parts
    inputs, targets = (values[:rows] for values in batch())
    loss = loss_fn(nn.Sequential(*whole)(inputs), targets)
    loss.backward()
    named = {
        f"{at}.{key}": value.grad
        for at, layer in enumerate(whole)
        for key, value in layer.named_parameters()
    }
    return float(loss.detach()), {name: grad for name, grad in named.items() if grad is not None}


def check_exports(folder: Path, kind: str) -> None:
    """Let torch run every export on two processes, and compare with one process."""
    for name in (*SPECS, "replicas"):
        (folder / name).mkdir()
        for file, text in export_torch(small_plan(name), CHAIN).files:
            (folder / name / file).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, __file__, str(rank), str(folder), kind] for rank in range(2)]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands
    ]
    said = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    for name in (*SPECS, "replicas"):
        # A plan in bf16 runs under autocast.
        loose = 0.05 if name == "replicas" else {"cpu": 1e-6, "cuda": 1e-5}[kind]
        loss, expected = alone(2 if name == "replicas" else 1)
        found = [torch.load(folder / name / f"{rank}.pt") for rank in range(2)]
        grads = {key: grad for one, _, _ in found for key, grad in one.items()}
        assert set(grads) == set(expected)
        for key, grad in grads.items():
            assert torch.allclose(grad, expected[key], rtol=loose, atol=loose), (name, key)
        (shown, *_) = [one for _, one, _ in found if one is not None]
        assert shown == pytest.approx(loss, rel=max(loose, 1e-5)), name
        own = [one for _, _, one in found if one is not None]
        assert own == pytest.approx([shown] * len(own), rel=max(loose, 1e-5))


def test_torch_runs_every_schedule_with_the_gradients_of_one_process(tmp_path: Path) -> None:
    check_exports(tmp_path, "cpu")


def test_what_it_has_no_words_for() -> None:
    with pytest.raises(
        InputError, match=r"stages\[0\].width: found 2, expected at most 1: torch splits no further"
    ):
        export_torch(plan([13, 26, 30, 34]), CHAIN, lossy=True)
    with pytest.raises(
        InputError, match=r"stages.zero: found 1/0/0/0, expected 0 for all stages in torch"
    ):
        export_torch(with_stage(plan([13, 26, 30, 34], width=1), 0, zero=1), CHAIN)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
