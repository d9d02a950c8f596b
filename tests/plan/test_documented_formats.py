"""The documentation of the file formats: every field is in its table, every example loads, every
name works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import argosy
from argosy.calibrate import file as runs_file
from argosy.cluster import schema as cluster_file
from argosy.cluster.file import build_cluster, cluster_from_content, with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.tracefile import _HEADERS, read_columns
from argosy.cost import calibration_file
from argosy.cost.calibration import Calibration
from argosy.document import Schema, parse_toml
from argosy.plan import file as plan_file
from argosy.plan import group_program, islands_file
from argosy.plan.file import loads_plan
from argosy.runtime.processes.run_spec import run_schema
from argosy.timeline import file as timeline_file
from argosy.timeline.file import loads_timeline
from argosy.workload import layers_file, profile_file
from argosy.workload.profile_file import parse_profile

DOCS = Path(__file__).parent.parent.parent / "docs"
CLUSTERS = (DOCS / "clusters.md").read_text(encoding="utf-8")
FORMATS = (DOCS / "formats.md").read_text(encoding="utf-8")

TABLES: dict[type[Schema], tuple[str, str]] = {
    cluster_file.ClusterSchema: ("Fields", "The file"),
    cluster_file.NodeSchema: ("Fields", "`[[nodes]]`"),
    cluster_file.DevicesSchema: ("Fields", "`devices` of a node"),
    cluster_file.HostSchema: ("Fields", "`hosts` of a node"),
    cluster_file.MediumSchema: ("Fields", "`intra` of a node"),
    cluster_file.NicSchema: ("Fields", "`nic` of a node"),
    cluster_file.HostMemorySchema: ("Fields", "`host_memory` of a node"),
    cluster_file.NvmeSchema: ("Fields", "`nvme` of a node"),
    cluster_file.KindSchema: ("Fields", "`[[kinds]]`"),
    cluster_file.LinkSchema: ("Fields", "`[[links]]`"),
    cluster_file.SwitchSchema: ("Fields", "`[[switches]]`"),
    cluster_file.UplinkSchema: ("Fields", "`uplink` of a switch"),
    cluster_file.SharedSchema: ("Fields", "`[[shared]]`"),
    cluster_file.ChangeSchema: ("Fields", "`[[changes]]`"),
    plan_file.PlanSchema: ("`plan.json`", "The plan"),
    plan_file.ModelSchema: ("`plan.json`", "`model`"),
    plan_file.TuningSchema: ("`plan.json`", "`tuning` of `model`"),
    plan_file.ClusterRefSchema: ("`plan.json`", "`cluster`"),
    plan_file.CostModelSchema: ("`plan.json`", "`cost_model`"),
    plan_file.CostContentSchema: ("`plan.json`", "`content` of `cost_model`"),
    plan_file.ScheduleSchema: ("`plan.json`", "`schedule`"),
    plan_file.StageSchema: ("`plan.json`", "`stages`"),
    plan_file.OffloadSchema: ("`plan.json`", "`offload` of a stage"),
    plan_file.ReplicaSchema: ("`plan.json`", "`replicas`"),
    plan_file.CollectiveSchema: ("`plan.json`", "`collectives`"),
    plan_file.PolicySchema: ("`plan.json`", "`policy`"),
    plan_file.PredictedSchema: ("`plan.json`", "`predicted`"),
    plan_file.CertificateSchema: ("`plan.json`", "`certificate`"),
    plan_file.SearchSchema: ("`plan.json`", "`search`"),
    plan_file.RunnerUpSchema: ("`plan.json`", "`runner_ups`"),
    plan_file.LeftOutSchema: ("`plan.json`", "`left_out`"),
    group_program.GroupProgramSchema: ("`plan.json`", "An item of `programs`"),
    group_program.SharedWeightSchema: ("`plan.json`", "`weights` of a program"),
    group_program.SharedSegmentSchema: ("`plan.json`", "`segments` of a program"),
    group_program.SharedOperationSchema: ("`plan.json`", "`operations` of a segment"),
    group_program.DeliveredSchema: ("`plan.json`", "`delivered` of an operation"),
    islands_file.IslandPlanSchema: ("Island plans", "The island plan"),
    islands_file.OuterSchema: ("Island plans", "`outer`"),
    islands_file.IslandPredictionSchema: ("Island plans", "`predicted` of an island plan"),
    timeline_file.TimelineSchema: ("`timeline.json`", "The timeline"),
    timeline_file.SpanSchema: ("`timeline.json`", "`spans`"),
    timeline_file.ContactSchema: ("`timeline.json`", "`contacts`"),
    timeline_file.LinkUseSchema: ("`timeline.json`", "`links`"),
    profile_file.ProfileSchema: ("Profiles", "The profile"),
    profile_file._Row: ("Profiles", "`rows`"),
    layers_file.LayerSchema: ("Profiles", "`layers`"),
    layers_file.FrozenSchema: ("Profiles", "`frozen` of a layer"),
    layers_file._LayersSchema: ("`plan.json`", "`content` of `model`"),
    runs_file._File: ("Measured runs", "The measured runs"),
    runs_file._Run: ("Measured runs", "`runs`"),
    run_schema(): ("`run.json`", "The run"),
    calibration_file._File: ("Calibrations", "The calibration"),
    calibration_file._Constants: ("Calibrations", "`constants`"),
}
"""Under which headings each table of fields stands."""


def rows(chapter: str, section: str) -> list[list[str]]:
    """The cells of the table under two headings."""
    text = f"\n{CLUSTERS}\n{FORMATS}"
    chapter_text = text.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    lines = chapter_text.split(f"\n### {section}\n")[1].split("\n### ")[0].splitlines()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return table[2:]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("schema", TABLES, ids=lambda schema: schema.__name__)
def test_every_field_is_in_its_table_and_nothing_else(schema: type[Schema]) -> None:
    assert {row[0].strip("`") for row in rows(*TABLES[schema])} == set(schema.model_fields)


@pytest.mark.parametrize("schema", TABLES, ids=lambda schema: schema.__name__)
def test_what_is_required_has_no_default_in_its_table(schema: type[Schema]) -> None:
    for row in rows(*TABLES[schema]):
        required = schema.model_fields[row[0].strip("`")].is_required()
        assert (row[2] in ("", "required", "at least one")) >= required, row


FILES = [
    cluster_file,
    group_program,
    plan_file,
    timeline_file,
    layers_file,
    profile_file,
    runs_file,
    calibration_file,
]


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.__name__)
def test_every_schema_has_a_table(module: object) -> None:
    schemas = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Schema)
    ]
    assert {schema for schema in schemas if schema is not Schema} <= set(TABLES)


def example(index: int, folder: Path) -> Cluster:
    """A cluster of the documentation, with the traces that lie beside it."""
    (csv,) = blocks(CLUSTERS, "csv")
    (folder / "night.csv").write_text(csv, encoding="utf-8")
    return build_cluster(
        parse_toml(blocks(CLUSTERS, "toml")[index], file="clusters.md"), folder=folder
    )


@pytest.mark.parametrize("index", range(len(blocks(CLUSTERS, "toml"))))
def test_every_cluster_of_the_documentation_loads(index: int, tmp_path: Path) -> None:
    cluster = example(index, tmp_path)
    for one in cluster.devices:
        for other in cluster.devices:
            assert one is other or cluster.routes(one.name, other.name)


def test_every_edge_of_the_documentation_can_change(tmp_path: Path) -> None:
    clusters = [example(index, tmp_path) for index in range(len(blocks(CLUSTERS, "toml")))]
    names = re.findall(
        r"^\| .* \| `([a-z0-9.]+)` \| .* \|$", CLUSTERS.split("## Units")[0], flags=re.MULTILINE
    )
    assert len(names) == 5
    for name in names:
        owner = next(
            cluster for cluster in clusters if any(link.edge == name for link in cluster.links)
        )
        changed = with_changes(owner, [{"link": name, "steps": [["1 s", "0 B/s"]]}])
        assert {link.edge for link in changed.links if link.bandwidth.at(1) == 0} == {name}


def test_routes_are_as_the_documentation_tells(tmp_path: Path) -> None:
    racks = next(c for c in (example(i, tmp_path) for i in range(4)) if c.name == "racks")
    (route,) = racks.routes("n0.0", "n4.0")
    assert [racks.links[link].edge for link in route.links] == [
        "n0.nic",
        "rack0.uplink",
        "rack1.uplink",
        "n4.nic",
    ]
    (route,) = racks.routes("n0.0", "n1.0")
    assert [racks.links[link].edge for link in route.links] == ["n0.nic", "n1.nic"]


def test_every_json_of_the_documentation_loads(tmp_path: Path) -> None:
    plan, timeline, profile, runs, calibration = blocks(FORMATS, "json")
    written = loads_plan(plan)
    assert written.stages[1].replicas[0].ratios == (0.75, 0.25)
    assert written.cluster.hash == cluster_from_content(written.cluster.content).hash
    assert len(loads_timeline(timeline).critical_path()) == 2
    assert parse_profile(profile, file="profile.json").forward_seconds("block", 1) == 0.0012
    assert all(json.loads(text)["version"] == 1 for text in (plan, timeline, profile))
    (tmp_path / "runs.json").write_text(runs, encoding="utf-8")
    (tmp_path / "constants.json").write_text(calibration, encoding="utf-8")
    measured = runs_file.read_runs(tmp_path / "runs.json")
    assert [(run.seconds, len(run.plan.devices)) for run in measured.runs] == [(3.41, 4), (2.7, 8)]
    constants = calibration_file.read_calibration(tmp_path / "constants.json")
    assert (constants.passes, constants.forward_peak) == (2.04, Calibration().forward_peak)


def test_every_header_of_a_trace_is_documented(tmp_path: Path) -> None:
    text = FORMATS.split("## Trace CSV")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(seconds,[a-z,]+)` \|", text, flags=re.MULTILINE)) == set(_HEADERS)
    columns = {name for header in _HEADERS for name in header.split(",")}
    assert set(re.findall(r"^\| `([a-z]+)` \|", text, flags=re.MULTILINE)) == columns


def test_the_trace_of_the_documentation_loads(tmp_path: Path) -> None:
    (csv,) = blocks(CLUSTERS, "csv")
    (tmp_path / "night.csv").write_text(csv, encoding="utf-8")
    assert read_columns(tmp_path / "night.csv").traces().latency is not None


def test_every_command_that_prints_json_has_its_row() -> None:
    table = FORMATS.partition("## What `--json` prints")[2].partition("\n## ")[0]
    cli = Path(argosy.__file__).parent / "cli"
    commands = {
        name
        for file in cli.rglob("*.py")
        for name in re.findall(r'print_json\(\s*"([^"]+)"', file.read_text())
    }
    assert len(commands) > 25
    assert [name for name in sorted(commands) if f"`{name}`" not in table] == []
