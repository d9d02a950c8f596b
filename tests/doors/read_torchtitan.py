"""torchtitan itself reads an export: its configuration manager, its mesh, its module split and its
schedule.

Then its trainer runs a step of small plans on two CPU processes. torchtitan 0.3.0 has no CPU path
of its own: ``tools/utils.py:55`` takes a machine without an accelerator for one with CUDA,
``components/metrics.py:42`` reads the card's name, and the attention of its language models has no
backward on a CPU (``config_utils.py:98`` refuses the one that has). So these three are replaced
here, as are its files of text. All that an export has a say in is torchtitan's own: configuration,
meshes, stages, schedule, sharding, loss and the training step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

LENGTH, VOCABULARY, WIDTH = 16, 64, 32


def read_config(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    import argosy_recipe
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import (
        _get_pp_rank_to_stage_indices_mapping,
        _split_module,
    )

    config = ConfigManager().parse_args(["--module", "argosy_recipe", "--config", "planned"])
    config.__post_init__()
    parallel = config.parallelism
    ranks = parallel.pipeline_parallel_degree * parallel.data_parallel_replicate_degree
    ranks *= (
        parallel.data_parallel_shard_degree
        * parallel.tensor_parallel_degree
        * parallel.context_parallel_degree
    )
    dims = ParallelDims.from_config(parallel, ranks)
    config.model_spec.model.update_from_config(config=config)
    import torch

    with torch.device("meta"):
        model = config.model_spec.model.build()
    theta = {layer.attention.rope.config.theta for layer in model.layers.values()}
    assert theta == {500_000.0}, theta
    names = [name for stage in argosy_recipe.STAGES for name in stage]
    children = {name for name, _ in model.named_modules()}
    assert set(names) <= children, sorted(set(names) - children)
    held = [
        {name for name, _ in _split_module(model, stage).named_parameters()}
        for stage in argosy_recipe.STAGES
    ]
    whole = {name for name, _ in model.named_parameters()}
    assert set.union(*held) == whole and sum(map(len, held)) == len(whole)
    stages = [
        _get_pp_rank_to_stage_indices_mapping(
            rank, dims.pp, parallel.pipeline_parallel_schedule, len(held)
        )
        for rank in range(dims.pp)
    ]
    rows = Path(parallel.pipeline_parallel_schedule_csv).read_text().splitlines()
    for mine, row in zip(stages, rows, strict=True):
        from torch.distributed.pipelining.schedules import _Action

        assert {_Action.from_str(word).stage_index for word in row.split(",")} == set(mine)


def train(folder: Path) -> None:
    """One process of two: a step of the recipe's trainer has the loss and the gradients of one
    process."""
    import torch
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics

    figures = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    monitor = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: figures, reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: monitor
    sys.path.insert(0, str(folder))
    import argosy_recipe
    from torchtitan.config.manager import ConfigManager

    argosy_recipe.model_registry = small_model
    config = ConfigManager().parse_args(["--module", "argosy_recipe", "--config", "planned"])
    config.training.seq_len, config.training.max_norm = LENGTH, 1e9
    for files in (config.tokenizer, config.dataloader):
        type(files).build = lambda self, **options: None
    trainer = config.build()
    whole = config.model_spec.model.build()
    with torch.no_grad():
        for model in (whole, *trainer.model_parts):
            for name, parameter in model.named_parameters():
                local(parameter).copy_(values(name, local(parameter)))
    count, rows = (
        trainer.num_pipeline_parallel_microbatches,
        config.parallelism.pipeline_parallel_microbatch_size,
    )
    data = batches(count * trainer.gradient_accumulation_steps, rows)
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(loss)
    trainer.step = 1
    trainer.optimizers.step = lambda: (
        None
    )  # gradients are compared; zero_grad comes first in a step
    trainer.train_step(iter(data))
    expected = 0.0
    for inputs, labels in data:
        output = whole(inputs["input"], positions=inputs["positions"])
        loss = torch.nn.functional.cross_entropy(
            output.flatten(0, 1).float(), labels.flatten()
        ) / len(data)
        loss.backward()
        expected += loss.item()
    if trainer.pp_has_last_stage:
        assert abs(losses[0] - expected) < 1e-5, (losses, expected)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = {
        name: local(weight.grad)
        for part in trainer.model_parts
        for name, weight in part.named_parameters()
    }
    wrong = [name for name in found if not is_close(found[name], wanted[name])]
    assert found and not wrong, wrong
    torch.distributed.destroy_process_group()


def small_model(flavor: str):
    """torchtitan's Llama 3 with the planned number of layers, narrow, and with an attention that a
    CPU can train."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = llama3.model_registry(flavor)
    layers = llama3._build_llama3_layers(
        n_layers=len(spec.model.layers),
        dim=WIDTH,
        n_heads=2,
        hidden_dim=2 * WIDTH,
        rope=llama3.ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=LENGTH),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = spec.model
    model.dim, model.vocab_size, model.layers = WIDTH, VOCABULARY, layers
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCABULARY, WIDTH
    model.norm.normalized_shape = WIDTH
    model.lm_head.in_features, model.lm_head.out_features = WIDTH, VOCABULARY
    return spec


def local(tensor):
    """The part of a sharded tensor that is here."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_close(gradient, wanted) -> bool:
    import torch

    return gradient is not None and torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def values(name: str, like):
    """Weights by their names, the same in every process."""
    import zlib

    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(like.shape, generator=generator) * 0.1
    return drawn + 1 if name.endswith("norm.weight") else drawn


def batches(count: int, rows: int):
    import torch

    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
        places = torch.arange(LENGTH).expand(rows, LENGTH)
        found.append(({"input": tokens[:, :-1], "positions": places}, tokens[:, 1:].contiguous()))
    return found


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
    for small in sorted(folder.glob("small-*")):
        subprocess.run([*command, str(small)], check=True, timeout=300)


if __name__ == "__main__":
    main()
