"""Sum gradients by PowerSGD (arXiv 1905.13727): send two factors of low rank in place of the
matrix, and keep errors.

For a matrix of gradients G_i on holder i, with its error E_i and the columns Q of the previous
step, which are equal on all holders:

    (1)  D_i = G_i + E_i
    (2)  P   = orthonormal columns of the sum over i of D_i Q
    (3)  Q   = sum over i of Q_i, with Q_i = D_i^T P
    (4)  E_i = D_i - P Q_i^T
    (5)  the sum of gradients is P Q^T

Everything but (2) is linear in D_i, so that (5) and all later steps depend on the sums of G_i and
of E_i alone, not on how samples or errors are divided among holders: one process that does (1) to
(5) with the whole gradient gets the same. The first Q is drawn from the weight's name. Vectors, and
matrices whose factors would be as large, are summed unchanged, in one message with (2). A step in
which no holder has a gradient of a weight leaves its error unchanged.

Errors are in units of the sum that the trainer divides by the step's weight (``weighing``).
Checkpoints contain them by holder, and a run with another number of holders divides them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.runtime.processes.world import await_device
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.summing import Way
from argosy.workload.powersgd import is_factored

_PREFIX = "powersgd"
"""The beginning of the names of errors and columns in a checkpoint."""


@dataclass
class _Matrix:
    """A weight whose gradients are summed as two factors."""

    name: str
    parameter: Tensor
    error: Tensor
    """The error E_i."""
    columns: Tensor
    """The columns Q."""

    @classmethod
    def of(cls, weight: Weight, rank: int) -> _Matrix:
        parameter = weight.parameter
        rows, dtype = parameter.shape[0], torch.promote_types(parameter.dtype, torch.float32)
        seed = int.from_bytes(hashlib.sha256(weight.name.encode()).digest()[:4], "big")
        generator = torch.Generator().manual_seed(seed)
        columns = torch.randn(
            parameter.numel() // rows, rank, generator=generator, dtype=torch.float64
        )
        return cls(
            name=weight.name,
            parameter=parameter,
            error=torch.zeros(rows, len(columns), dtype=dtype, device=parameter.device),
            columns=columns.to(parameter.device, dtype),
        )

    def entries(self, holder: int) -> dict[str, Tensor]:
        """Return its entries in a checkpoint; the columns are equal on all holders."""
        names = (f"{_PREFIX}.error.{self.name}.{holder}", f"{_PREFIX}.columns.{self.name}")
        return dict(zip(names, (self.error, self.columns), strict=True))


class FactoredSum:
    """The sum of the gradients of weights that the same ranks hold; it replaces
    ``overlap.GradientSum``."""

    def __init__(
        self, way: Way, weights: Sequence[Weight], rank: int, holder: int, num_holders: int
    ) -> None:
        """Prepare a sum; ``rank`` is that of the factors, and ``holder`` is this rank's index among
        those that hold the weights."""
        self.way, self.holder, self.num_holders = way, holder, num_holders
        trained = [weight for weight in weights if weight.parameter.requires_grad]
        self.parameters = [weight.parameter for weight in trained]
        factored = [weight for weight in trained if is_factored(weight.parameter.shape, rank)]
        self.matrices = [_Matrix.of(weight, rank) for weight in factored]
        known = {id(matrix.parameter) for matrix in self.matrices}
        self.others = [parameter for parameter in self.parameters if id(parameter) not in known]

    def before_last_backward(self, stage: int) -> None:
        """Do nothing, since the sum begins only after all gradients are computed."""

    def after_last_backward(self, stage: int) -> None:
        """Do nothing, since the sum begins only in ``finish``."""

    def close(self) -> None:
        """Do nothing, since no hooks were attached to the weights."""

    def finish(self) -> None:
        """Sum gradients by (1) to (5); a weight of which no holder has a gradient has none
        afterwards."""
        if not self.parameters:
            return
        flags = [float(parameter.grad is not None) for parameter in self.parameters]
        holders = torch.tensor(flags, device=self.parameters[0].device)
        self.way.begin(holders).wait()
        await_device(holders.device, "while gradients were summed")
        pairs = zip(self.parameters, holders.tolist(), strict=True)
        unused = {id(parameter) for parameter, count in pairs if not count}
        matrices = [matrix for matrix in self.matrices if id(matrix.parameter) not in unused]
        others = [_gradient(parameter) for parameter in self.others if id(parameter) not in unused]
        for matrix in matrices:  # (1)
            gradient = _gradient(matrix.parameter)
            matrix.error += gradient.view(matrix.error.shape)
        products = [matrix.error @ matrix.columns for matrix in matrices]
        sums = self._summed([*products, *others])
        for gradient, total in zip(others, sums[len(products) :], strict=True):
            gradient.copy_(total)
        bases = [torch.linalg.qr(total).Q for total in sums[: len(products)]]  # (2)
        own = [matrix.error.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        for matrix, basis, mine, total in zip(matrices, bases, own, self._summed(own), strict=True):
            matrix.columns = total  # (3)
            matrix.error -= basis @ mine.T  # (4)
            gradient = _gradient(matrix.parameter)
            gradient.copy_((basis @ total.T).view(gradient.shape))  # (5)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors over all holders, sent in one message."""
        if not tensors:
            return []
        dtype = torch.float32
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        vector = torch.cat([tensor.flatten().to(dtype) for tensor in tensors])
        self.way.begin(vector).wait()
        await_device(vector.device, "while gradients were summed")
        parts = vector.split([tensor.numel() for tensor in tensors])
        return [
            part.view(tensor.shape).to(tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries that this rank adds to a checkpoint."""
        for matrix in self.matrices:
            yield from matrix.entries(self.holder).items()

    def wanted(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return tensors to read stored entries into, by name: columns of the same rank, and this
        holder's share of errors."""
        tensors: dict[str, Tensor] = {}
        for matrix in self.matrices:
            prefix = f"{_PREFIX}.error.{matrix.name}."
            holders = {
                name: name.removeprefix(prefix) for name in stored if name.startswith(prefix)
            }
            for name, holder in holders.items():
                if holder.isdecimal() and int(holder) % self.num_holders == self.holder:
                    tensors[name] = torch.empty_like(matrix.error)
            columns = f"{_PREFIX}.columns.{matrix.name}"
            if stored.get(columns) == tuple(matrix.columns.shape):
                tensors[columns] = torch.empty_like(matrix.columns)
        return tensors

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Continue with the values that the tensors of ``wanted`` were filled with."""
        for matrix in self.matrices:
            prefix = f"{_PREFIX}.error.{matrix.name}."
            errors = [values[name] for name in sorted(values) if name.startswith(prefix)]
            matrix.error.zero_()
            for error in errors:
                matrix.error += error
            matrix.columns = values.get(f"{_PREFIX}.columns.{matrix.name}", matrix.columns)


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of this rank; if it has none, set it to zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
