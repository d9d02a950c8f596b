"""FlagScale itself reads an export: its runner makes the commands of every host, its parser reads
the arguments.

The second argument is a checkout of FlagScale, the third one of the Megatron-LM that it patches,
with the patch of its argument parser applied.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace


def arguments_of(folder: Path, checkout: str) -> tuple[list[str], list[dict[str, object]]]:
    """The training arguments, and the hosts, as FlagScale's runner has them."""
    sys.path.insert(0, checkout)
    os.chdir(folder)
    from flagscale.runner import runner_train
    from omegaconf import OmegaConf

    config = OmegaConf.load("train_hetero.yaml")
    runner = runner_train.SSHTrainRunner(config)
    commands = []

    def keep(host, address, port, nodes, rank, processes, **rest):
        commands.append(
            {"host": host, "rank": rank, "processes": processes, "kind": rest["device_type"]}
        )

    for rank, (host, resource) in enumerate(runner.resources.items()):
        around = (
            runner.user_envs,
            config.experiment.runner,
            len(runner.resources),
            "127.0.0.1",
            29500,
            False,
            True,
        )
        runner_train.run_node(keep, rank, host, resource, *around)
        assert commands[-1]["processes"] == resource["slots"]
    return runner.user_args, commands


def main() -> None:
    folder, checkout, megatron = sys.argv[1:4]
    words, hosts = arguments_of(Path(folder).resolve() / "planned", checkout)
    sys.path.insert(0, megatron)
    sys.argv = ["train_gpt.py", *words]
    ranks = sum(host["processes"] for host in hosts)
    os.environ.update(WORLD_SIZE=str(ranks), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.modules.setdefault("flagcx", ModuleType("flagcx"))
    from megatron.training import arguments

    args = arguments.parse_args()
    import torch
    from flagscale.train.arguments import FSTrainArguments

    # The ranks in the order of hetero_device_types: the runner has started hosts in that order
    # already.
    order = [args.hetero_device_types.index(host["kind"]) for host in hosts]
    assert order == sorted(order), order
    seen = []
    for rank in range(ranks):
        torch.distributed.get_rank = lambda rank=rank: rank
        mine = SimpleNamespace(**vars(args))
        mapper = SimpleNamespace(to_logical_ranks=lambda ranks: ranks)
        checked = FSTrainArguments(mine, rank_mapper=mapper)
        checked.pre_validate_args()
        seen.append(mine.micro_batch_size * mine.data_parallel_size)
        checked.post_validate_args()
    assert len(set(seen)) == 1, "every mesh takes the whole micro-batch"


if __name__ == "__main__":
    main()
