"""A link that is down cuts a cluster in parts; plans are for one of them."""

from __future__ import annotations

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.lasting import at_time_zero, within_reach
from argosy.planner import find_plan
from argosy.workload.load import load_model


def test_what_is_cut_off_counts_as_lost_and_the_rest_is_planned_for() -> None:
    calm = with_changes(load_cluster("mixed-8"), [])
    assert within_reach(calm) is calm
    cut = calm.nodes[1]
    down = with_changes(calm, [{"link": f"{cut.name}.nic", "steps": [["0 s", "0 Gbit/s"], ["60 s", "25 Gbit/s"]]}])
    left = within_reach(at_time_zero(down))
    lost = {device.name for device in left.devices if device.speed.at(0) == 0}
    parts = [set(node.devices) for node in calm.nodes]
    assert lost in parts
    chain = load_model("gpt2", sequence_length=512, dtype="fp16")
    assert not lost & set(find_plan(chain, left, global_batch=16).devices)


def test_of_several_parts_the_fastest_stays() -> None:
    calm = with_changes(load_cluster("mixed-16"), [])
    changes = [{"link": "v*.nic", "steps": [["0 s", "0 Gbit/s"]]}]
    left = within_reach(at_time_zero(with_changes(calm, changes)))
    assert {device.name[0] for device in left.devices if device.speed.at(0) > 0} == {"a"}
