"""One NVIDIA card as two unequal devices: `python benchmarks/gpu_lab.py [GPT_LAYERS]` prints a JSON
object per line.

Ranks get 66 % and 33 % of the card's multiprocessors through CUDA MPS. Their layers are profiled
while both work, the link between them (host memory and gloo) is measured, plans are made from that,
predicted, run and compared: the even split, even and proportional data parallelism, and Argosy's.
Needs torch and a card; no other package of the tests.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from argosy.baselines import BASELINES, NoPlan  # noqa: E402
from argosy.baselines import PlanningJob as Question  # noqa: E402
from argosy.cluster.file import build_cluster  # noqa: E402
from argosy.cluster.probe_notes import ProbeNotes  # noqa: E402
from argosy.cluster.topology import Cluster  # noqa: E402
from argosy.cost.compute import ComputeModel  # noqa: E402
from argosy.document import parse_toml  # noqa: E402
from argosy.dtype import Dtype  # noqa: E402
from argosy.explain import with_prediction  # noqa: E402
from argosy.lab.card import SharedCard  # noqa: E402
from argosy.measure.probe import probe_links  # noqa: E402
from argosy.measure.profile import profile_model  # noqa: E402
from argosy.plan.file import dumps_plan, load_plan  # noqa: E402
from argosy.plan.plan import Plan  # noqa: E402
from argosy.planner import Settings, find_plan  # noqa: E402
from argosy.runtime.processes.ranks import devices_by_rank  # noqa: E402
from argosy.runtime.step.trainer import parallelize  # noqa: E402
from argosy.workload.profile_file import dump_profile, read_profile  # noqa: E402

SHARES = {"a0.0": 66, "a0.1": 33}
WIDTH, HEADS, SEQUENCE, VOCABULARY = 1024, 16, 1024, 32_768
GLOBAL_BATCH = 32
STEPS = 6


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


def measure_parts(num_layers: int, folder: Path) -> None:
    """One rank: its layers while the other measures its own, then the link."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", 0)
    model = gpt(min(num_layers, 2)).to(device)
    dist.barrier()
    name = f"card-{SHARES[os.environ['ARGOSY_DEVICE']]}"
    profile = profile_model(
        model, loss_of, tokens(32), name="gpt", kind=name, samples=(1, 2, 4, 8, 16, 32), dtype=Dtype.FP32,
        device=device, seconds=0.4, sequence_length=SEQUENCE,
    )  # fmt: skip
    (folder / f"profile-{rank}.json").write_text(dump_profile(profile), encoding="utf-8")
    links = list(probe_links(ProbeNotes(), seconds=0.2, report=lambda what: None))
    if rank == 0:
        found = {
            "bandwidth": statistics.mean(one.bandwidth for one in links),
            "latency": links[0].latency,
        }
        (folder / "link.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(num_layers: int, plan_file: Path, result: Path) -> None:
    """One rank of a run."""
    torch.set_float32_matmul_precision("high")
    plan = load_plan(plan_file)
    batch = tokens(GLOBAL_BATCH)
    trainer = parallelize(
        gpt(num_layers), loss_of, lambda p: torch.optim.AdamW(p, lr=1e-4), batch, plan
    )
    losses, times = [trainer.step(batch)], []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        begin = time.perf_counter()
        losses.append(trainer.step(batch))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found = {
        "seconds": statistics.median(times),
        "losses": losses,
        "peak": torch.cuda.max_memory_allocated(),
    }
    (result.parent / f"{result.name}-{dist.get_rank()}.json").write_text(
        json.dumps(found), encoding="utf-8"
    )
    dist.barrier()
    dist.destroy_process_group()


def cluster_of(link: dict[str, float]) -> Cluster:
    """The card as two devices; memory is what each may take of it."""
    memory = torch.cuda.get_device_properties(0).total_memory / 2
    kinds = "".join(
        f'[[kinds]]\nname = "card-{share}"\nmemory = "{memory} B"\nmemory_bandwidth = "{4.8e12 * share / 100} B/s"\n'
        f'flops = {{ fp32 = "{share} TFLOP/s" }}\n'
        for share in SHARES.values()
    )
    devices = ", ".join(f'{{ kind = "card-{share}" }}' for share in SHARES.values())
    medium = f'{{ medium = "host", bandwidth = "{link["bandwidth"]} B/s", latency = "{link["latency"]} s" }}'
    text = (
        f'name = "card"\n{kinds}[[nodes]]\nname = "a"\ndevices = [{devices}]\nintra = [{medium}]\n'
    )
    return build_cluster(parse_toml(text, file="card.toml"), folder=Path())


def plans(question: Question, num_layers: int) -> Iterator[tuple[str, Plan]]:
    settings = Settings(level=2, time_budget=20.0, runnable=True, max_width=1)
    best = find_plan(
        question.chain,
        question.cluster,
        global_batch=GLOBAL_BATCH,
        settings=settings,
        model=question.model,
    )
    yield "argosy", best
    half = (num_layers + 2) // 2
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
    yield (
        "even stages",
        replace(best, stages=tuple(sides), micro_batch_size=4, num_micro_batches=GLOBAL_BATCH // 4),
    )
    for name in ("dp-ev", "dp-cp"):
        found = BASELINES[name](question)
        if isinstance(found, NoPlan):
            print(json.dumps({"plan": name, "none": found.reason}), flush=True)
        else:
            yield name, found


def main(num_layers: int) -> None:
    me = str(Path(__file__).resolve())
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
                "predicted_peak": [peaks[name] for name in SHARES],
                "measured_peak": [one["peak"] for one in results],
                "losses": results[0]["losses"],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["parts", layers, name]:
            measure_parts(int(layers), Path(name))
        case ["train", layers, plan_name, result_name]:
            train(int(layers), Path(plan_name), Path(result_name))
        case rest:
            main(int(rest[0]) if rest else 24)
