"""Share links among flows by max-min fairness, computed by progressive filling.

All rates rise together; when a link is full, its flows keep their rate and the others continue. The
result is the only allocation in which no flow can get more without taking from a flow that has no
more than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def max_min_rates(flows: Sequence[Sequence[int]], capacity: Mapping[int, float]) -> list[float]:
    """Return the rate of every flow in bytes/s, given the links that each flow crosses.

    >>> max_min_rates([(0,), (0, 1), (1,)], {0: 10.0, 1: 30.0})
    [5.0, 5.0, 25.0]
    """
    if len(flows) == 1:
        return [min(capacity[link] for link in flows[0])]
    rates = [0.0] * len(flows)
    left = {link: capacity[link] for links in flows for link in links}
    users: dict[int, list[int]] = {link: [] for link in left}
    for flow, links in enumerate(flows):
        for link in links:
            users[link].append(flow)
    count = {link: len(members) for link, members in users.items()}
    open_flows = [True] * len(flows)
    while count:
        tightest = min(count, key=lambda link: left[link] / count[link])
        level = left[tightest] / count[tightest]
        for flow in users[tightest]:
            if not open_flows[flow]:
                continue
            open_flows[flow] = False
            rates[flow] = level
            for link in flows[flow]:
                left[link] = max(left[link] - level, 0.0)
                count[link] -= 1
                if not count[link]:
                    del count[link]
    return rates
