"""torchtitan itself reads an export: its configuration manager, its mesh, its module split and its schedule."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1]) / "planned"
    sys.path.insert(0, str(folder))
    import argosy_recipe
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping, _split_module

    config = ConfigManager().parse_args(["--module", "argosy_recipe", "--config", "planned"])
    config.__post_init__()
    parallel = config.parallelism
    ranks = parallel.pipeline_parallel_degree * parallel.data_parallel_replicate_degree
    ranks *= parallel.data_parallel_shard_degree * parallel.tensor_parallel_degree * parallel.context_parallel_degree
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
    held = [{name for name, _ in _split_module(model, stage).named_parameters()} for stage in argosy_recipe.STAGES]
    whole = {name for name, _ in model.named_parameters()}
    assert set.union(*held) == whole and sum(map(len, held)) == len(whole)
    stages = [
        _get_pp_rank_to_stage_indices_mapping(rank, dims.pp, parallel.pipeline_parallel_schedule, len(held))
        for rank in range(dims.pp)
    ]
    rows = Path(parallel.pipeline_parallel_schedule_csv).read_text().splitlines()
    for mine, row in zip(stages, rows, strict=True):
        from torch.distributed.pipelining.schedules import _Action

        assert {_Action.from_str(word).stage_index for word in row.split(",")} == set(mine)


if __name__ == "__main__":
    main()
