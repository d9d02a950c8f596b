"""Complete names for the tab key, and reject unknown names with a list of the known ones."""

from __future__ import annotations

from collections.abc import Iterable


def known_name(option: str, name: str, known: Iterable[str], plural: str = "") -> str:
    """Return ``name`` if it is known; else raise ``InputError`` that lists the known names.

    ``plural`` is a word for the kind of names.
    """
    from argosy.errors import bad_input, closest

    names = [str(known_value) for known_value in known]
    if name not in names:
        expected = f"one of {f'the {plural} ' if plural else ''}{', '.join(names)}"
        raise bad_input(expected, name, option, suggestion=closest(str(name), names))
    return name


def models(incomplete: str) -> list[str]:
    """Return the completions of a model's name."""
    from argosy.workload.preset import preset_names

    return _beginning(incomplete, preset_names())


def clusters(incomplete: str) -> list[str]:
    """Return the completions of a cluster's name."""
    from argosy.cluster.file import bundled_clusters

    return _beginning(incomplete, bundled_clusters())


def plans(incomplete: str) -> list[str]:
    """Return the completions of a plan's name."""
    from argosy.plan.file import bundled_plans

    return _beginning(incomplete, bundled_plans())


def profiles(incomplete: str) -> list[str]:
    """Return the completions of a profile's name."""
    from argosy.workload.profile_file import profile_names

    return _beginning(incomplete, profile_names())


def calibrations(incomplete: str) -> list[str]:
    """Return the completions of a calibration's name."""
    from argosy.cost.calibration_file import calibration_names

    return _beginning(incomplete, calibration_names())


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    """Return bundled names and files that begin with ``incomplete``.

    Files are included because this list replaces the shell's own.
    """
    from glob import escape
    from pathlib import Path

    folder, _, begin = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else "."))
    entries = sorted(place.glob(f"{escape(begin)}*")) if incomplete else []
    return [name for name in names if name.startswith(incomplete)] + [
        str(entry) for entry in entries
    ]
