"""Run calls on Ray behind the interface of ``concurrent.futures``.

Ray takes seconds to start and sends every argument through its object store, so it pays for sweeps
that need more than one machine. A cluster that is already running (``RAY_ADDRESS``) is used as it
is and left running; otherwise Ray is started here with one CPU per worker, and stopped again.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from argosy.errors import impossible

P = ParamSpec("P")
Result = TypeVar("Result")


class RayExecutor(Executor):
    """An executor that runs calls as Ray tasks, at most ``workers`` at a time."""

    def __init__(self, workers: int) -> None:
        self.ray = _import_ray()
        self.started = not self.ray.is_initialized()
        if self.started:
            where: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
            self.ray.init(
                include_dashboard=False, log_to_driver=False, logging_level="error", **where
            )
        self._call = self.ray.remote(_call)

    def submit(
        self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[Result]:
        future: Future[Result] = self._call.remote(fn, args, kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self.started and self.ray.is_initialized():
            self.ray.shutdown()


def _call(function: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return function(*args, **kwargs)


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        remedy = 'pip install "argosy[ray]"'
        raise impossible("use --executor ray", "ray is not installed", remedy) from None
