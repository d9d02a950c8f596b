"""Read and write ``run.json``, version 1: the options of a run. Its fields: ``docs/formats.md``.

The command writes the file into the run's folder; workers, agents and batch scripts read it and get
no other input but the number of their node. Paths in it are relative to the folder in which the
command was started. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

from pydantic import Field, create_model

from argosy.adapt.controller import AdaptationLevel
from argosy.document import JsonObject, Schema, Word, parse_json, read_text, validate
from argosy.plan.model import planned_chain
from argosy.plan.plan import ModelRef
from argosy.workload.chain import Chain
from argosy.workload.fields import Name

RUN = "run.json"
"""The file's name in the run's folder."""
_Whole = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Duration = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The options of a run, which are equal for all of its processes."""

    plan: Name
    """The path of the plan's file."""
    program: Name
    """The program and its function, ``FILE.py:build``."""
    out: Name
    """The run's folder, which all nodes can read and write."""
    steps: _Positive
    """Steps of the whole run, including those that a resumed run has done before."""
    save_every: _Whole = 0
    """Steps between two checkpoints; 0 saves only the last step."""
    resume: bool = False
    """True to continue from the newest checkpoint."""
    init: Name | None = None
    """Initial weights: the folder of a checkpoint, or a file."""
    clip: Annotated[float, Field(ge=0)] | None = None
    """The largest norm of the whole gradient, to which it is clipped."""
    seed: int = 0
    compile_stages: bool = False
    """True to compile each stage into one graph by torch.compile."""
    patience: _Duration = 600.0
    """Seconds to wait for a rank that sends nothing, and the longest step of an elastic run."""
    any_device: bool = False
    """True if the hardware may differ from the plan's."""
    adapt: Word[AdaptationLevel] = AdaptationLevel.OFF
    """The changes that the run may make to its plan."""
    model: Name | None = None
    """A preset, config or profile with the model's costs; the plan's name for the model unless
    given."""
    horizon: _Positive = 1000
    """Steps within which the time of a migration must be regained."""
    min_gain: Annotated[float, Field(ge=0, le=1)] = 0.02
    """The least relative gain that is worth a change."""
    profiles: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files of measured layers, for predictions."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """The port at which rank 0 serves figures for Prometheus."""
    copy_every: _Whole = 1
    """Steps between two copies into other nodes' memory, 0 for none; elastic runs only."""
    lost_after: _Duration = 10.0
    """Seconds of silence after which a node is lost; elastic runs only."""
    gather: _Seconds = 60.0
    """Seconds that the first generation waits for nodes of the plan; elastic runs only."""
    wait: _Seconds = 600.0
    """Seconds to wait for more nodes if no plan fits on those present; elastic runs only."""
    grace: _Seconds = 30.0
    """Seconds between the notice that a node will be taken away and its end; elastic runs only."""
    island: _Whole | None = None
    """The island that these processes belong to, None for all islands; island plans only."""
    meeting: Name | None = None
    """HOST:PORT at which the leads of islands meet; island plans only."""
    max_sync_every: _Positive = 500
    """The most steps between two exchanges that adapting may choose; island plans only."""

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def interval(self) -> float:
        """Return the seconds between two heartbeats of a node."""
        return self.lost_after / 5

    def shown(self, name: str) -> str:
        """Return the value of an option as text for messages."""
        value = getattr(self, name)
        return "none" if value is None else str(value)

    def chain(self, model: ModelRef) -> Chain:
        """Return the costs of a plan's model, from the source that the run's options name."""
        return planned_chain(model, self.model)


@cache
def run_schema() -> type[Schema]:
    """Return the schema of ``run.json``: the fields of ``RunSpec``, and the version."""
    types = get_type_hints(RunSpec, include_extras=True)
    described: JsonObject = {"version": (Literal[1], ...)}
    for field in fields(RunSpec):
        described[field.name] = (
            types[field.name],
            ... if field.default is MISSING else field.default,
        )
    return create_model("RunSchema", __base__=Schema, **described)


def run_spec_to_dict(spec: RunSpec) -> JsonObject:
    return {"version": 1, **asdict(spec)}


def dumps_run_spec(spec: RunSpec) -> str:
    """Return the text of ``run.json``."""
    return json.dumps(run_spec_to_dict(spec), indent=2, sort_keys=True) + "\n"


def loads_run_spec(text: str, *, file: str = RUN) -> RunSpec:
    """Return the options that ``dumps_run_spec`` wrote; raise an ``InputError`` with all problems
    of any other text."""
    content = validate(parse_json(text, file=file), run_schema()).model_dump(exclude={"version"})
    return RunSpec(**content)


def read_run_spec(path: Path | str) -> RunSpec:
    return loads_run_spec(read_text(path), file=str(path))
