"""Number formats: what a tensor element weighs, and which datasheet rate its matrix products run
at."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """A number format for weights, activations and matrix products.

    fp8 is mixed precision as training systems have it: the projections of blocks are multiplied in
    fp8; attention, the embedding, the head, what is kept and what is sent are bf16.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes of one stored element; tf32 and fp8 are ways to multiply, stored as fp32 and bf16.

        >>> [dtype.bytes for dtype in Dtype]
        [4, 4, 2, 2, 2]
        """
        return _BYTES[self]

    @property
    def stored(self) -> Dtype:
        """The format of what is not multiplied in this one: under fp8 everything but the
        projections of blocks."""
        return _STORED.get(self, self)


_BYTES = {Dtype.FP32: 4, Dtype.TF32: 4, Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP8: 2}
_STORED = {Dtype.FP8: Dtype.BF16}
