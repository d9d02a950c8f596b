"""Attention written out equals the CPU's kernel, forward and backward."""

from __future__ import annotations

import pytest
import torch

from argosy.runtime.graphs.attention import forward, fused, math_backward, math_forward

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(
    ("causal", "masked"), [(False, False), (True, False), (False, True)]
)  # the kernel takes one
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_the_kernel(causal: bool, masked: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(4))
    mask = torch.randn(2, 1, 8, 8, dtype=torch.float64) if masked else None
    out, total = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    own = math_forward(q, k, v, causal, mask, scale)
    assert torch.allclose(out, own[0], atol=1e-12) and torch.allclose(
        total.double(), own[1].double(), atol=1e-6
    )
    expected = _flash_backward(grad, q, k, v, out, total, 0.0, causal, attn_mask=mask, scale=scale)
    found = math_backward(grad, q, k, v, out, own[1], causal, mask, scale)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_kernel_of_other_devices_gives_what_the_capture_says(
    causal: bool, key_heads: int
) -> None:
    """Also where several heads of queries share one of keys, which ``q @ k`` alone cannot do."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 8, 4, dtype=torch.float64)
    k, v = (torch.randn(2, key_heads, 8, 4, dtype=torch.float64) for _ in range(2))
    expected, _ = forward(q, k, v, causal, None, 0.3)
    assert torch.allclose(fused(q, k, v, causal, None, 0.3), expected, atol=1e-12)
