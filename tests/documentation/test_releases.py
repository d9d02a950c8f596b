"""What a release and the forge's workflows name exists: versions agree, steps are chores of the
Makefile."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import argosy

ROOT = Path(__file__).parents[2]
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    """YAML reads the key ``on`` as a truth value."""
    return {
        "on" if key is True else key: value
        for key, value in yaml.safe_load(path.read_text()).items()
    }


def test_a_version_is_the_same_wherever_it_is_written() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert argosy.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"] and str(citation["date-released"])
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest.group(1) == PROJECT["version"]


def test_there_is_a_workflow_for_every_chore() -> None:
    assert {path.stem for path in WORKFLOWS} == {"docs", "doors", "lint", "test", "wheel"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_the_makefile_alone(path: Path) -> None:
    workflow = read(path)
    assert workflow["on"] and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses), (
            "an action has a version"
        )
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands and all(step.keys() & {"uses", "run"} for step in job["steps"])
        for command in commands:
            make, target, *variables = command.split()
            assert make == "make" and target in TARGETS, command
            assert all(re.fullmatch(r"[A-Z]+=\S+", variable) for variable in variables)


def test_the_newest_torch_is_tested_every_night() -> None:
    nightly = read(FORGE / "workflows" / "doors.yml")
    assert nightly["on"]["schedule"]
    steps = nightly["jobs"]["newest-torch"]["steps"]
    assert {"run": "make test-newest"} in steps


def test_every_python_that_is_listed_is_tested() -> None:
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    listed = {
        match.group(1) for line in PROJECT["classifiers"] if (match := re.fullmatch(pattern, line))
    }
    text = (FORGE / "workflows" / "test.yml").read_text()
    assert listed == set(re.findall(r"\"(3\.\d+)\"", text)) and "3.14" in listed


def test_extras_are_for_users_and_torch_is_not_capped() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() == {"torch", "hf", "nbody"}
    assert all("<" not in line for line in extras["torch"])


def test_addresses_are_named_or_are_a_step_of_the_release() -> None:
    """A wheel without ``[project.urls]`` is right as long as there is no public address."""
    steps = (ROOT / "docs" / "releasing.md").read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", steps, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    block = re.search(r"```toml\n(.*?)```", steps, re.DOTALL)
    assert block is not None
    listed = tomllib.loads(textwrap.dedent("    " + block.group(1).lstrip()))["project"]["urls"]
    named = PROJECT.get("urls", listed)
    assert named.keys() == listed.keys()
    assert all(value.startswith(("https://", "ADDRESS")) for value in named.values())


def test_hooks_and_forms_are_whole() -> None:
    hooks = [
        hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    ]
    assert [hook["entry"] for hook in hooks] == ["make check"]
    for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml"):
        form = read(path)
        if path.stem == "config":
            continue
        assert {"name", "description", "body"} <= form.keys()
        assert all(
            part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"]
        )
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
    for name in (
        "CODE_OF_CONDUCT.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        ".github/PULL_REQUEST_TEMPLATE.md",
    ):
        assert (ROOT / name).read_text().strip(), name
