"""Hash what determines the initial values of a model, without making them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from argosy.workload.capture.initial import (
    Borrowed,
    Recording,
    StorageWindow,
    is_recorded,
    place_of,
    storage_of,
)


def described(leaf: Any) -> bytes:
    """Return the content of a value, equal in every process; only the type of a value that is
    neither an array nor plain."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"{leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes()
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        # A copy, because numpy would prevent the storage of the original from being resized.
        plain = leaf.detach().cpu().contiguous().clone()
        head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
        return head + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    plain_types = (
        str,
        bytes,
        int,
        float,
        complex,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
    )
    return (repr(leaf) if isinstance(leaf, plain_types) else type(leaf).__name__).encode()


def initial_digest(recording: Recording, module: nn.Module) -> str:
    """Return a hash of everything that determines the initial values of a module: equal hashes mean
    equal values."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    numbers: dict[int, int] = {}

    def content(leaf: Any) -> bytes:
        leaf = leaf.tensor if isinstance(leaf, Borrowed) else leaf
        place = place_of(leaf) if is_recorded(leaf) else leaf
        if not isinstance(place, StorageWindow):
            return described(place)
        # Storages are numbered, because addresses differ between processes.
        number = numbers.setdefault(place.storage, len(numbers))
        return f"{number} {place.dtype} {place.shape} {place.stride} {place.offset}".encode()

    digest = hashlib.sha256()
    for step in recording.needed({storage_of(tensor) for _, tensor in tensors if tensor.is_meta}):
        name = (
            str(step.function)
            if isinstance(step.function, OpOverload)
            else step.function.__qualname__
        )
        leaves = tree_iter((step.arguments, step.keywords, step.made, step.random_state))
        digest.update(b"\n".join([name.encode(), *map(content, leaves)]))
    for name, tensor in tensors:
        digest.update(name.encode() + content(tensor))
    return digest.hexdigest()
