"""Small builds of three programs that are no chains, for processes that share a few cores."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.program_models import Towers, Unet, language_loss, squared


def unet() -> Any:
    return Unet(8), squared, torch.randn(32, 3, 32, 32)


def towers() -> Any:
    return Towers(512, 6), squared, (torch.randn(64, 512), torch.randn(64, 512))


def t5() -> Any:
    config = transformers.T5Config(
        d_model=96,
        d_kv=24,
        d_ff=384,
        num_layers=3,
        num_heads=4,
        vocab_size=1000,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    ids = torch.randint(1, 1000, (32, 32))
    model = transformers.T5ForConditionalGeneration(config)
    return model, language_loss, {"input_ids": ids, "labels": ids}


BUILDS = {"U-Net": unet, "two towers": towers, "T5": t5}


def built(name: str) -> Any:
    """Return a model, its loss and its batch, with the same values in every process."""
    torch.manual_seed(0)
    return BUILDS[name]()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def one_process(name: str, steps: int) -> list[float]:
    """Return the losses of a plain loop."""
    model, loss_fn, batch = built(name)
    updates, losses = optimizer(model.parameters()), []
    for _ in range(steps):
        updates.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        updates.step()
        losses.append(float(loss.detach()))
    return losses
