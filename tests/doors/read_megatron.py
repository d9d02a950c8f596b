"""Megatron-LM itself reads an export: its argument parser, its checks, its layout of layers and its
model config.

The parser is not part of megatron-core; a checkout of the same version is given as the second
argument.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def started(script: Path, host: str) -> list[str]:
    """The words behind ``torchrun`` on a host, as bash sees them."""
    text = "torchrun() { printf '%s\\0' \"$@\"; }\n" + script.read_text()
    environment = {**os.environ, "ARGOSY_HOST": host}
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.split("\0")[:-1]


def main() -> None:
    folder, source, ranks, host, layers = sys.argv[1:6]
    sys.path.append(source)  # megatron.core is that of pip
    words = started(Path(folder) / "planned" / "megatron.sh", host)
    sys.argv = words[words.index("pretrain_gpt.py") :]
    os.environ.update(WORLD_SIZE=ranks, RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: 9  # there is no GPU to ask
    args = arguments.parse_args()
    written = {word[2:].replace("-", "_") for word in sys.argv if word.startswith("--")}
    args.tokenizer_type, args.train_iters, args.lr = "NullTokenizer", 1, 1e-4
    arguments.validate_args(args)
    assert args.rotary_base == 500_000 and args.accumulate_allreduce_grads_in_fp32, written
    args.transformer_impl, args.apply_rope_fusion = "local", False  # Transformer Engine needs a GPU
    config = arguments.core_transformer_config_from_args(args)
    config.__post_init__()
    layout = config.pipeline_model_parallel_layout
    assert sum(
        len(layout.get_layer_id_list(pp_rank=rank))
        for rank in range(args.pipeline_model_parallel_size)
    ) == int(layers)


if __name__ == "__main__":
    main()
