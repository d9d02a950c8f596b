"""Scripts that are made of a plan: what its files have for names is text in them, and never a
command."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from exporters.target_readers import plan

from argosy.cli import main
from argosy.exporters.deepspeed import export_deepspeed
from argosy.exporters.megatron import export_megatron
from argosy.exporters.torch import export_torch
from argosy.exporters.torchtitan import export_torchtitan
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.runtime.job.launch import Launch
from argosy.runtime.job.launch_script import dry_run
from argosy.runtime.job.slurm import slurm_script
from argosy.runtime.processes.run_spec import RunSpec, read_run_spec
from argosy.workload.load import load_architecture, load_model

HOSTILE = "END\nEND\n$(touch mark)`touch mark`'.py:build"
"""A program's name that would end a quoted text, and run something."""
CHAIN, SHAPE = load_model("llama-3-8b", sequence_length=2048), load_architecture("llama-3-8b")


def hostile(mark: Path) -> Plan:
    """A plan whose names are commands."""
    text = f'a\ntouch {mark}\n$(touch {mark})`touch {mark}`"; touch {mark} #'
    made = plan([9, 18, 26, 34], width=1)
    return replace(
        made, cluster=replace(made.cluster, name=text), model=replace(made.model, name=text)
    )


def scripts(made: Plan, folder: Path) -> dict[str, str]:
    chain = replace(CHAIN, name=made.cluster.name)
    exports = {
        "megatron": export_megatron(made, chain, SHAPE),
        "torchtitan": export_torchtitan(made, CHAIN, SHAPE),
        "deepspeed": export_deepspeed(made, chain),
        "torch": export_torch(made, chain),
    }
    files = [
        (f"{target} {name}", text)
        for target, export in exports.items()
        for name, text in export.files
    ]
    spec = RunSpec(plan="my plan's.json", program=HOSTILE, out=str(folder), steps=1)
    launch = Launch(plan=made, spec=spec)
    made_here = {"dry-run.sh": dry_run(launch), "job.sh": slurm_script(launch)}
    return {name: text for name, text in files if name.endswith(".sh")} | made_here


def run_in_shell(script: str) -> list[str]:
    """The words of every command that a script starts, one a line; nothing else is there to
    start."""
    told = "printf '%s\\n' \"$@\";"
    stub = f"torchrun() {{ {told} }}; python() {{ {told} }}; deepspeed() {{ {told} }}\n"
    stub += "scontrol() { echo n0; echo n1; }\n"
    stub += 'srun() { while [ "$1" != bash ]; do shift; done; "${@:1:3}"; }; export -f python\n'
    stub += "export SLURMD_NODENAME=n0 SLURM_JOB_ID=7 ARGOSY_HOST=a0\n"
    stub += "export SLURM_JOB_NODELIST_HET_GROUP_0=n0 SLURM_JOB_NODELIST_HET_GROUP_1=n0\n"
    done = subprocess.run(["bash", "-c", stub + script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_names_are_not_commands(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name, text in scripts(hostile(mark), tmp_path / "a run").items():
        assert run_in_shell(text), name
        assert not mark.exists(), name


def test_a_batch_script_keeps_names_with_spaces_and_quotes_whole(tmp_path: Path) -> None:
    text = scripts(plan([9, 18, 26, 34], width=1), tmp_path / "a run")["job.sh"]
    words = run_in_shell(text)
    file = tmp_path / "a run" / "run.json"
    assert words[words.index("argosy.runtime.job.worker") + 1] == str(file)
    spec = read_run_spec(file)
    assert (spec.plan, spec.program, spec.folder) == ("my plan's.json", HOSTILE, tmp_path / "a run")


@pytest.mark.parametrize(
    "arguments", [["export", "--to", "torchrun"], ["export", "--to", "deepspeed"], ["run"]]
)
@pytest.mark.parametrize("name", ["foo", "b0.0", "a0.x"])
def test_devices_that_the_cluster_does_not_have_are_named(
    arguments: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, program = tmp_path / "plan.json", tmp_path / "train.py"
    program.write_text("def build():\n    pass\n")
    content = json.loads(dumps_plan(plan([9, 18, 26, 34], width=1)))
    content["stages"][1]["replicas"][0]["devices"] = [name]
    file.write_text(json.dumps(content))
    more = [str(program), "--dry-run"] if arguments == ["run"] else []
    with pytest.raises(SystemExit) as stop:
        main([arguments[0], str(file), *more, *arguments[1:]])
    assert stop.value.code == 2
    assert (
        f'stages[1].replicas[0].devices: found "{name}", expected a device of'
        in capsys.readouterr().err
    )
