"""On real processes of this machine: peaks of fine-tuning and of offload, predicted and counted.

``python -m benchmarks fine-tuning`` takes models of transformers, with adapters of peft, and weights
in NF4 and optimizers of bitsandbytes where a case names them. Each case

    (1)  profiles the layers of its model and replays the plan (``benchmarks.memory_ledger``),
         which predicts the peak of every rank as the runtime executes the plan;
    (2)  simulates the plan with the same layers, which is the peak that ``argosy explain`` prints;
    (3)  trains by the plan on one process per rank. Allocations are counted by torch's profiler from
         before the model is built, so a peak has weights, gradients, optimizer state, activations
         and buffers in it.

A row is (1) or (2) over (3), of the rank with the largest error. Cases whose package is missing
are left out. Needs transformers, peft and bitsandbytes.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from argosy.cluster.file import build_cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.lab.job import free_port
from argosy.measure.allocated import Allocations
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.plan.offload import NO_OFFLOAD, parse_offload
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleSpec
from argosy.sim.simulate import simulate
from benchmarks.memory_ledger import peak_bytes
from benchmarks.registry import Benchmark, Row

LENGTH, VOCABULARY, BLOCKS = 192, 6000, 6
TARGET = "0.92 to 1.08"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what of it is trained, and how."""

    name: str
    family: str = "llama"
    tied: bool = False
    lora: tuple[str, ...] = ()
    """The matrices that get adapters; none: all weights are trained."""
    packed: bool = False
    """Whether matrices of blocks are stored in NF4."""
    frozen_blocks: int = 0
    """Number of the first blocks that are frozen, together with the embedding."""
    dtype: Dtype = Dtype.FP32
    optimizer: str = "adamw"
    stages: tuple[int, ...] = (BLOCKS + 2,)
    """Layers of each."""
    recompute: Recompute = Recompute.NONE
    offload: str = ""
    samples: int = 2
    num_micro_batches: int = 4

    @property
    def packages(self) -> set[str]:
        """Return the packages that the case needs beside torch."""
        adapters = {"peft"} if self.lora else set()
        own = self.packed or self.optimizer in ("adamw8bit", "lion")
        return {"transformers"} | adapters | ({"bitsandbytes"} if own else set())


CASES = (
    Case(name="LoRA on q, v of a Llama", lora=("q_proj", "v_proj")),
    Case(
        name="LoRA on all matrices of a Qwen3, stages of 3 and 5 layers",
        family="qwen3",
        tied=True,
        lora=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        stages=(3, 5),
    ),
    Case(
        name="LoRA on NF4 weights of a Llama, bf16",
        lora=("q_proj", "v_proj", "down_proj"),
        packed=True,
        dtype=Dtype.BF16,
    ),
    Case(
        name="all weights of a GPT-2, 8-bit AdamW, bf16",
        family="gpt2",
        dtype=Dtype.BF16,
        optimizer="adamw8bit",
    ),
    Case(name="all weights of a Mistral, Lion", family="mistral", optimizer="lion", stages=(4, 4)),
    Case(name="all weights of a Qwen2, Adafactor", family="qwen2", optimizer="adafactor"),
    Case(name="all weights of a Llama, optimizer state offloaded", offload="optimizer"),
    Case(
        name="all weights of a Llama, activations offloaded",
        offload="activations",
        samples=4,
    ),
    Case(
        name="all weights of a GPT-2, both offloaded, stages of 3 and 5 layers",
        family="gpt2",
        offload="optimizer,activations",
        stages=(3, 5),
    ),
    Case(
        name="a GPT-2 with embedding and 4 blocks frozen, stages of 4 and 4 layers",
        family="gpt2",
        frozen_blocks=4,
        stages=(4, 4),
    ),
    Case(
        name="LoRA on q, v of a Llama, recomputed, stages of 2, 2 and 4 layers",
        lora=("q_proj", "v_proj"),
        recompute=Recompute.FULL,
        stages=(2, 2, 4),
    ),
)


def build(case: Case) -> nn.Module:
    """Return the model of a case, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    if case.family == "gpt2":
        settings: Any = transformers.GPT2Config(
            n_embd=320, n_layer=BLOCKS, n_head=5, n_positions=LENGTH, vocab_size=VOCABULARY,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=case.tied,
        )  # fmt: skip
    else:
        settings = transformers.AutoConfig.for_model(
            case.family, hidden_size=320, intermediate_size=864, num_hidden_layers=BLOCKS, num_attention_heads=5,
            num_key_value_heads=1, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
            tie_word_embeddings=case.tied,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings)
    if case.dtype is Dtype.BF16:
        model.to(torch.bfloat16)
    if case.packed:
        pack(model)
    if case.lora:
        import peft

        adapters = peft.LoraConfig(r=8, target_modules=list(case.lora), task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)  # type: ignore[arg-type]
    if case.frozen_blocks:
        inner: Any = model.transformer
        for module in (inner.wte, inner.wpe, *inner.h[: case.frozen_blocks]):
            module.requires_grad_(False)
    return model


def pack(model: Any) -> None:
    """Store the matrices of blocks in NF4."""
    import bitsandbytes

    for block in model.model.layers:
        for name, layer in list(block.named_modules()):
            if not isinstance(layer, nn.Linear):
                continue
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            packed.load_state_dict(layer.state_dict())
            packed.requires_grad_(False)
            block.set_submodule(name, packed.to("cpu"))


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of a case."""
    if name in ("adamw8bit", "lion"):
        import bitsandbytes

        own = {"adamw8bit": "AdamW8bit", "lion": "Lion"}[name]
        return lambda held: getattr(bitsandbytes.optim, own)(held, lr=1e-4)
    if name == "adafactor":
        return torch.optim.Adafactor
    return lambda held: torch.optim.AdamW(held, foreach=True)  # the default on a GPU


def loss_fn(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of the next token."""
    scores: Tensor = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def plan_of(case: Case) -> Plan:
    """Return the plan of a case: a pipeline with one device per stage."""
    ends = [sum(case.stages[: at + 1]) for at in range(len(case.stages))]
    stages = tuple(
        Stage(
            first=end - count,
            end=end,
            replicas=(Replica(devices=(f"n0.{at}",), samples=case.samples),),
            recompute=case.recompute,
            offload=parse_offload(case.offload) if case.offload else NO_OFFLOAD,
        )
        for at, (count, end) in enumerate(zip(case.stages, ends, strict=True))
    )
    return Plan(
        model=ModelRef(
            name="tuned", sequence_length=LENGTH, dtype=case.dtype, optimizer=case.optimizer
        ),
        cluster=ClusterRef(name="local", hash="", content="{}"),
        global_batch=case.samples * case.num_micro_batches,
        micro_batch_size=case.samples,
        num_micro_batches=case.num_micro_batches,
        schedule=ScheduleSpec(),
        stages=stages,
    )


def batch_of(case: Case) -> Tensor:
    """Return tokens of a global batch."""
    generator = torch.Generator().manual_seed(0)
    count = case.samples * case.num_micro_batches
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)


def predicted(case: Case) -> list[tuple[float, float]]:
    """Return (1) and (2): the peaks of every rank in bytes, replayed and simulated."""
    settings = ProfileSettings(
        name="tuned",
        kind="CPU-core",
        samples=(case.samples,),
        dtype=case.dtype,
        seconds=0.0,
        sequence_length=LENGTH,
    )
    profile = profile_model(build(case), loss_fn, batch_of(case), settings)
    chain, plan = profile.chain(optimizer=case.optimizer), plan_of(case)
    replayed = peak_bytes(plan, chain)
    node = {
        "name": "n",
        "devices": {"kind": "CPU-core", "count": len(case.stages)},
        "intra": [{"medium": "loopback", "bandwidth": "1 GB/s", "latency": "50 us"}],
    }
    document = Document("cluster", {"name": "local", "nodes": [node]}, {})
    cluster = build_cluster(document, folder=Path())
    model = ComputeModel(profiles={"CPU-core": profile})
    simulated = simulate(plan, chain, cluster, model=model).peak_memory()
    return [(replayed[name], simulated[name]) for name in plan.devices]


def counted(case: Case) -> list[float]:
    """Return (3): the peak of every rank in bytes, by torch's own count."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_train, args=(rank, case, port, results))
        for port in [free_port()]
        for rank in range(len(case.stages))
    ]
    for process in ranks:
        process.start()
    peaks = dict(results.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join()
    return [peaks[rank] for rank in range(len(ranks))]


def _train(rank: int, case: Case, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=len(case.stages))
    batch = batch_of(case)
    with Allocations(torch.device("cpu")) as allocations:
        trainer = parallelize(
            build(case), loss_fn, make_optimizer(case.optimizer), batch, plan_of(case)
        )
        trainer.step(batch)
        gc.collect()
        allocations.mark()
        trainer.step(batch)
    results.put((rank, allocations.segments[-1].peak))
    dist.destroy_process_group()


def measure() -> list[Row]:
    """Return predicted over counted of every case that can run here."""
    return [row for case in CASES for row in _rows(case)]


def _rows(case: Case) -> Iterator[Row]:
    if any(importlib.util.find_spec(name) is None for name in case.packages):
        return
    guesses, real = predicted(case), counted(case)
    peaks = ", ".join(f"{peak / 2**20:.1f}" for peak in real)
    for at, how in enumerate(("replayed", "simulated")):
        ratios = [guess[at] / peak for guess, peak in zip(guesses, real, strict=True)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        yield Row(what=f"{case.name}, {how} ({peaks} MiB)", value=worst, unit="", target=TARGET)


BENCHMARK = Benchmark(
    name="fine-tuning",
    shows="peaks of fine-tuning and offload on real processes, predicted over counted",
    measure=measure,
)
