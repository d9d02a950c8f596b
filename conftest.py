"""For all tests: examples take as long as a busy machine needs for them; GPUs are seen on demand; torch left out."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("argosy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("argosy")

_HEAVY = ("torch", "transformers", "ray", "selenium", "sphinx", "hta", "yt", "h5py", "numba")
_MISSING = re.compile(rf"No module named '(?:{'|'.join(_HEAVY)})\b|needs torch|argosy\[torch\]")
_WITH_TORCH = ("lab", "nbody", "runtime", "workload/capture")
"""Folders of the package whose modules may import torch."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torch-free",
        action="store_true",
        help="skip what needs torch or another package that planning does without",
    )
    parser.addoption(
        "--gpu",
        action="store_true",
        help="let tests see this machine's GPUs; without it they run as if there were none",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Doctests of modules that may need torch: half of such a module, imported in vain, would meet later tests."""
    package = config.rootpath / "src" / "argosy"
    without = config.getoption("--torch-free") and any(
        collection_path == package / name for name in _WITH_TORCH
    )
    return True if without else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that cannot be imported for want of such a package is skipped, and says which."""
    report = yield
    if collector.config.getoption("--torch-free") and report.failed:
        missing = _MISSING.search(str(report.longrepr))
        if missing is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {missing[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The same for a test that imports one, or runs a command that says so."""
    report = yield
    if item.config.getoption("--torch-free") and report.failed:
        missing = _MISSING.search(
            f"{call.excinfo.value if call.excinfo else ''}\n{report.longreprtext}"
        )
        if missing is not None:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {missing[0]}")
    return report
