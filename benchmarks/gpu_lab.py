"""One NVIDIA card as two unequal devices: `python benchmarks/gpu_lab.py [GPT_LAYERS]` prints a JSON
object per line.

Ranks get 66 % and 33 % of the card's multiprocessors through CUDA MPS. Their layers are profiled
while both work, the link between them is measured (NCCL if it can share a card, else host memory
and gloo), plans are made from that, predicted, run and compared: the even split, even and
proportional data parallelism, and Argosy's. The limit is a plain loop on the whole card. Needs
torch and a card; no other package of the tests.

    (1)  ideal seconds of a pipeline = those of its schedule with the mean seconds that its ranks
         measured of forwards, backwards and the update, and messages that take no time
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from argosy.baselines import BASELINES, NoPlan  # noqa: E402
from argosy.baselines import PlanningJob as Question  # noqa: E402
from argosy.cluster.catalogue import device_kind  # noqa: E402
from argosy.cluster.file import build_cluster  # noqa: E402
from argosy.cluster.probe_notes import ProbeNotes  # noqa: E402
from argosy.cluster.topology import Cluster  # noqa: E402
from argosy.cost.compute import ComputeModel  # noqa: E402
from argosy.document import parse_toml  # noqa: E402
from argosy.dtype import Dtype  # noqa: E402
from argosy.explain import with_prediction  # noqa: E402
from argosy.lab.card import SharedCard  # noqa: E402
from argosy.measure.probe import probe_links  # noqa: E402
from argosy.measure.profile import ProfileSettings, profile_model  # noqa: E402
from argosy.plan.file import dumps_plan, load_plan  # noqa: E402
from argosy.plan.plan import Plan  # noqa: E402
from argosy.planner import Settings, find_plan  # noqa: E402
from argosy.runtime.processes.ranks import devices_by_rank  # noqa: E402
from argosy.runtime.processes.world import join, why_unshared  # noqa: E402
from argosy.runtime.step.trainer import Trainer, parallelize  # noqa: E402
from argosy.schedule import ActionKind, ScheduleKind, ScheduleSpec, build_schedule  # noqa: E402
from argosy.timeline import SpanKind  # noqa: E402
from argosy.workload.profile_file import dump_profile, read_profile  # noqa: E402

SHARES = {"a0.0": 66, "a0.1": 33}
WIDTH, HEADS, SEQUENCE, VOCABULARY = 1024, 16, 1024, 32_768
GLOBAL_BATCH = 32
STEPS = 8
WHOLE = (4, 8, 16, 32)
"""Micro-batches that a plain loop on the whole card is tried with."""


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[None, : tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.mixed(self.before(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True
        )
        hidden = hidden + self.joined(mixed.transpose(1, 2).flatten(2))
        return hidden + self.outer(nn.functional.gelu(self.inner(self.between(hidden))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.words(self.before(hidden))


def gpt(num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(num_layers)), Head())


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def tokens(count: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (count, SEQUENCE + 1), generator=torch.Generator().manual_seed(1)
    )


def wait_for_all() -> None:
    """Wait until the other rank is here, too."""
    token = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(token)
    token.item()


def measure_parts(num_layers: int, folder: Path) -> None:
    """One rank: its layers while the other measures its own, then the link."""
    rank = int(os.environ["RANK"])
    join(None, list(SHARES))
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", 0)
    model = gpt(min(num_layers, 4)).to(device)
    wait_for_all()
    name = f"card-{SHARES[os.environ['ARGOSY_DEVICE']]}"
    profile = profile_model(
        model, loss_of, tokens(32), ProfileSettings(name="gpt", kind=name, samples=(1, 2, 4, 8, 16, 32), dtype=Dtype.FP32,
        device=device, seconds=0.5, sequence_length=SEQUENCE, report=lambda what: wait_for_all()))  # fmt: skip
    (folder / f"profile-{rank}.json").write_text(dump_profile(profile), encoding="utf-8")
    while not all((folder / f"profile-{other}.json").exists() for other in range(len(SHARES))):
        loss_of(
            model, tokens(8).to(device)
        ).backward()  # the other still measures, and not an idle card
        torch.cuda.synchronize()
    wait_for_all()
    links = list(probe_links(ProbeNotes(), seconds=0.2, report=lambda what: None))
    if rank == 0:
        found = {
            "backend": dist.get_backend(),
            "bandwidth": statistics.mean(one.bandwidth for one in links),
            "latency": links[0].latency,
        }
        (folder / "link.json").write_text(json.dumps(found), encoding="utf-8")
    wait_for_all()
    dist.destroy_process_group()


def train(num_layers: int, plan_file: Path, result: Path) -> None:
    """One rank of a run."""
    torch.set_float32_matmul_precision("high")
    plan = load_plan(plan_file)
    batch = tokens(GLOBAL_BATCH)
    trainer = parallelize(
        gpt(num_layers), loss_of, lambda p: torch.optim.AdamW(p, lr=1e-4), batch, plan
    )
    losses = [
        trainer.step(batch) for _ in range(2)
    ]  # the second is the first that posts receives ahead
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found = {
        "seconds": statistics.median(times),
        "times": times,
        "losses": losses,
        "peak": torch.cuda.max_memory_allocated(),
        "spans": mean_spans(trainer),
    }
    (result.parent / f"{result.name}-{dist.get_rank()}.json").write_text(
        json.dumps(found), encoding="utf-8"
    )
    wait_for_all()
    dist.destroy_process_group()


def mean_spans(trainer: Trainer) -> dict[str, float]:
    """Mean seconds of what this rank computed in the measured steps, by kind."""
    spans: dict[str, list[float]] = defaultdict(list)
    for mark in trainer.recorder.marks:
        if mark.step >= 2:
            spans[mark.what].append(mark.end - mark.start)
    return {what: statistics.mean(seconds) for what, seconds in spans.items()}


def ideal_seconds(plan: Plan, spans: Sequence[Mapping[str, float]]) -> float:
    """(1), with stage i on rank i."""
    kinds = {ActionKind.FORWARD: SpanKind.FORWARD, ActionKind.BACKWARD: SpanKind.BACKWARD}
    count = len(plan.stages)
    rows = [list(row) for row in build_schedule(plan.schedule, count, plan.num_micro_batches).rows]
    ends: dict[tuple[ActionKind, int, int], float] = {}
    clocks = [0.0] * count
    while any(rows):
        for stage, row in enumerate(rows):
            if not row:
                continue
            action = row[0]
            is_forward = action.kind is ActionKind.FORWARD
            before = stage - 1 if is_forward else stage + 1
            needed = (action.kind, before, action.micro_batch)
            if 0 <= before < count and needed not in ends:
                continue
            clocks[stage] = (
                max(clocks[stage], ends.get(needed, 0.0)) + spans[stage][kinds[action.kind]]
            )
            ends[action.kind, stage, action.micro_batch] = clocks[stage]
            row.pop(0)
    return max(
        clock + own.get(SpanKind.UPDATE, 0.0) for clock, own in zip(clocks, spans, strict=True)
    )


def whole_card(num_layers: int) -> None:
    """Print the seconds of a plain loop's step on the whole card, by micro-batch."""
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", 0)
    model = gpt(num_layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(GLOBAL_BATCH).to(device)
    found = {}
    for size in WHOLE:
        times = []
        for _ in range(2 + STEPS):
            begin = time.perf_counter()
            for rows in batch.split(size):
                (loss_of(model, rows) * (size / GLOBAL_BATCH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        found[size] = statistics.median(times[2:])
    print(json.dumps({"whole card, seconds by micro-batch": found}), flush=True)


def cluster_of(link: dict[str, float]) -> Cluster:
    """The card as two devices; memory is what each may take of it."""
    memory = torch.cuda.get_device_properties(0).total_memory / 2
    rate = device_kind("H200").exchange_rate
    kinds = "".join(
        f'[[kinds]]\nname = "card-{share}"\nmemory = "{memory} B"\nmemory_bandwidth = "{4.8e12 * share / 100} B/s"\n'
        f'flops = {{ fp32 = "{share} TFLOP/s" }}\nexchange_rate = "{rate * share / 100} B/s"\n'
        for share in SHARES.values()
    )
    devices = ", ".join(f'{{ kind = "card-{share}" }}' for share in SHARES.values())
    medium = f'{{ medium = "host", bandwidth = "{link["bandwidth"]} B/s", latency = "{link["latency"]} s" }}'
    text = (
        f'name = "card"\n{kinds}[[nodes]]\nname = "a"\ndevices = [{devices}]\nintra = [{medium}]\n'
    )
    return build_cluster(parse_toml(text, file="card.toml"), folder=Path())


def plans(question: Question, num_layers: int) -> Iterator[tuple[str, Plan]]:
    best = find_plan(
        question.chain,
        question.cluster,
        global_batch=GLOBAL_BATCH,
        settings=Settings(level=2, time_budget=20.0, runnable=True, max_width=1),
        model=question.model,
    )
    yield "argosy", best
    for zero in (0, 3):
        if any(stage.zero != zero for stage in best.stages):
            stages = tuple(replace(stage, zero=zero) for stage in best.stages)
            yield f"the same with ZeRO {zero}", replace(best, stages=stages)
    half = (num_layers + 2) // 2
    even = replace(
        best,
        schedule=ScheduleSpec(kind=ScheduleKind.EAGER),
        micro_batch_size=4,
        num_micro_batches=GLOBAL_BATCH // 4,
    )
    ends = [
        replace(best.stages[0], first=0, end=half),
        replace(best.stages[-1], first=half, end=num_layers + 2),
    ]
    sides = [
        replace(
            stage,
            zero=0,
            replicas=(replace(best.stages[0].replicas[0], devices=(name,), samples=4),),
        )
        for stage, name in zip(ends, SHARES, strict=True)
    ]
    yield "even stages", replace(even, stages=tuple(sides))
    for name in ("dp-ev", "dp-cp"):
        found = BASELINES[name](question)
        if isinstance(found, NoPlan):
            print(json.dumps({"plan": name, "none": found.reason}), flush=True)
        else:
            yield name, found


def main(num_layers: int) -> None:
    me = str(Path(__file__).resolve())
    subprocess.run([sys.executable, me, "whole", str(num_layers)], check=True, timeout=300)
    print(json.dumps({"why no NCCL": why_unshared()}), flush=True)
    with tempfile.TemporaryDirectory() as name, SharedCard(SHARES) as card:
        folder = Path(name)
        card.run([sys.executable, me, "parts", str(num_layers), name], timeout=300)
        link = json.loads((folder / "link.json").read_text(encoding="utf-8"))
        profiles = [read_profile(folder / f"profile-{rank}.json") for rank in range(len(SHARES))]
        blocks = {
            p.device: [(r.micro_batch, r.forward_seconds) for r in p.rows if r.layer == "Block"]
            for p in profiles
        }
        print(
            json.dumps(
                {
                    "card": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "link": link,
                    "block": blocks,
                }
            )
        )
        layers = profiles[0].layers
        repeated = (
            layers[0],
            *(replace(layers[1], name=f"block{i}") for i in range(num_layers)),
            replace(layers[-1], name="head"),
        )
        profiles = [replace(profile, layers=repeated) for profile in profiles]
        chain = replace(profiles[0].chain(dtype=Dtype.FP32), optimizer="adamw")
        model = ComputeModel(profiles={profile.device: profile for profile in profiles})
        question = Question(
            chain=chain, cluster=cluster_of(link), global_batch=GLOBAL_BATCH, model=model
        )
        for title, plan in plans(question, num_layers):
            told = with_prediction(plan, chain, question.cluster, model=model)
            path = folder / "plan.json"
            path.write_text(dumps_plan(told), encoding="utf-8")
            if list(devices_by_rank(plan)) != list(SHARES):
                print(
                    json.dumps({"plan": title, "skipped": "it does not use both devices in order"}),
                    flush=True,
                )
                continue
            card.run(
                [sys.executable, me, "train", str(num_layers), str(path), str(folder / "result")],
                timeout=300,
            )
            results = [
                json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8"))
                for rank in (0, 1)
            ]
            assert told.predicted is not None
            peaks = dict(told.predicted.peak_memory_bytes)
            row = {
                "plan": title,
                "parameters": chain.parameters,
                "stages": [
                    (s.end - s.first, [(r.devices[0], r.samples) for r in s.replicas])
                    for s in plan.stages
                ],
                "schedule": repr(plan.schedule),
                "micro_batches": plan.num_micro_batches,
                "predicted_seconds": told.predicted.iteration_seconds,
                "measured_seconds": results[0]["seconds"],
                "times": results[0]["times"],
                "spans": [one["spans"] for one in results],
                "predicted_peak": [peaks[name] for name in SHARES],
                "measured_peak": [one["peak"] for one in results],
                "losses": results[0]["losses"],
            }
            if len(plan.stages) == len(SHARES) and not plan.schedule.kind.is_split:
                row["ideal_seconds"] = ideal_seconds(plan, [one["spans"] for one in results])
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["parts", layers, name]:
            measure_parts(int(layers), Path(name))
        case ["train", layers, plan_name, result_name]:
            train(int(layers), Path(plan_name), Path(result_name))
        case ["whole", layers]:
            whole_card(int(layers))
        case rest:
            main(int(rest[0]) if rest else 24)
