"""Define what training systems do differently with a model's activations and tensors."""

from __future__ import annotations

from enum import StrEnum


class Selective(StrEnum):
    """A meaning that selective recomputation has: training systems compute different results
    again."""

    ELEMENTWISE = "elementwise"
    """Results without a matrix product: norms, activation functions, unfused scores; as Argosy's
    runtime."""
    ATTENTION = "attention"
    """Only scores of unfused attention, as Megatron-LM's core attention; nothing if attention is
    fused."""
    PRODUCTS = "products"
    """Everything except every second matrix product and attention, as torchtitan's selective op."""
    PRODUCTS_ALONE = "products-alone"
    """Also attention: torchtitan's selective op until December 2025 did not keep the results of
    cuDNN's attention, which it uses on Blackwell."""


class Buffers(StrEnum):
    """A training system whose temporary tensors are counted in memory."""

    ARGOSY = "argosy"
    TORCHTITAN = "torchtitan"
    """Frees logits before their backward, splits the loss over the vocabulary, keeps the weights of
    embedding and head gathered, and sums gradients in fp32."""
    TORCHTITAN_2025 = "torchtitan-2025"
    """As torchtitan since August 2025, which keeps only the weights of the head gathered."""

    @property
    def is_torchtitan(self) -> bool:
        return self is not Buffers.ARGOSY
