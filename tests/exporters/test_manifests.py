"""JobSets and SkyPilot tasks: which node runs what, and what the systems' own schemas say of them.

The schemas are those of the packages ``kubeflow-trainer-api`` and ``skypilot``; ``make
test-manifests`` installs them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from exporters.target_readers import plan
from runtime.launch_cases import HOSTS, launched, named

from argosy.cli import main
from argosy.errors import InputError
from argosy.exporters.jobset import export_jobset, export_kubeflow
from argosy.exporters.skypilot import export_skypilot
from argosy.plan.file import dumps_plan
from argosy.runtime.job.launch import Launch

EQUAL, UNEQUAL = plan([17, 34], hosts=("a0", "a1")), plan([9, 18, 26, 34])


def jobset(launch: Launch) -> dict[str, Any]:
    ((_, text),) = export_jobset(launch, image="example.org/argosy:1").files
    content: dict[str, Any] = json.loads(text)
    return content


def kubeflow(launch: Launch) -> list[dict[str, Any]]:
    """Return the TrainingRuntime and the TrainJob."""
    ((_, text),) = export_kubeflow(launch, image="example.org/argosy:1").files
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items


def sky(launch: Launch) -> str:
    ((_, text),) = export_skypilot(launch).files
    return text


def test_every_pod_starts_its_own_rank(tmp_path: Path) -> None:
    """The scripts of all pods, run with a stub for python, start every rank once, and meet at the
    first pod."""
    for launch in (launched(EQUAL), named(UNEQUAL)):
        content, ranks = jobset(launch), []
        for job in content["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            (container,) = spec["template"]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
            for index in range(spec["completions"]):
                stub = f'JOB_COMPLETION_INDEX={index}; python() {{ echo "$@"; }}\n'
                command = ["bash", "-c", stub + container["command"][2]]
                done = subprocess.run(
                    command, cwd=tmp_path, capture_output=True, text=True, check=True
                )
                ranks.append(done.stdout.split("rank=")[1].split()[0])
                assert f"--rdzv-endpoint {content['metadata']['name']}-a-0-0." in done.stdout
        assert ranks == [str(rank) for rank in range(len(launch.nodes()))]


def test_unequal_nodes_are_pinned_to_their_hosts_or_refused() -> None:
    jobs = jobset(named(UNEQUAL))["spec"]["replicatedJobs"]
    pinned = [job["template"]["spec"]["template"]["spec"]["nodeSelector"] for job in jobs]
    assert [place["kubernetes.io/hostname"] for place in pinned] == [
        "gpu01",
        "gpu02.east",
        *HOSTS["v"],
    ]
    with pytest.raises(
        InputError, match=r"nodes\.hosts: found A100-80GB and V100-32GB, expected the names of all"
    ):
        jobset(launched(UNEQUAL))


def test_sky_pilot_asks_for_cards_by_its_own_names() -> None:
    one, several = sky(launched(EQUAL)), sky(launched(UNEQUAL))
    assert "accelerators: A100-80GB:4" in one and "num_nodes: 2" in one and "---" not in one
    assert [part.count("num_nodes: 2") for part in several.split("---\n")] == [0, 1, 1]
    assert "--rdzv-endpoint a-0.argosy-llama-3-8b:29500" in several
    with pytest.raises(InputError, match="SkyPilot chooses the machines itself"):
        sky(named(UNEQUAL))


def test_the_command_writes_every_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(dumps_plan(EQUAL))
    for arguments, code in (
        (["jobset", "--image", "x"], 0), (["jobset"], 2), (["skypilot"], 0), (["skypilot", "--image", "x"], 2),
        (["kubeflow", "--image", "x"], 0), (["kubeflow"], 2),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(["export", str(tmp_path / "plan.json"), "--to", *arguments])
        assert stop.value.code == code, capsys.readouterr().err


def test_the_schema_of_jobsets_has_every_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for launch in (launched(EQUAL), named(UNEQUAL)):
        content = jobset(launch)
        assert models.JobsetV1alpha2JobSet.from_dict(content).to_dict() == content


def test_a_train_job_creates_the_same_job_set() -> None:
    """Kubeflow Trainer gives the JobSet the name of the TrainJob; a job with the label of a trainer
    would get equal nodes."""
    for launch in (launched(EQUAL), named(UNEQUAL)):
        runtime, job = kubeflow(launch)
        alone = jobset(launch)
        assert runtime["spec"] == {"template": {"spec": alone["spec"]}}, "and no mlPolicy"
        assert job["metadata"] == alone["metadata"]
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert "trainjob-ancestor-step" not in json.dumps(runtime)


def test_the_schemas_of_kubeflow_trainer_have_every_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for launch in (launched(EQUAL), named(UNEQUAL)):
        runtime, job = kubeflow(launch)
        assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_sky_pilot_itself_reads_the_tasks(tmp_path: Path) -> None:
    pytest.importorskip("sky")
    from jsonschema import validate
    from sky.utils import dag_utils, schemas, yaml_utils

    for launch in (launched(EQUAL), launched(UNEQUAL)):
        text = sky(launch)
        documents = yaml_utils.read_yaml_all_str(text)
        tasks = documents if len(documents) == 1 else documents[1:]
        for task in tasks:
            validate(task, schemas.get_task_schema())
            validate(task["resources"], schemas.get_resources_schema())
        assert dag_utils.is_job_group_yaml_str(text) == (len(documents) > 1)
