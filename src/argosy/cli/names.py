"""Names: those that the tab key completes (what comes with Argosy, and files), and what is said of
one that is none."""

from __future__ import annotations

from collections.abc import Iterable


def known_name(option: str, name: str, known: Iterable[str], what: str = "") -> str:
    """``name``, or an error that lists what there is; ``what`` says of what sort."""
    from argosy.errors import bad_input, closest

    names = [str(one) for one in known]
    if name not in names:
        expected = f"one of {f'the {what} ' if what else ''}{', '.join(names)}"
        raise bad_input(expected, name, where=option, suggestion=closest(name, names))
    return name


def models(incomplete: str) -> list[str]:
    from argosy.workload.preset import preset_names

    return _beginning(incomplete, preset_names())


def clusters(incomplete: str) -> list[str]:
    from argosy.cluster.file import bundled_clusters

    return _beginning(incomplete, bundled_clusters())


def plans(incomplete: str) -> list[str]:
    from argosy.plan.file import bundled_plans

    return _beginning(incomplete, bundled_plans())


def profiles(incomplete: str) -> list[str]:
    from argosy.workload.profile_file import profile_names

    return _beginning(incomplete, profile_names())


def calibrations(incomplete: str) -> list[str]:
    from argosy.cost.calibration_file import calibration_names

    return _beginning(incomplete, calibration_names())


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    """Bundled names, and files as the shell would offer them: an own list takes the place of the
    shell's."""
    from glob import escape
    from pathlib import Path

    folder, _, begin = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else "."))
    entries = sorted(place.glob(f"{escape(begin)}*")) if incomplete else []
    return [name for name in names if name.startswith(incomplete)] + [
        str(entry) for entry in entries
    ]
