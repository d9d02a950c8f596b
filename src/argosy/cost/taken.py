"""Price what exchanges under ZeRO 2 and 3 take from layers that compute meanwhile.

Kernels of NCCL run on multiprocessors, a multiprocessor that sends computes nothing else, and both
share the memory's bandwidth. R is the number of bytes during whose exchange a device loses a second
of compute (``DeviceKind.exchange_rate``). So x bytes cost x / R of its compute, whatever the link;
a faster link has more multiprocessors at work for a shorter time. For a device with share r of its
replica's work, the sequence in c parts, P trained weights in the stage, Q of them in experts over e
holders, n holders of all weights, m of each expert's, b bytes per weight, and the device's own
efficiency e':

    (1)  sent     = r c ((n - 1) / n (P - Q) + (m - 1) / m Q / e) b, by a gather or a scatter
    (2)  taken    = sent / (e' R)
    (3)  ZeRO 2   a backward takes (2) longer, for a scatter
    (4)  ZeRO 3   a forward takes (2) longer, for a gather; a backward twice (2), for both

R is infinite for kinds that send without multiprocessors, as CPUs do, and for kinds of which it is
not known. Transfers between stages are small, and sums at the end of a step run beside nothing in
the simulator; neither is counted.
"""

from __future__ import annotations

from argosy.cluster.device import Device
from argosy.cost.memory import shared_parameters
from argosy.plan.plan import Stage
from argosy.workload.chain import Chain


def num_exchanges(zero: int) -> tuple[int, int]:
    """Return the exchanges of weights or gradients that a forward (4) and a backward (3), (4) run
    beside."""
    return {2: (0, 1), 3: (1, 2)}.get(zero, (0, 0))


def sent_shares(holders: int, expert: int) -> tuple[float, float]:
    """Return the bytes that a device sends (1) over those of the weights that all holders have, and
    over those of experts' weights."""
    copies = holders // expert
    return (holders - 1) / holders, (copies - 1) / copies / expert


def taken_seconds(chain: Chain, stage: Stage, device: Device, share: float) -> tuple[float, float]:
    """Return the seconds by which exchanges lengthen a forward and a backward of a stage.

    The device does ``share`` of its replica's work.
    """
    forwards, backwards = num_exchanges(stage.zero)
    if not backwards or stage.num_holders < 2:
        return 0.0, 0.0
    common, split = shared_parameters(chain, stage)
    shares = sent_shares(stage.num_holders, stage.expert)
    weights = common * shares[0] + split * shares[1]
    sent = stage.tensor_share(share) * weights * chain.exchanged_bytes(stage.zero)
    taken = sent / (device.efficiency * device.kind.exchange_rate)
    return forwards * taken, backwards * taken
