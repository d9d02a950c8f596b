"""What an optimizer's update costs, over the bytes that it reads and writes once each:
``OptimizerCost.passes``.

python -m benchmarks.optimizer_update
"""

from __future__ import annotations

import time

import torch

from argosy.workload.optimizer import optimizer_bytes_per_weight

SIZE, MATRICES, STEPS = 2048, 4, 5
MAKERS = {
    "adamw": lambda held: torch.optim.AdamW(held, foreach=False),
    "momentum": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9, foreach=False),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.1, foreach=False),
    "adafactor": lambda held: torch.optim.Adafactor(held, foreach=False),
}


def seconds_per_byte(name: str) -> float:
    """CPU seconds of an update over twice the bytes of weight, gradient and state."""
    held = [torch.nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(MATRICES)]
    optimizer = MAKERS[name](held)
    for parameter in held:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    begin = time.process_time()
    for _ in range(STEPS):
        optimizer.step()
    seconds = (time.process_time() - begin) / STEPS
    return seconds / (2 * MATRICES * SIZE**2 * (8 + optimizer_bytes_per_weight(name, 4)))


def main() -> None:
    torch.set_num_threads(1)
    base = seconds_per_byte("adamw")
    for name in MAKERS:
        print(f"{name:10} {seconds_per_byte(name) / base:.2f} passes, where adamw takes 1")


if __name__ == "__main__":
    main()
