"""Load the scenarios of ``--scenario``: the same cluster under other changes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from argosy.cli.inputs import whole_number, with_traces
from argosy.cluster.file import with_changes
from argosy.cluster.generators import GENERATORS
from argosy.cluster.topology import Cluster
from argosy.document import JsonObject
from argosy.errors import bad_input, closest

# The default time until which a generator creates changes.
_HORIZON = "10 min"


def load_scenarios(cluster: Cluster, names: Sequence[str]) -> list[Cluster]:
    """Return one cluster for each ``--scenario``; ``+`` separates several changes of one
    scenario."""
    return [_scenario(cluster, name) for name in names]


def _scenario(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster of one scenario.

    It has the forms of ``--trace``, and generators: ``EDGE=GENERATOR[:key=value,...]``.
    """
    parts = name.split("+")
    generated = [part for part in parts if _generator_of(part)]
    files = [part for part in parts if part not in generated]
    changed = (
        with_traces(cluster, files, option="--scenario") if files else with_changes(cluster, [])
    )
    if not generated:
        return changed
    changes = [_change(part) for part in generated]
    earlier = _changes_of(changed)
    return with_changes(changed, [*earlier, *changes], file="--scenario", folder=Path())


def _changes_of(cluster: Cluster) -> list[JsonObject]:
    """Return the [[changes]] of a cluster."""
    import json

    return json.loads(cluster.content).get("changes", [])


def _generator_of(part: str) -> str | None:
    """Return the generator that a part names; None for a file.

    Raises ``InputError`` for an unknown generator.
    """
    target, separator, rest = part.partition("=")
    name = rest.partition(":")[0]
    if not separator or not target or name.endswith((".csv", ".toml")):
        return None
    if name not in GENERATORS:
        expected = (
            "LINK=FILE.csv, a .toml with [[changes]], none, or one of the generators "
            f"{', '.join(GENERATORS)}"
        )
        raise bad_input(expected, part, "--scenario", suggestion=closest(name, GENERATORS))
    return name


def _change(part: str) -> JsonObject:
    """Return a [[changes]] entry for a generator.

    ``seed`` and ``horizon`` are its own fields; the rest are the generator's parameters.
    """
    target, _, rest = part.partition("=")
    name, _, listed = rest.partition(":")
    given = dict(pair.partition("=")[::2] for pair in listed.split(",") if pair)
    text, horizon = given.pop("seed", "0"), given.pop("horizon", _HORIZON)
    seed = whole_number(text)
    if seed is None:
        raise bad_input("a whole number", text, "--scenario seed")
    parameters = {key: _number(value) for key, value in given.items()}
    target_kind = "device" if name == "straggler" else "link"
    change: JsonObject = {target_kind: target, "generator": name, "seed": seed, "horizon": horizon}
    return {**change, "parameters": parameters} if parameters else change


def _number(text: str) -> float | str:
    """Return a share as a number; a time stays text with its unit."""
    try:
        return float(text)
    except ValueError:
        return text
