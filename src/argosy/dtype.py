"""Number formats: what a tensor element weighs, and which datasheet rate its matrix products run at."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """A number format for weights, activations and matrix products."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes of one stored element; tf32 is a way to multiply, stored as fp32.

        >>> [dtype.bytes for dtype in Dtype]
        [4, 4, 2, 2, 1]
        """
        return _BYTES[self]


_BYTES = {Dtype.FP32: 4, Dtype.TF32: 4, Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP8: 1}
