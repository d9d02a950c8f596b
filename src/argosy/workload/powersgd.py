"""Count what PowerSGD (arXiv 1905.13727) sums: gradients as matrices of low rank. It is opt-in,
because it changes training.

A weight of n rows and m columns, more dims taken together as columns, is summed as two factors of
rank r:

    (1)  elements summed = r (n + m) if that is fewer than n m; else, and for vectors, all of them

``runtime.weights.powersgd`` has the algorithm. Attention is priced with separate matrices for
queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from argosy.errors import excluded
from argosy.workload.architecture import Architecture, Head, PatchEmbedding, TokenEmbedding
from argosy.workload.chain import Chain
from argosy.workload.finetune import block_matrices

_Matrix = tuple[int, int, int]
"""Rows, columns and count of a matrix."""


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Return whether the gradient of a weight is summed as two factors.

    >>> is_factored((768, 3072), 4), is_factored((768,), 4), is_factored((6, 8), 4)
    (True, False, False)
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    return 0 < rank * (rows + columns) < rows * columns


def summed_elements(shape: Sequence[int], rank: int) -> int:
    """Return the number of elements summed (1).

    >>> summed_elements((768, 3072), 4), summed_elements((768,), 4)
    (15360, 768)
    """
    if not is_factored(shape, rank):
        return math.prod(shape)
    return rank * (shape[0] + math.prod(shape[1:]))


def factored_chain(chain: Chain, architecture: Architecture, rank: int) -> Chain:
    """Return the chain of an architecture whose gradients are summed by PowerSGD."""
    if not chain.tuning.is_full:
        raise excluded("--powersgd", f"{chain.tuning.options}: all weights must be trained")
    layers = tuple(
        replace(
            layer,
            summed_parameters=layer.parameters - _saved(matrices, rank) if layer.parameters else 0,
        )
        for layer, matrices in zip(chain.layers, _matrices_by_layer(architecture), strict=True)
    )
    return replace(chain, layers=layers, powersgd=rank)


def _saved(matrices: Iterator[_Matrix], rank: int) -> int:
    """Return the number of elements of matrices that are not summed."""
    return sum(
        copies * (rows * columns - summed_elements((rows, columns), rank))
        for rows, columns, copies in matrices
    )


def _matrices_by_layer(architecture: Architecture) -> Iterator[Iterator[_Matrix]]:
    """Yield the matrices of each layer, in the order of ``workload.transformer.build_chain``."""
    hidden = architecture.hidden
    yield _embedding_matrices(architecture.embedding, hidden)
    for block in architecture.encoder:
        yield (
            (matrix.rows, matrix.columns, matrix.copies) for matrix in block_matrices(block, hidden)
        )
    if architecture.encoder:
        yield iter(())
    for block in architecture.blocks:
        yield (
            (matrix.rows, matrix.columns, matrix.copies) for matrix in block_matrices(block, hidden)
        )
    yield _head_matrices(architecture.head, hidden)


def _embedding_matrices(
    embedding: TokenEmbedding | PatchEmbedding, hidden: int
) -> Iterator[_Matrix]:
    if isinstance(embedding, PatchEmbedding):
        yield hidden, embedding.values, 1
        yield embedding.patches + 1, hidden, 1
        return
    yield embedding.vocabulary, embedding.width, 1
    if embedding.width != hidden:
        yield hidden, embedding.width, 1
    yield from (
        (rows, hidden, 1) for rows in (embedding.position_rows, embedding.token_types) if rows
    )


def _head_matrices(head: Head, hidden: int) -> Iterator[_Matrix]:
    yield from (
        (hidden, hidden, 1) for has in (head.transform is not None, head.pooled_classes > 0) if has
    )
    if head.width != hidden:
        yield head.width, hidden, 1
    if not head.tied:
        yield head.outputs, head.width, 1
