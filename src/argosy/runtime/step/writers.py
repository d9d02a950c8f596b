"""Write the metrics of each step to CSV, TensorBoard or Weights & Biases.

    trainer.callbacks.append(CsvWriter("metrics.csv"))

A callback is any function of a ``StepMetrics``. It is called on every rank; writers write on rank 0
alone.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from argosy.errors import RunError


class StepMetrics(NamedTuple):
    """Figures of a training step that is done, on one rank."""

    rank: int
    step: int
    """The number of the step, from 0."""
    loss: float
    """The mean over the whole batch."""
    seconds: float
    samples: int
    """The samples of the whole batch."""
    gradient_norm: float | None
    """The norm before clipping; None if it was not computed."""
    learning_rates: tuple[float, ...]
    """Learning rates by group of this rank's parameters."""

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    def figures(self) -> dict[str, float]:
        """Return figures by the names under which writers write them."""
        figures = {
            "loss": self.loss,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
        }
        if self.gradient_norm is not None:
            figures["gradient_norm"] = self.gradient_norm
        if self.learning_rates:
            figures["learning_rate"] = self.learning_rates[0]
        return figures


Callback = Callable[[StepMetrics], None]
"""A function that is called after every step, on every rank."""


class CsvWriter:
    """A writer that adds one row per step, with the columns of the first step. Rows are appended to
    a file that exists."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.columns: list[str] = []

    def __call__(self, metrics: StepMetrics) -> None:
        if metrics.rank != 0:
            return
        row = {"step": metrics.step, **metrics.figures()}
        is_new = not self.path.exists() or self.path.stat().st_size == 0
        if not self.columns:
            self.columns = list(row) if is_new else self._columns_of_file()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def _columns_of_file(self) -> list[str]:
        with self.path.open(newline="") as file:
            return next(csv.reader(file))


class TensorBoardWriter:
    """A writer of scalars to a folder that TensorBoard reads; needs the package ``tensorboard``."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.writer: Any = None

    def __call__(self, metrics: StepMetrics) -> None:
        if metrics.rank != 0:
            return
        if self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise RunError(
                    "TensorBoardWriter needs tensorboard; pip install tensorboard"
                ) from None
            self.writer = SummaryWriter(str(self.folder))
        for name, value in metrics.figures().items():
            self.writer.add_scalar(name, value, metrics.step)
        self.writer.flush()


class WandbWriter:
    """A writer to a run of Weights & Biases that ``wandb.init(**options)`` begins; needs the
    package ``wandb``."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.run: Any = None

    def __call__(self, metrics: StepMetrics) -> None:
        if metrics.rank != 0:
            return
        if self.run is None:
            try:
                import wandb
            except ImportError:
                raise RunError("WandbWriter needs wandb; pip install wandb") from None
            self.run = wandb.init(**self.options)
        self.run.log(metrics.figures(), step=metrics.step)
