"""Attention of one block after the other on a GPU equals torch's attention in double precision,
and a program has the same operations there as on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from workload.attention_models import ATTENTIONS, captured_operations

from argosy.runtime.graphs import attention
from argosy.runtime.graphs.attention import Kernel
from argosy.runtime.stages.ring import _merged

TOKENS, HEADS = 200, 3


@pytest.mark.parametrize(
    ("dtype", "elements", "kernel", "tolerance"),
    [
        (torch.bfloat16, 64, Kernel.FLASH, 2e-2),
        (torch.float16, 128, Kernel.FLASH, 3e-3),
        (torch.float32, 64, Kernel.EFFICIENT, 2e-5),
        (torch.bfloat16, 264, Kernel.EFFICIENT, 2e-2),
        (torch.float64, 64, Kernel.WRITTEN_OUT, 1e-12),
        (torch.bfloat16, 20, Kernel.WRITTEN_OUT, 3e-2),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in torch's thread of backwards
@pytest.mark.parametrize("scale", [None, 0.3])
def test_two_blocks_of_keys_give_the_attention_to_both(
    dtype: torch.dtype, elements: int, kernel: Kernel, tolerance: float, scale: float | None
) -> None:
    """The first block has the queries' own positions, the second earlier ones, as in a ring."""
    torch.manual_seed(0)
    shape = (2, HEADS, TOKENS, elements)
    q, *earlier, grad = (torch.randn(shape, device="cuda").to(dtype) for _ in range(4))
    own = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    assert attention.kernel_of(q, None) is kernel

    exact = [tensor.double().requires_grad_() for tensor in (q, *earlier, *own)]
    keys, values = (torch.cat([exact[1 + at], exact[3 + at]], 2) for at in (0, 1))
    visible = torch.ones(TOKENS, 2 * TOKENS, dtype=torch.bool, device="cuda").tril(TOKENS)
    expected = F.scaled_dot_product_attention(exact[0], keys, values, visible, scale=scale)
    expected.backward(grad.double())

    blocks = [(own, True), (earlier, False)]
    merged = None
    for (k, v), causal in blocks:
        merged = _merged(merged, attention.forward(q, k, v, causal, None, scale))
    assert merged is not None
    out, total = merged[0].to(dtype), merged[1]
    results = [
        attention.backward(grad, q, k, v, out, total, causal, None, scale)
        for (k, v), causal in blocks
    ]
    gradients = [results[0][0] + results[1][0], *results[1][1:], *results[0][1:]]
    for actual, wanted in zip([out, *gradients], [expected, *(t.grad for t in exact)], strict=True):
        assert wanted is not None
        assert (actual.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_gpu_captures_the_operations_of_a_cpu(kind: str, dtype: torch.dtype) -> None:
    assert captured_operations(kind, dtype, "cuda") == captured_operations(kind, dtype, "cpu")


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_autocast_casts_the_operands_of_attention(kind: str) -> None:
    cast, attention = "aten._to_copy.default", "aten._scaled_dot_product_flash_attention_for_cpu"
    operations = captured_operations(kind, torch.float32, "cuda", torch.bfloat16)
    plain = captured_operations(kind, torch.float32, "cpu", torch.bfloat16)
    assert [op for op in operations if op.startswith(attention)] == [
        op for op in plain if op.startswith(attention)
    ]
    assert cast in operations
