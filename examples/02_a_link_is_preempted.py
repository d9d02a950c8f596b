"""What happens to a plan while others take its link, and what another schedule would do about it.

python examples/02_a_link_is_preempted.py
"""

from dataclasses import replace

import argosy
from argosy.schedule import ScheduleKind

plan = argosy.load_plan("llama-3-8b-on-mixed-16")
chain = argosy.load_model(
    "llama-3-8b", sequence_length=plan.model.sequence_length, dtype=plan.model.dtype
)
cluster = argosy.load_cluster("mixed-16")

taken = argosy.Trace.from_steps(
    [(30.0, 5e8), (60.0, 25e9 / 8)], initial=25e9 / 8
)  # bytes/s: 4 of 25 Gbit/s for 30 s
links = tuple(
    replace(link, bandwidth=taken) if link.name.startswith("v0.nic") else link
    for link in cluster.links
)
preempted = replace(cluster, links=links)

print("schedule     calm  while preempted")
for name, spec in {
    "1f1b": argosy.ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    "2f2b": argosy.ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    "4f4b": argosy.ScheduleSpec(kind=ScheduleKind.KFKB, k=4),
    "eager": argosy.ScheduleSpec(kind=ScheduleKind.EAGER),
}.items():
    seconds = argosy.simulate(
        replace(plan, schedule=spec), chain, preempted, iterations=8
    ).iteration_seconds
    print(f"{name:8} {seconds[0]:6.2f} s {max(seconds):13.2f} s")
