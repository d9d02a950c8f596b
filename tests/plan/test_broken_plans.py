"""Plan files that people get wrong, each with everything that is said about it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.broken_cases import Case, cases

from argosy.cluster.file import cluster_from_content
from argosy.document import parse_json, parse_path
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan, loads_plan, plan_from_document
from argosy.workload.chain import Chain, Layer

CLUSTER = {
    "name": "c",
    "nodes": [
        {
            "name": "a",
            "count": 2,
            "devices": {"kind": "A100-80GB", "count": 2},
            "intra": [{"medium": "nvlink", "bandwidth": "300 GB/s"}],
            "nic": {"bandwidth": "100 Gbit/s"},
        }
    ],
}
PLAN = {
    "version": 1,
    "model": {"name": "toy", "sequence_length": 8, "dtype": "bf16"},
    "cluster": {"name": "c", "hash": "", "content": CLUSTER},
    "global_batch": 8,
    "micro_batch_size": 2,
    "num_micro_batches": 4,
    "schedule": {"kind": "1f1b"},
    "stages": [
        {
            "layers": [0, 2],
            "replicas": [{"devices": ["a0.0"], "samples": 1}, {"devices": ["a0.1"], "samples": 1}],
        },
        {
            "layers": [2, 4],
            "replicas": [{"devices": ["a1.0", "a1.1"], "samples": 2, "ratios": [0.75, 0.25]}],
        },
    ],
}
TOY = Chain(
    name="toy",
    layers=tuple(
        Layer(
            name=f"block{index}",
            kind="block",
            forward_flop=1e9,
            backward_flop=2e9,
            parameters=1000,
            activation_bytes=100.0,
            output_bytes=50.0,
            max_tensor_width=2,
        )
        for index in range(4)
    ),
    sequence_length=8,
    dtype=Dtype.BF16,
)


FILE = r"""
## later version
version = 2
> plan.json:2: version: found 2, expected one of 1

## no version
del version
> plan.json: version: expected a value: this field is required

## text for the version
version = "1"
> plan.json:2: version: found "1", expected one of 1

## several fields missing
del model.dtype
del cluster.hash
del stages[0].layers
del num_micro_batches
> plan.json: num_micro_batches: expected a value: this field is required
> plan.json:3: model.dtype: expected a value: this field is required
> plan.json:7: cluster.hash: expected a value: this field is required
> plan.json:38: stages[0].layers: expected a value: this field is required

## misspelt field
stages[0].replica = []
> plan.json:60: stages[0].replica: found an unknown field, expected one of the fields context, expert, experts, layers,
| offload, recompute, replicas, zero; did you mean "replicas"?

## no stages
stages = []
> plan.json:40: stages: found 0 items, expected at least 1

## table for the stages
stages = {}
> plan.json:40: stages: found a table, expected a valid list

## stage without replicas
stages[1].replicas = []
> plan.json:66: stages[1].replicas: found 0 items, expected at least 1

## layers without an end
stages[0].layers = [0]
> plan.json:42: stages[0].layers: found a list of 1, expected the first layer and one past the last, such as [0, 8]

## layers that are no list
stages[0].layers = "0-2"
> plan.json:42: stages[0].layers: found "0-2", expected the first layer and one past the last, such as [0, 8]

## layers of fractions
stages[0].layers = [-1, 2.5]
> plan.json:43: stages[0].layers[0]: found -1, expected a whole number, at least 0
> plan.json:44: stages[0].layers[1]: found 2.5, expected a whole number, at least 0

## no samples
stages[0].replicas[0].samples = 0
> plan.json:51: stages[0].replicas[0].samples: found 0, expected a whole number, at least 1

## samples as a fraction
stages[0].replicas[0].samples = 1.0
> plan.json:51: stages[0].replicas[0].samples: found 1.0, expected a whole number, at least 1

## replica without devices
stages[0].replicas[0].devices = []
> plan.json:48: stages[0].replicas[0].devices: found 0 items, expected at least 1

## ratio that is not a number
stages[1].replicas[0].ratios = [NaN, 0.5]
> plan.json:74: stages[1].replicas[0].ratios[0]: found nan, expected a finite number

## ratios as text
stages[1].replicas[0].ratios = ["3/4", "1/4"]
> plan.json:74: stages[1].replicas[0].ratios[0]: found "3/4", expected a valid number
> plan.json:75: stages[1].replicas[0].ratios[1]: found "1/4", expected a valid number

## k of nothing
schedule = {"kind": "kfkb", "k": 0}
> plan.json:39: schedule.k: found 0, expected a whole number, at least 1

## depth of nothing
schedule.depth = [2, 0]
> plan.json:41: schedule.depth[1]: found 0, expected a whole number, at least 1

## unknown schedule
schedule.kind = "1fb1"
> plan.json:38: schedule.kind: found "1fb1", expected one of "gpipe", "1f1b", "eager-1f1b", "kfkb", "interleaved",
| "zero-bubble", "zero-bubble-v", "dualpipe-v"; did you mean "1f1b"?

## schedule as text
schedule = "1f1b"
> plan.json:37: schedule: found "1f1b", expected a table

## unknown dtype and optimizer
model.dtype = "float16"
model.optimizer = "adamz"
> plan.json:6: model.dtype: found "float16", expected one of the dtypes fp32, tf32, fp16, bf16, fp8
> plan.json:7: model.optimizer: found "adamz", expected one of the optimizers adamw, adam, lion, momentum,
| adamw8bit, adafactor, sgd; did you mean "adam"?

## no sequence
model.sequence_length = 0
> plan.json:5: model.sequence_length: found 0, expected a whole number, at least 1

## unknown zero and recomputation
stages[0].zero = 4
stages[0].recompute = "selektive"
> plan.json:60: stages[0].zero: found 4, expected one of 0, 1, 2, 3
> plan.json:61: stages[0].recompute: found "selektive", expected one of "none", "selective", "full"; did you mean
| "selective"?

## no micro-batches
num_micro_batches = 0
> plan.json:36: num_micro_batches: found 0, expected a whole number, at least 1

## truth for a batch
global_batch = true
> plan.json:34: global_batch: found true, expected a whole number, at least 1

## batch beyond reason
global_batch = 99999999999
> plan.json:34: global_batch: found 99999999999, expected a whole number, at most 1000000000

## cluster with a wrong unit
cluster.content.nodes[0].nic.bandwidth = "25 Gb/s"
> plan.json:28: cluster.content.nodes[0].nic.bandwidth: found "25 Gb/s", expected a rate such as "25 Gbit/s"; "Gb/s"
| could be bits or bytes: write "25 Gbit/s" or "25 GB/s"

## cluster without anything
cluster.content = {}
> plan.json:11: cluster.content.name: expected a value: this field is required
> plan.json:11: cluster.content.nodes: expected a value: this field is required

## cluster as a list
cluster.content = []
> plan.json:11: cluster.content: found a list of 0, expected a table

## cluster of an unknown kind
cluster.content.nodes[0].devices.kind = "A100"
> plan.json:17: cluster.content.nodes[0].devices[0].kind: found "A100", expected a device kind from the catalogue or
| from [[kinds]]; did you mean "A100-40GB" or "A100-80GB" or "A100-80GB-PCIe"?

## cluster whose change names no link
cluster.content.changes = [{"link": "b0.nic", "steps": [["0 s", "1 Gbit/s"]]}]
> plan.json:34: cluster.content.changes[0].link: found "b0.nic", expected an edge of the cluster, such as a0.nic,
| a0.nvlink, a1.nic, a1.nvlink; did you mean "a0.nic"?

## prediction of nothing
predicted = {"iteration_seconds": Infinity, "samples_per_second": "1"}
predicted.peak_memory_bytes = {"a0.0": -1}
predicted.bottleneck = 3
> plan.json:82: predicted.iteration_seconds: found inf, expected a finite number, at least 0
> plan.json:83: predicted.samples_per_second: found "1", expected a finite number, at least 0
> plan.json:85: predicted.peak_memory_bytes.a0.0: found -1, expected a finite number, at least 0
> plan.json:87: predicted.bottleneck: found 3, expected a valid string

## certificate and search without figures
certificate = {"lower_bound_seconds": -1, "gap": NaN, "granularity": 0, "scope": ""}
search = {"cpu_seconds": 1, "candidates": -1, "pruned": {"memory": 0.5}}
> plan.json:82: certificate.lower_bound_seconds: found -1, expected a finite number, at least 0
> plan.json:83: certificate.gap: found nan, expected a finite number
> plan.json:84: certificate.granularity: found 0, expected a whole number, at least 1
> plan.json:89: search.candidates: found -1, expected a whole number, at least 0
> plan.json:91: search.pruned.memory: found 0.5, expected a whole number, at least 0

## layers of a program that do not follow one another
model.content = {"layers": [{"name": "a", "kind": "b", "parameters": 1}]}
model.content.layers[0].activation_bytes = 1
model.content.layers[0].output_bytes = 1
model.content.layers[0].operations = [1, 4]
> plan.json:15: model.content.layers[0].operations: found "[1, 4]", expected at least one operation from 0 on

## more operations than any program has
model.content = {"layers": [{"name": "a", "kind": "b", "parameters": 1}]}
model.content.layers[0].activation_bytes = 1
model.content.layers[0].output_bytes = 1
model.content.layers[0].operations = [0, 1000000000000]
> plan.json:15: model.content.layers[0].operations: found a list of 2, expected operations up to 1000000

## fewer layers than the stages of a program
model.content = {"layers": [{"name": "a", "kind": "b", "parameters": 1}]}
model.content.layers[0].activation_bytes = 1
model.content.layers[0].output_bytes = 1
model.content.layers[0].operations = [0, 4]
> plan.json:77: stages[1].layers: found 4, expected at most 1, the layers in model.content

## policy with a wrong schedule
policy = [{"edge": "a0.nic", "below": -1, "schedule": {"kind": "kfkb", "k": "2"}}]
> plan.json:84: policy[0].below: found -1, expected a finite number, at least 0
> plan.json:87: policy[0].schedule.k: found "2", expected a whole number, at least 1
"""
"""Edits after which a file is no plan."""

CHECK = r"""
## gap between stages
stages[1].layers = [3, 4]
> plan.json:62: stages[1].layers: found [3, 4), expected a range of at least one layer that begins at 2

## stages that overlap
stages[1].layers = [1, 4]
> plan.json:62: stages[1].layers: found [1, 4), expected a range of at least one layer that begins at 2

## layers beyond the model
stages[1].layers = [2, 9]
> plan.json:62: stages[1].layers: found an end at 9, expected stages up to layer 4, the end of toy

## layers that are missing
stages[1].layers = [2, 3]
> plan.json:62: stages[1].layers: found an end at 3, expected stages up to layer 4, the end of toy

## stage without layers
stages[0].layers = [0, 0]
> plan.json:42: stages[0].layers: found [0, 0), expected a range of at least one layer that begins at 0
> plan.json:62: stages[1].layers: found [2, 4), expected a range of at least one layer that begins at 0

## samples that do not sum
stages[0].replicas[0].samples = 2
> plan.json:46: stages[0].replicas: found a sum of 3, expected samples that sum to the micro_batch_size 2

## batch that is no product
global_batch = 10
> plan.json:34: global_batch: found 10, expected micro_batch_size x num_micro_batches = 8

## unknown device
stages[0].replicas[0].devices = ["a0.7"]
> plan.json:48: stages[0].replicas[0].devices: found "a0.7", expected a device of c; did you mean "a0.1"?

## device twice in a stage
stages[0].replicas[1].devices = ["a0.0"]
> plan.json:54: stages[0].replicas[1].devices: found "a0.0", expected each device in one replica of one stage; it is
| already in stage 0

## device twice in a replica
stages[1].replicas[0].devices = ["a1.0", "a1.0"]
> plan.json:68: stages[1].replicas[0].devices: found "a1.0", expected each device in one replica of one stage; it is
| already in stage 1

## device in two stages
stages[1].replicas[0].devices = ["a1.0", "a0.0"]
> plan.json:68: stages[1].replicas[0].devices: found "a0.0", expected each device in one replica of one stage; it is
| already in stage 0

## ratios that do not sum
stages[1].replicas[0].ratios = [0.5, 0.6]
> plan.json:73: stages[1].replicas[0].ratios: found a sum of 1.1, expected ratios of at least 0 that sum to 1

## too few ratios
stages[1].replicas[0].ratios = [1.0]
> plan.json:73: stages[1].replicas[0].ratios: found 1 ratios, expected one ratio for each of the 2 devices

## negative ratio
stages[1].replicas[0].ratios = [1.5, -0.5]
> plan.json:73: stages[1].replicas[0].ratios: found -0.5, expected ratios of at least 0 that sum to 1

## group wider than the layers allow
stages[0].replicas = [{"devices": ["a0.0", "a0.1", "a1.0"], "samples": 2}]
stages[1].replicas = [{"devices": ["a1.1"], "samples": 2}]
> plan.json:48: stages[0].replicas[0].devices: found 3 devices, expected at most 2, the widest split that layers
| 0..1 allow

## too few depths
schedule.depth = [1]
> plan.json:39: schedule.depth: found 1 depths, expected one depth for each of the 2 stages

## depth beyond the micro-batches
schedule.depth = [9, 1]
> plan.json:40: schedule.depth[0]: found 9, expected a depth between 1 and the 4 micro-batches

## depths that deadlock
schedule.depth = [1, 2]
> plan.json:37: schedule: found worker 0 with 0B0 blocked by 1B0, expected an order without deadlock
> plan.json:37: schedule: found worker 1 with 1F1 blocked by 0F1, expected an order without deadlock

## depth that is not used
schedule = {"kind": "zero-bubble", "depth": [2, 1]}
> plan.json:39: schedule.depth: found 2 depths, expected no depth with zero-bubble, which has its own

## interleaved with a micro-batch too many
schedule = {"kind": "interleaved"}
num_micro_batches = 5
global_batch = 10
> plan.json:36: num_micro_batches: found 5, expected a multiple of the 2 workers for an interleaved schedule; the
| nearest are 4 and 6

## chunks that do not divide the stages
schedule = {"kind": "interleaved", "chunks": 3}
> plan.json:39: schedule.chunks: found 3, expected a number of chunks that divides the 2 stages

## chunks on other devices
schedule = {"kind": "interleaved", "chunks": 2}
> plan.json:67: stages[1].replicas: found other devices, expected the devices of stage 0, its worker's first chunk

## chunks without interleaving
schedule.chunks = 2
> plan.json:39: schedule.chunks: found 2, expected 1, because only an interleaved schedule has more

## micro-batches beyond reason
num_micro_batches = 100000000
global_batch = 200000000
> plan.json:36: num_micro_batches: found 100000000, expected at most 500000 with 2 stages

## policy for an unknown edge
policy = [{"edge": "a0.nik", "below": 1e9, "schedule": {"kind": "kfkb", "k": 2, "depth": [1]}}]
> plan.json:83: policy[0].edge: found "a0.nik", expected an edge of c; did you mean "a0.nic"?
> plan.json:88: policy[0].schedule.depth: found 1 depths, expected one depth for each of the 2 stages

## collective of a stage that is not there
collectives = [{"collective": "weights", "stage": 2, "algorithm": "ring"}]
> plan.json:84: collectives[0].stage: found 2, expected a stage, below 2

## left out and yet used, or unknown
left_out = [{"device": "a0.0", "reason": "slow"}, {"device": "b0.0", "reason": "slow"}]
> plan.json:83: left_out[0].device: found "a0.0", expected a device that no stage uses
> plan.json:87: left_out[1].device: found "b0.0", expected a device of c; did you mean "a0.0"?

## five mistakes at once
global_batch = 9
schedule.depth = [3, 3, 3]
stages[0].layers = [0, 3]
stages[0].replicas[1].devices = ["a3.1"]
stages[1].replicas[0].samples = 3
> plan.json:34: global_batch: found 9, expected micro_batch_size x num_micro_batches = 8
> plan.json:39: schedule.depth: found 3 depths, expected one depth for each of the 2 stages
> plan.json:59: stages[0].replicas[1].devices: found "a3.1", expected a device of c; did you mean "a1.1"?
> plan.json:67: stages[1].layers: found [2, 4), expected a range of at least one layer that begins at 3
> plan.json:71: stages[1].replicas: found a sum of 3, expected samples that sum to the micro_batch_size 2
"""
"""Edits after which a plan makes no sense."""


def edited(edits: str) -> str:
    """The text of ``PLAN`` after lines of ``path = value`` (JSON) and ``del path``."""
    plan: Any = copy.deepcopy(PLAN)
    for line in edits.splitlines():
        path, _, value = line.removeprefix("del ").partition(" = ")
        *outer, last = parse_path(path)
        table = plan
        for part in outer:
            table = table[part]
        if line.startswith("del "):
            del table[last]
        else:
            table[last] = json.loads(value)
    return json.dumps(plan, indent=1)


def message(text: str) -> str:
    """What is said about a plan on its own cluster."""
    document = parse_json(text, file="plan.json")
    with pytest.raises(InputError) as caught:
        check_plan(
            plan_from_document(document),
            TOY,
            cluster_from_content(json.dumps(CLUSTER)),
            document=document,
        )
    return str(caught.value)


def test_the_file_without_mistakes_is_a_plan() -> None:
    document = parse_json(edited(""), file="plan.json")
    check_plan(
        plan_from_document(document),
        TOY,
        cluster_from_content(json.dumps(CLUSTER)),
        document=document,
    )


@pytest.mark.parametrize("case", cases(FILE))
def test_a_file_that_is_no_plan_says_why(case: Case) -> None:
    assert message(edited(case.text)) == case.message
    with pytest.raises(InputError):
        loads_plan(edited(case.text))


@pytest.mark.parametrize("case", cases(CHECK))
def test_a_plan_that_makes_no_sense_says_why(case: Case) -> None:
    loads_plan(edited(case.text))
    assert message(edited(case.text)) == case.message


@pytest.mark.parametrize("case", cases(CHECK))
def test_without_the_document_a_problem_has_no_line(case: Case) -> None:
    plan = loads_plan(edited(case.text))
    with pytest.raises(InputError) as caught:
        check_plan(plan, TOY, cluster_from_content(plan.cluster.content), file="plan.json")
    assert all(
        problem.file == "plan.json" and problem.line is None for problem in caught.value.problems
    )


TEXTS = {
    "empty": ("", "plan.json:1: found no value, expected valid JSON"),
    "truncated": (
        '{"version": 1,\n "model": {"name": "to',
        "plan.json:2: found unterminated string, expected valid JSON",
    ),
    "comma at the end": (
        '{"version": 1,\n}',
        "plan.json:1: found illegal trailing comma before end of object, expected valid JSON"
        if sys.version_info >= (3, 13)
        else "plan.json:2: found no property name enclosed in double quotes, expected valid JSON",
    ),
    "array": ("[1, 2]", "plan.json:1: found a list of 2, expected a JSON object"),
    "nothing": ("null", "plan.json:1: found nothing, expected a JSON object"),
    "name twice": (
        '{"version": 1,\n "model": {},\n "version": 1}',
        "plan.json:3: version: found a second value, expected only one",
    ),
    "nested without end": (
        '{"version": ' + "[" * 100_000,
        "Cannot read plan.json because its tables are nested too deeply. Try a simpler document.",
    ),
    "number without end": (
        '{"version": ' + "1" * 5000 + "}",
        "Cannot read plan.json because a number in it is too long. Try a simpler document.",
    ),
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.values(), ids=TEXTS.keys())
def test_text_that_is_no_json_object(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        loads_plan(text)
    assert str(caught.value) == expected


def test_lines_are_known_even_of_what_is_nested_deeply() -> None:
    with pytest.raises(
        InputError, match=r"plan.json:1: version: found a list of 1, expected one of 1"
    ):
        loads_plan('{"version": ' + "[" * 700 + "]" * 700 + "}")


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found a folder, expected a file$"):
        load_plan(tmp_path)
