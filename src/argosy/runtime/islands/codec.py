"""Encode the differences that islands exchange as bytes (``plan.islands.Compression``)."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.plan.islands import INT8_BLOCK, Compression

# The largest 8-bit integer that is used; -128 is not, so that the range is symmetric.
_LARGEST = 127


def encoded_size(count: int, dtype: torch.dtype, compression: Compression) -> int:
    """Return the bytes of ``count`` encoded values."""
    match compression:
        case Compression.NONE:
            return count * dtype.itemsize
        case Compression.BF16:
            return 2 * count
        case Compression.INT8:
            return count + 4 * _blocks(count)


def encode(values: Tensor, compression: Compression) -> Tensor:
    """Return a vector as bytes; for 8-bit integers each block is rounded to multiples of 1/127 of
    its largest value."""
    match compression:
        case Compression.NONE:
            return values.contiguous().view(torch.uint8)
        case Compression.BF16:
            return values.to(torch.bfloat16).view(torch.uint8)
        case Compression.INT8:
            scales = (_in_blocks(values.float()).abs().amax(1) / _LARGEST).contiguous()
            safe = scales.where(scales > 0, torch.ones_like(scales))
            integers = (
                (_in_blocks(values.float()) / safe[:, None])
                .round()
                .clamp(-_LARGEST, _LARGEST)
                .to(torch.int8)
            )
            return torch.cat(
                [scales.view(torch.uint8), integers.flatten()[: values.numel()].view(torch.uint8)]
            )


def decode(data: Tensor, count: int, dtype: torch.dtype, compression: Compression) -> Tensor:
    """Return the vector of ``count`` values that ``encode`` turned into bytes, to their
    precision."""
    match compression:
        case Compression.NONE:
            return data.view(dtype)
        case Compression.BF16:
            return data.view(torch.bfloat16).to(dtype)
        case Compression.INT8:
            size = 4 * _blocks(count)
            scales = data[:size].clone().view(torch.float32)
            integers = _in_blocks(data[size:].view(torch.int8).float())
            return (integers * scales[:, None]).flatten()[:count].to(dtype)


def _blocks(count: int) -> int:
    return -(-count // INT8_BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """Return rows of one block each, the last filled up with zeros."""
    missing = _blocks(values.numel()) * INT8_BLOCK - values.numel()
    return torch.nn.functional.pad(values, (0, missing)).view(-1, INT8_BLOCK)
