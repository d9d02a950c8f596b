"""Leadership, claims and generations hold whatever befalls whichever message: schedules of faults,
played one by one.

The agents' own code runs on a simulated clock and network (``protocol_world``). In every schedule:
no two leaders have one generation; nothing of an older generation is trained after a newer one;
every generation goes on from the newest copies that are whole; no step is left out; the job ends
well on every host, and only its outcome is left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from runtime.protocol_world import Fault, play, told

KINDS = [
    ("kill", 0.0),
    ("kill", 0.7),
    ("kill", 4.0),
    ("leave", 0.0),
    ("cut", 1.0),
    ("cut", 6.0),
    ("kill-worker", 0.0),
]
MESSAGES = 180
"""Of a run to which nothing happens."""
PAIRS = 2000


def faults_at(message: int) -> list[Fault]:
    late = [Fault(message, "late", seconds=seconds) for seconds in (0.5, 3.0)]
    return late + [
        Fault(message, what, host, seconds) for what, seconds in KINDS for host in range(3)
    ]


def check(schedules: Iterable[tuple[Fault, ...]], folder: Path, *, hosts: int = 3) -> None:
    for index, schedule in enumerate(schedules):
        wrong, _ = play(folder / str(index), *schedule, hosts=hosts)
        assert not wrong, (schedule, wrong, told(folder / str(index)))


def test_without_faults_there_is_one_generation(tmp_path: Path) -> None:
    assert play(tmp_path / "run") == ([], MESSAGES)


def test_hosts_that_were_cut_off_do_not_begin_a_job_again_that_is_over(tmp_path: Path) -> None:
    """The first host trains alone and ends; the others claim the first generation after that, and
    would remove what the run has written."""
    check([(Fault(79, "cut", 1, 6.0), Fault(2, "cut", 0, 6.0))], tmp_path)


def test_one_fault_at_a_sample_of_messages(tmp_path: Path) -> None:
    check(((fault,) for at in range(0, MESSAGES, 20) for fault in faults_at(at)), tmp_path)


def cuts_while_the_leader_goes(
    message: int, host: int, tenths: range
) -> Iterable[tuple[Fault, ...]]:
    """Schedules in which a host comes back at any moment of the change of leaders."""
    for what, tenth in itertools.product(("kill", "leave"), tenths):
        yield Fault(message, what, 0), Fault(message - 1, "cut", host, tenth / 10)


def test_a_host_comes_back_while_another_takes_the_lead(tmp_path: Path) -> None:
    """At 6.3 s it joins after the others were told to stop: ranks were once to meet at a port that
    it had not named."""
    check(cuts_while_the_leader_goes(60, 1, range(3, 80, 4)), tmp_path)


def test_of_two_hosts_each_goes_in_turn_and_the_other_goes_on(tmp_path: Path) -> None:
    """The last generation may have been of hosts that are all gone; whoever comes back was not in
    it."""
    goes = itertools.product(
        ("leave", "kill"), (20, 25), ("leave", "kill"), (30, 36, 48, 60), (0.5, 3.0)
    )
    schedules = (
        (Fault(first, what, 1, seconds), Fault(second, then, 0))
        for what, first, then, second, seconds in goes
    )
    check(schedules, tmp_path, hosts=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("host", [1, 2])
@pytest.mark.parametrize("message", range(40, 100, 10))
def test_hosts_come_back_at_any_moment_of_a_change_of_leaders(
    tmp_path: Path, message: int, host: int
) -> None:
    check(cuts_while_the_leader_goes(message, host, range(1, 80)), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("message", range(MESSAGES))
def test_one_fault_at_any_message(tmp_path: Path, message: int) -> None:
    check(((fault,) for fault in faults_at(message)), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_two_faults(tmp_path: Path, seed: int) -> None:
    """Too many to try all (3 million); these are drawn."""
    chance = random.Random(seed)
    every = list(itertools.chain.from_iterable(map(faults_at, range(2 * MESSAGES))))
    check((tuple(chance.sample(every, 2)) for _ in range(PAIRS // 10)), tmp_path)
