"""``run.json``, version 1: what a run was asked to do. Its fields: ``docs/formats.md``.

The command writes it into the run's folder; its workers and agents, and batch scripts, read it and
are told nothing else but which node they are. Paths in it are relative to the folder in which the
command was started. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from argosy.adapt.controller import AdaptationLevel
from argosy.document import Schema, parse_json, read_text, validate
from argosy.plan.model import planned_chain
from argosy.plan.plan import ModelRef
from argosy.workload.chain import Chain
from argosy.workload.fields import Name

RUN = "run.json"
_Whole = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Duration = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The options of a run: the same for all of its processes."""

    plan: Name
    """The plan's file."""
    program: Name
    """``FILE.py:build``."""
    out: Name
    """The run's folder, which all nodes see."""
    steps: _Positive
    """Steps of the whole run, with those that a resumed run has done before."""
    save_every: _Whole = 0
    """Steps between two checkpoints; 0 for none but the last."""
    resume: bool = False
    """Whether to go on from the newest checkpoint."""
    init: Name | None = None
    """Weights to begin with: a checkpoint's folder or a file."""
    clip: Annotated[float, Field(ge=0)] | None = None
    """The largest norm of the whole gradient."""
    seed: int = 0
    compile_stages: bool = False
    """Whether torch.compile makes one graph of each stage."""
    patience: _Duration = 600.0
    """Seconds to wait for a rank that sends nothing, and that a step of an elastic run may take."""
    any_device: bool = False
    """Whether the hardware may be other than the plan's."""
    adapt: Annotated[AdaptationLevel, Field(strict=False)] = AdaptationLevel.OFF
    """How far the run may adapt."""
    model: Name | None = None
    """A preset, config or profile with the model's costs; the plan's name for the model unless
    given."""
    horizon: _Positive = 1000
    """Steps over which a move must pay."""
    min_gain: Annotated[float, Field(ge=0, le=1)] = 0.02
    """The least gain that is worth a change."""
    profiles: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files of measured layers, for predictions."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Where rank 0 serves figures for Prometheus."""
    copy_every: _Whole = 1
    """Of elastic runs: steps between two copies in other nodes' memory; 0 for none."""
    lost_after: _Duration = 10.0
    """Of elastic runs: seconds of silence after which a node is lost."""
    gather: _Seconds = 60.0
    """Of elastic runs: seconds that the first generation waits for nodes of the plan."""
    wait: _Seconds = 600.0
    """Of elastic runs: seconds to wait for nodes while nothing fits on those that are there."""
    grace: _Seconds = 30.0
    """Of elastic runs: seconds between the notice that a node will be taken away and its end."""
    island: _Whole | None = None
    """Of island plans: the island that these processes are; None if they are all of them."""
    meeting: Name | None = None
    """Of island plans: HOST:PORT where the leads of islands meet."""
    max_sync_every: _Positive = 500
    """Of island plans: the most steps between two exchanges that adapting may choose."""

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def interval(self) -> float:
        """Seconds between two signs of life of a node."""
        return self.lost_after / 5

    def shown(self, name: str) -> str:
        """The value of an option, for people."""
        value = getattr(self, name)
        return "none" if value is None else str(value)

    def chain(self, model: ModelRef) -> Chain:
        """The costs of a plan's model, found as the run's options say."""
        return planned_chain(model, self.model)


@cache
def run_schema() -> type[Schema]:
    """The fields of ``run.json``: those of ``RunSpec``, and the version."""
    types = get_type_hints(RunSpec, include_extras=True)
    described: dict[str, Any] = {"version": (Literal[1], ...)}
    for field in fields(RunSpec):
        described[field.name] = (
            types[field.name],
            ... if field.default is MISSING else field.default,
        )
    schema: type[Schema] = create_model("RunSchema", __base__=Schema, **described)
    return schema


def run_spec_to_dict(spec: RunSpec) -> dict[str, Any]:
    return {"version": 1, **asdict(spec)}


def dumps_run_spec(spec: RunSpec) -> str:
    """The text of ``run.json``."""
    return json.dumps(run_spec_to_dict(spec), indent=2, sort_keys=True) + "\n"


def loads_run_spec(text: str, *, file: str = RUN) -> RunSpec:
    """What ``dumps_run_spec`` wrote; an ``InputError`` with every problem of a text that it did
    not."""
    content = validate(parse_json(text, file=file), run_schema()).model_dump(exclude={"version"})
    return RunSpec(**content)


def read_run_spec(path: Path | str) -> RunSpec:
    return loads_run_spec(read_text(path), file=str(path))
