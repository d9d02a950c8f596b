"""Define the number formats: bytes per stored element, and the datasheet rate of matrix
products."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """A number format that weights, activations and matrix products may have.

    fp8 means mixed precision as in training systems: the projections of blocks are multiplied in
    fp8; attention, the embedding and the head, and everything that is stored or sent, are in bf16.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    # That of enumerations is written in Python, and searches look bytes up by this.
    __hash__ = str.__hash__

    @property
    def bytes(self) -> int:
        """Return the bytes of one stored element; tf32 and fp8 are ways to multiply, stored as fp32
        and bf16.

        >>> [dtype.bytes for dtype in Dtype]
        [4, 4, 2, 2, 2]
        """
        return _BYTES[self]

    @property
    def stored(self) -> Dtype:
        """Return the format of everything that is not multiplied in this one: bf16 for fp8, in
        which only the projections of blocks are multiplied."""
        return _STORED.get(self, self)


# Bytes of one stored element.
_BYTES = {Dtype.FP32: 4, Dtype.TF32: 4, Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP8: 2}
# Formats that are stored in another one.
_STORED = {Dtype.FP8: Dtype.BF16}
