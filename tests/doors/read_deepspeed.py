"""DeepSpeed itself reads an export: its config class, and its pipeline engine on two CPU processes.

The program of each process trains four linear layers, cut unevenly, and compares the loss and the
weights after one step with those of a plain loop in one process.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"


def read_config(folder: Path) -> None:
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.comm.get_rank = lambda: 0  # there are no other processes
    content = json.loads((folder / "ds_config.json").read_text())
    ranks = content["train_batch_size"] // (
        content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
    )
    config = DeepSpeedConfig(
        content, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: ranks)
    )
    assert config.train_batch_size == content["train_batch_size"]
    assert config.gradient_accumulation_steps == content["gradient_accumulation_steps"]
    assert config.zero_config.stage == content["zero_optimization"]["stage"]


def load(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("argosy_pipeline", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(folder: Path) -> None:
    """One process of two."""
    import deepspeed
    import deepspeed.comm.torch
    import torch

    # Gloo alone: what DeepSpeed has beside it would have to be compiled.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    module = load(folder / "argosy_pipeline.py")
    config = json.loads((folder / "ds_config.json").read_text())
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    config["zero_allow_untested_optimizer"] = True
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(module.CUTS[-1])]
    whole = torch.nn.Sequential(*layers)
    batch, count = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    data = [(torch.randn(batch, 8), torch.randn(batch, 8)) for _ in range(count)]
    loss_fn = torch.nn.functional.mse_loss
    alone = copy.deepcopy(whole)
    expected = sum(loss_fn(alone(x), y) for x, y in data) / count
    expected.backward()
    expected = expected.detach()
    pipeline = module.PlannedPipeline(layers, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(
        model=pipeline, model_parameters=pipeline.parameters(), config=config
    )
    loss = engine.train_batch(iter(data))
    assert abs(float(loss) - float(expected)) < 1e-5, (float(loss), float(expected))
    first, end = module.CUTS[pipeline.stage_id], module.CUTS[pipeline.stage_id + 1]
    for index in range(first, end):
        mine, other = (
            layers[index].weight.data,
            alone[index].weight.data - 0.1 * alone[index].weight.grad,
        )
        assert torch.allclose(mine, other, atol=1e-5), index
    torch.distributed.barrier()  # a process that ends first would abort the other
    torch.distributed.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        train(folder)
        return
    read_config(folder / "planned")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
    ]
    for small in folder.glob("small"):
        subprocess.run([*command, str(small)], check=True, timeout=300)


if __name__ == "__main__":
    main()
