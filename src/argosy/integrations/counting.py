"""Find whether a loss divides by the number of items that it is given.

The Trainer passes ``num_items_in_batch`` to the model or to ``compute_loss_func``. A loss that
divides by it is a share of the whole loss. A loss that ignores it is a mean over the part of the
batch, as of a regression or of several labels per sample.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class ReadWatch(TorchFunctionMode):
    """A mode that finds whether any function of torch gets a tensor as an argument."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.is_read = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_property = getattr(function, "__name__", "") == "__get__"
        if not self.is_read and not is_property:
            self.is_read = any(leaf is self.tensor for leaf in tree_leaves((args, kwargs)))
        return function(*args, **kwargs)
