"""Generate seeded traces: links that are preempted, sway, wander, burst or flap, and devices that
lag behind.

A generator is a function of a random source and its parameters that yields *steps* without end:
time in seconds and the share of the nominal value from then on, in time order, the first at 0.
``generate`` reads the parameters, cuts the steps at a horizon and scales them:

    (1)  value(t) = nominal * share(t)  for t < horizon,  value(t) = nominal  from the horizon on.

The nominal value returns at the horizon so that no trace ends in a permanent outage. Equal
parameters and seeds give equal traces. ``GENERATORS`` lists all generators; ``docs/traces.md`` has
the same table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.cluster.trace import Trace
from argosy.errors import Mismatch, closest
from argosy.units import TIME

Step = tuple[float, float]
"""Seconds, and the share of the nominal value that holds from then on."""
Random = np.random.Generator

# Largest number of steps of a trace, to bound time and memory.
_MOST_STEPS = 1_000_000


class BadParameter(Mismatch):
    """An error that reports a wrong parameter of a generator; ``parameter`` is its name."""

    def __init__(self, parameter: str, mismatch: Mismatch) -> None:
        ValueError.__init__(self, f"{parameter}: {mismatch}")
        self.parameter = parameter
        self.found, self.expected, self.suggestion = (
            mismatch.found,
            mismatch.expected,
            mismatch.suggestion,
        )


def on_off(random: Random, *, on: float, off: float, low: float, durations: str) -> Iterator[Step]:
    """Yield full and ``low`` in turns: a link or device that others take away for a while."""
    draw = random.exponential if durations == "exponential" else float
    return _alternate(lambda: draw(on), lambda: draw(off), low)


def periodic(
    _: Random, *, period: float, depth: float, phase: float, shape: str, samples: int
) -> Iterator[Step]:
    """Yield full at the start of a period and ``1 - depth`` half a period later; a sample holds its
    middle value."""
    steps = 2 if shape == "square" else samples
    for index in itertools.count(math.floor(phase * steps)):
        position = (index % steps + 0.5) / steps
        drop = (
            float(position > 0.5)
            if shape == "square"
            else (1 - math.cos(2 * math.pi * position)) / 2
        )
        yield max((index / steps - phase) * period, 0.0), 1 - depth * drop


def random_walk(
    random: Random, *, step: float, volatility: float, low: float, high: float
) -> Iterator[Step]:
    """Yield a walk from 1 that is multiplied by exp(volatility * a standard normal number) every
    ``step``, kept within [low, high]."""
    if low > high:
        raise BadParameter("low", Mismatch(low, f"at most high = {high}"))
    share = min(max(1.0, low), high)
    for index in itertools.count():
        yield index * step, share
        share = min(max(share * math.exp(volatility * random.standard_normal()), low), high)


def markov(
    random: Random,
    *,
    levels: Sequence[float],
    dwell: float,
    transitions: Sequence[Sequence[float]] | None,
) -> Iterator[Step]:
    """Yield a Markov chain: exponential stays of mean ``dwell``, first at the first level, each
    followed by a jump by ``transitions``."""
    rows = _uniform_jumps(len(levels)) if transitions is None else transitions
    if len(rows) != len(levels) or any(len(row) != len(levels) for row in rows):
        expected = f"{len(levels)} rows of {len(levels)}, one for each level"
        raise BadParameter("transitions", Mismatch(rows, expected))
    state, time = 0, 0.0
    while True:
        yield time, levels[state]
        time += random.exponential(dwell)
        state = int(random.choice(len(levels), p=rows[state]))


def token_bucket(
    _: Random, *, burst: float, baseline: float, demand: float, busy: float, idle: float
) -> Iterator[Step]:
    """Yield the burst credits of a cloud: full while credits last, ``baseline`` once they are
    spent.

    The bucket starts full, with ``burst`` seconds of full-rate traffic in it, and refills at
    ``baseline``. It is used at ``demand`` for ``busy`` seconds, then not used for ``idle`` seconds,
    in turns: it lasts for level / (demand - baseline) of a busy spell. Once it is empty,
    ``baseline`` holds until the next spell.
    """
    time, level = 0.0, burst
    while True:
        yield time, 1.0
        lasts = level / (demand - baseline) if demand > baseline else math.inf
        if lasts < busy:
            yield time + lasts, baseline
        level = max(level - busy * (demand - baseline), 0.0) + idle * baseline
        level, time = min(level, burst), time + busy + idle


def flap(random: Random, *, every: float, outage: float) -> Iterator[Step]:
    """Yield a link that goes down for ``outage`` after ``every``; both are means of exponential
    times."""
    return _alternate(lambda: random.exponential(every), lambda: random.exponential(outage), 0.0)


def straggler(random: Random, *, every: float, duration: float, slowdown: float) -> Iterator[Step]:
    """Yield a device that is ``slowdown`` times slower for ``duration`` after ``every``; both are
    means of exponential times."""
    return _alternate(
        lambda: random.exponential(every), lambda: random.exponential(duration), 1 / slowdown
    )


def _alternate(
    full: Callable[[], float], reduced: Callable[[], float], low: float
) -> Iterator[Step]:
    time = 0.0
    while True:
        yield time, 1.0
        time += full()
        yield time, low
        time += reduced()


def _uniform_jumps(count: int) -> list[list[float]]:
    """Return equal chances of a jump to every other state; a single state stays."""
    if count == 1:
        return [[1.0]]
    return [
        [0.0 if to == state else 1 / (count - 1) for to in range(count)] for state in range(count)
    ]


def _duration(value: object) -> float:
    seconds = TIME.parse(value)
    if seconds <= 0:
        raise Mismatch(value, f"{TIME.expected}, more than 0")
    return seconds


def _number(low: float, high: float, expected: str) -> Callable[[object], float]:
    def read(value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise Mismatch(value, expected)
        return float(value)

    return read


_share = _number(0, 1, "a share from 0 to 1")
_level = _number(0, 1e6, "a share of at least 0")
_volatility = _number(0, 10, "a number from 0 to 10")
_slowdown = _number(1, 1e6, "a factor of at least 1")


def _samples(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 1000:
        raise Mismatch(value, "a whole number from 2 to 1000")
    return value


def _levels(value: object) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise Mismatch(value, "a list of shares such as [1.0, 0.5]")
    return tuple(_level(item) for item in value)


def _transitions(value: object) -> tuple[tuple[float, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise Mismatch(value, "a list of rows of chances")
    rows = tuple(_levels(row) for row in value)
    for row in rows:
        if abs(sum(row) - 1) > 1e-9:
            raise Mismatch(sum(row), "rows of chances that sum to 1")
    return rows


def _word(*known: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            suggestion = closest(value, known) if isinstance(value, str) else None
            raise Mismatch(value, " or ".join(f'"{word}"' for word in known), suggestion)
        return value

    return read


@dataclass(frozen=True)
class Parameter:
    """A keyword that a generator takes, as a cluster file writes it."""

    read: Callable[[object], Any]
    """Function that converts the value in a file to the argument of the generator; it raises
    ``Mismatch``."""
    default: object
    """Default as a file would write it; ``None`` for a default that has no text."""
    meaning: str


@dataclass(frozen=True)
class Generator:
    """A kind of trace that is generated: its function, and the parameters that a file may set."""

    steps: Callable[..., Iterator[Step]]
    parameters: Mapping[str, Parameter]


# All generators by name, with the parameters that a file may set and their defaults.
GENERATORS: Mapping[str, Generator] = {
    "on-off": Generator(
        on_off,
        {
            "on": Parameter(_duration, "20 s", "mean time at full"),
            "off": Parameter(_duration, "10 s", "mean time at low"),
            "low": Parameter(_share, 0.1, "remaining share at low"),
            "durations": Parameter(
                _word("exponential", "fixed"), "exponential", "how times vary: exponential or fixed"
            ),
        },
    ),
    "periodic": Generator(
        periodic,
        {
            "period": Parameter(_duration, "60 s", "time from one high to the next"),
            "depth": Parameter(_share, 0.5, "share that is missing at the lowest point"),
            "phase": Parameter(_share, 0.0, "phase at time 0, as a share of a period"),
            "shape": Parameter(_word("square", "sine"), "square", "square (two levels) or sine"),
            "samples": Parameter(_samples, 16, "steps in a period of a sine"),
        },
    ),
    "random-walk": Generator(
        random_walk,
        {
            "step": Parameter(_duration, "1 s", "time between changes"),
            "volatility": Parameter(
                _volatility, 0.1, "standard deviation of the logarithm of one change"
            ),
            "low": Parameter(_level, 0.1, "lowest share"),
            "high": Parameter(_level, 1.0, "highest share"),
        },
    ),
    "markov": Generator(
        markov,
        {
            "levels": Parameter(
                _levels, [1.0, 0.5, 0.1], "shares to jump between, starting with the first"
            ),
            "dwell": Parameter(_duration, "10 s", "mean time before a jump"),
            "transitions": Parameter(
                _transitions,
                None,
                "probability of each jump, row by row; default: equal for all other levels",
            ),
        },
    ),
    "token-bucket": Generator(
        token_bucket,
        {
            "burst": Parameter(
                _duration, "60 s", "time of full-rate traffic that a full bucket holds"
            ),
            "baseline": Parameter(_share, 0.2, "share without credits, and rate of refill"),
            "demand": Parameter(_share, 1.0, "share that is used while busy"),
            "busy": Parameter(_duration, "120 s", "time in use"),
            "idle": Parameter(_duration, "60 s", "time without use, after each time in use"),
        },
    ),
    "flap": Generator(
        flap,
        {
            "every": Parameter(_duration, "120 s", "mean time between outages"),
            "outage": Parameter(_duration, "2 s", "mean time at 0"),
        },
    ),
    "straggler": Generator(
        straggler,
        {
            "every": Parameter(_duration, "120 s", "mean time at full speed"),
            "duration": Parameter(_duration, "30 s", "mean time at reduced speed"),
            "slowdown": Parameter(_slowdown, 2.0, "factor by which it is slower"),
        },
    ),
}


def generate(
    name: str, parameters: Mapping[str, object], *, nominal: float, seed: int, horizon: float
) -> Trace:
    """Return the trace (1) of the generator ``name``; ``nominal`` in the unit of the trace,
    ``horizon`` in seconds.

    Raise ``Mismatch`` for an unknown name and ``BadParameter`` for an unknown or wrong parameter.

    >>> fixed = {"on": "4 s", "off": "1 s", "durations": "fixed"}
    >>> generate("on-off", fixed, nominal=10, seed=0, horizon=10)
    Trace(10 until 4 s, 1 until 5 s, 10 until 9 s, 1 until 10 s, then 10)
    """
    generator = GENERATORS.get(name)
    if generator is None:
        raise Mismatch(
            name, f"one of the generators {', '.join(GENERATORS)}", closest(name, GENERATORS)
        )
    arguments = _read(generator.parameters, parameters)
    shares = generator.steps(np.random.default_rng(seed), **arguments)
    steps: list[Step] = []
    for time, share in itertools.takewhile(lambda step: step[0] < horizon, shares):
        if len(steps) == _MOST_STEPS:
            raise Mismatch(
                name, f"at most {_MOST_STEPS:,} changes before the horizon", "make durations longer"
            )
        steps.append((time, nominal * share))
    return Trace.from_steps([*steps, (horizon, nominal)], initial=nominal)


def _read(known: Mapping[str, Parameter], given: Mapping[str, object]) -> dict[str, Any]:
    for name in given:
        if name not in known:
            expected = f"one of the parameters {', '.join(known)}"
            raise BadParameter(name, Mismatch(name, expected, closest(name, known)))
    arguments = {}
    for name, parameter in known.items():
        try:
            arguments[name] = parameter.read(given.get(name, parameter.default))
        except Mismatch as error:
            raise BadParameter(name, error) from None
    return arguments
