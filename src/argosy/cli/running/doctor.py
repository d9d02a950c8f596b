"""Run ``argosy doctor``: check what is installed and what works here, and suggest fixes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

from argosy.cli.options import Json, Quiet, Width
from argosy.cli.terminal import print_json, progress, stdout_console

PACKAGES = {
    "numpy": ("planning and simulating", "argosy"),
    "highspy": ("exact ratios in a stage", "argosy"),
    "torch": ("run, probe, profile", "argosy[torch]"),
    "transformers": ("Hugging Face Trainers by a plan", "argosy[hf]"),
    "accelerate": ("Hugging Face Trainers by a plan", "argosy[hf]"),
    "numba": ("nbody", "argosy[nbody]"),
    "scipy": ("nbody", "argosy[nbody]"),
    "h5py": ("snapshots of nbody", "argosy[nbody]"),
    "pynvml": ("cards' facts in probe", "nvidia-ml-py"),
    "hta": ("reading traces", "HolisticTraceAnalysis"),
}
"""The purpose of each package by import name, and what installs it."""
# Packages whose distribution has another name.
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "hta": "HolisticTraceAnalysis"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A package or feature that was checked."""

    what: str
    works: bool
    found: str
    needed_for: str
    to_do: str = ""
    """How to make it work; empty if it works."""


def doctor(json: Json = False, width: Width = None, quiet: Quiet = False) -> None:
    """Check what is installed and what works here; suggest fixes.

    Tests features by using them: a network namespace, a share of a core, every GPU, gloo and NCCL.

    \b
    Example:
        argosy doctor
        argosy doctor --json
    """
    from argosy.report.tables import plain_table

    with progress("trying what works here", quiet=quiet):
        findings = list(look())
    if json:
        print_json("doctor", {"findings": [asdict(finding) for finding in findings]})
        return
    console = stdout_console(width)
    table = plain_table("works", "what", "found", "needed for")
    for finding in findings:
        table.add_row(
            "yes" if finding.works else "no", finding.what, finding.found, finding.needed_for
        )
    console.print(table)
    missing = [finding for finding in findings if not finding.works]
    console.print("\neverything works" if not missing else "\nwhat to do, for what you need:")
    for finding in missing:
        console.print(f"  {finding.what}: {finding.to_do}", markup=False)


def look() -> Iterator[Finding]:
    """Check everything in order."""
    version = sys.version.split()[0]
    yield Finding(what="python", works=True, found=version, needed_for="everything")
    for module, (purpose, package) in PACKAGES.items():
        yield _package(module, purpose, package)
    if importlib.util.find_spec("torch") is not None:
        yield from _torch()
    yield from _lab()
    browser = next(
        (path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None
    )
    yield Finding(
        what="browser",
        works=browser is not None,
        found=browser or "none",
        needed_for="tests of reports",
        to_do="" if browser else "apt install chromium chromium-driver",
    )


def _package(module: str, purpose: str, package: str) -> Finding:
    """Check whether a package is installed."""
    there = importlib.util.find_spec(module) is not None
    try:
        version = metadata.version(_DISTRIBUTIONS.get(module, module)) if there else "not installed"
    except metadata.PackageNotFoundError:
        version = "installed"
    to_do = "" if there else f"pip install '{package}'"
    return Finding(what=module, works=there, found=version, needed_for=purpose, to_do=to_do)


def _torch() -> Iterator[Finding]:
    """Check GPUs and the backends of torch."""
    from argosy.measure.torch_check import cards, why_backend_fails

    try:
        usable, to_do = cards(), "a GPU that torch can use: a driver, and torch built for it"
    except RuntimeError as error:
        usable, to_do = [], f"a driver that fits torch ({str(error).splitlines()[0]})"
    names = ", ".join(f"{usable.count(name)}x {name}" for name in dict.fromkeys(usable)) or "none"
    purpose = "running on GPUs"
    yield Finding(
        what="GPU",
        works=bool(usable),
        found=names,
        needed_for=purpose,
        to_do="" if usable else to_do,
    )
    for backend, purpose in (("gloo", "running on CPUs"), ("nccl", "running on several GPUs")):
        why = why_backend_fails(backend)
        to_do = "" if why is None else f"torch with {backend}, and what it needs ({why})"
        yield Finding(
            what=backend, works=why is None, found=why or "works", needed_for=purpose, to_do=to_do
        )


def _lab() -> Iterator[Finding]:
    """Check whether this machine can have a network lab and shares of cores."""
    from argosy.lab.system import why_no_core_share, why_not

    for feature, why, purpose in (
        ("network lab", why_not(), "lab: shaped links"),
        ("core shares", why_no_core_share(), "lab: slower devices"),
    ):
        works = why is None
        yield Finding(
            what=feature, works=works, found=why or "works", needed_for=purpose, to_do=why or ""
        )
