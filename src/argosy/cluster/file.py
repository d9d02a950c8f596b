"""Read cluster files, and replace the changes of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from argosy.bundled import Bundled
from argosy.cluster.build import Builder
from argosy.cluster.changes import apply_change
from argosy.cluster.fitted import fitted
from argosy.cluster.schema import ClusterSchema
from argosy.cluster.topology import Cluster, canonical
from argosy.document import Document, JsonObject, is_there, parse_json, read_toml, validate
from argosy.errors import InputError, Problem, bad_input, closest, raise_any

# Largest number of changes of a cluster. An entry of [[changes]] counts once for every edge or
# device that its pattern matches.
_MOST_CHANGES = 100_000


_BUNDLED = Bundled("clusters", ".toml")
# Returns the names of the clusters that come with the package.
bundled_clusters = _BUNDLED.names


def load_cluster(source: str | Path) -> Cluster:
    """Read a cluster from a TOML file, or a bundled cluster by its name (``mixed-16``)."""
    if not is_there(source):
        names = bundled_clusters()
        if str(source) in names:
            return build_cluster(_BUNDLED.read(str(source)), folder=Path())
        if Path(source).suffix != ".toml":
            expected = f"a cluster file or one of the bundled clusters {', '.join(names)}"
            raise bad_input(expected, str(source), suggestion=closest(str(source), names))
    return build_cluster(read_toml(source), folder=Path(source).parent)


@lru_cache(maxsize=4)  # commands call it again and again, and a long trace takes seconds to parse
def cluster_from_content(content: str) -> Cluster:
    """Build a cluster from the canonical JSON in ``Cluster.content``."""
    return build_cluster(replace(parse_json(content, file="cluster"), lines={}), folder=Path())


def build_cluster(document: Document, *, folder: Path) -> Cluster:
    """Build a cluster from a parsed file; the traces that it names are read from ``folder``."""
    schema = validate(document, ClusterSchema)
    stated = cluster = Builder(schema, document).build()
    written: list[JsonObject] = []
    problems: list[Problem] = []
    for index, change in enumerate(schema.changes):
        try:
            entry = document.inside("changes", index)
            cluster, steps = apply_change(cluster, change, entry, stated=stated, folder=folder)
            written += steps
        except InputError as error:
            problems += error.problems
        if len(written) > _MOST_CHANGES:
            most = f"at most {_MOST_CHANGES} edges and devices that change"
            expected = f"{most}, counted once for every entry"
            raise document.error(("changes",), expected, len(written))
    raise_any(problems)
    content = {name: value for name, value in document.data.items() if name != "changes"}
    return replace(
        cluster, content=canonical({**content, "changes": written} if written else content)
    )


def with_changes(
    cluster: Cluster, changes: Sequence[JsonObject], *, file: str = "changes", folder: Path = Path()
) -> Cluster:
    """Return the cluster with ``changes``, as in a cluster file, in place of its own."""
    content = {**json.loads(cluster.content), "changes": list(changes)}
    return fitted(build_cluster(Document(file, content, {}), folder=folder), cluster.fit)
