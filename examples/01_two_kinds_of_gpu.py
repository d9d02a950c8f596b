"""A plan for four A6000 and four 2080 Ti: which layers run where, and what the best even split
loses.

python examples/01_two_kinds_of_gpu.py
"""

import argosy
from argosy.baselines import BASELINES, NoPlan, PlanningJob

chain = argosy.load_model("gpt2-xl", dtype="fp16")
cluster = argosy.load_cluster("mixed-8")
plan = argosy.find_plan(chain, cluster, global_batch=64)

print(f"{chain!r}\n{cluster!r}\n")
for number, stage in enumerate(plan.stages):
    kinds = sorted({cluster.device(name).kind.name for name in stage.devices})
    samples = ":".join(str(replica.samples) for replica in stage.replicas)
    print(
        f"stage {number}: layers {stage.first:2} to {stage.end - 1:2} on {' + '.join(kinds)}, samples {samples}"
    )

ours = argosy.simulate(plan, chain, cluster).iteration_seconds[0]
even = BASELINES["megatron"](
    PlanningJob(chain=chain, cluster=cluster, global_batch=64, model=argosy.ComputeModel())
)
assert not isinstance(even, NoPlan)
theirs = argosy.simulate(even, chain, cluster).iteration_seconds[0]
print(
    f"\nours {ours:.2f} s an iteration, the best even split {theirs:.2f} s: {theirs / ours:.2f} times as long"
)
