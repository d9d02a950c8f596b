"""List the stages that may follow some fixed ones, with the terms that the bound of
``solve.search.pipeline`` needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.menu import Menu
from argosy.solve.search.row import VectorSteps, Where
from argosy.space.price import FloatArray


@dataclass(frozen=True)
class Fan:
    """A table of all stages that may take a place and begin at a cut, one row each.

    The columns are the terms of (1) of ``solve.search.pipeline``, with the transfer to a stage that
    may be in the same node.
    """

    option: NDArray[np.intp]
    vector: NDArray[np.intp]
    end: NDArray[np.intp]
    ways: NDArray[np.intp]
    """[way, where or group, row]: the places that may follow (``Beginnings.all_ways``)."""
    slow: FloatArray
    gated: FloatArray
    waits: FloatArray
    """Seconds of work that remain when the first micro-batch is back: M g - (n - 1) f + 2x."""
    warm: FloatArray
    """Forwards before the first backward, and the first way there and back: (n - 1) f_p + p."""
    passing: FloatArray
    """Way of a micro-batch through the stage and back, with both transfers: p + 2x."""
    ahead: FloatArray
    """Forward and transfer to the next stage: f_p + x."""
    tail: FloatArray
    late: FloatArray
    """Seconds after the last gradient was sent back: w + tail."""
    load: FloatArray
    over: FloatArray
    """[where, row]: x by the place of the next stage (``solve.search.row.Where``)."""
    entering: FloatArray
    """[where, row]: the transfer from the stage before, as this stage needs it."""
    leaving: FloatArray
    """[where, row]: what links need for all micro-batches that are sent on."""
    sent: FloatArray
    """[where, row]: seconds in which all other micro-batches are sent before the last: (M - 1)
    s."""
    back: FloatArray | None
    """[where, row]: the same of gradients that return: (M - 1) s'; None if it does not count."""
    arriving: FloatArray | None
    """[where, row]: seconds in which a replica of the next stage receives all that it needs before
    its first backward; None if they do not count."""
    sending: FloatArray
    """[where, row]: seconds that the followed replica sends a micro-batch."""
    returning: FloatArray
    """Seconds that NICs need for all gradients that go to a stage in another node."""
    fixed: FloatArray
    """[number, row]: the stage for the recurrence of ``solve.search.prefix``, without what it
    sends."""

    def alone(
        self, following: VectorSteps, ahead: FloatArray, around: FloatArray, waiting: FloatArray
    ) -> FloatArray:
        """Return the largest of the terms of (1) that depend on fixed stages and on this one
        only."""
        begins, ends = following.begins[self.vector], following.ends[self.vector]
        load = np.where(begins, self.returning, 0.0)
        load += np.where(ends, self.leaving[Where.OTHER_NODE], 0.0)
        own = [ahead + self.slow + self.tail, around + self.gated, waiting + self.warm]
        return np.asarray(np.maximum.reduce([*own, load, self.load]))


def fan_of(
    menu: Menu,
    left: int,
    first: int,
    lengths: int,
    upper: float,
    slack: float | None,
) -> Fan:
    """Return the stages of at most ``lengths`` bundles that begin at cut ``first``, the ``left``-th
    from the end, and may stay below ``upper``; dominated ones are dropped if there is ``slack``."""
    shape, count, tables = menu.shape, menu.shape.num_micro_batches, menu.starting(first, lengths)
    fits = tables.most >= shape.least_in_flight(left)
    fits &= count * np.maximum(tables.slow, tables.load) < upper
    if left == 1:
        fits &= menu.may_end[menu.vector_of][:, None]
    if slack is not None:
        fits = menu.undominated(tables, fits, shape.most_in_flight(left), slack)
    at = option, place = np.nonzero(fits)
    end = first + 1 + place
    gated, quick, forward, tail, late = (
        table[at]
        for table in (tables.gated, tables.quick, tables.quick_forward, tables.tail, tables.late)
    )
    vector, over = menu.vector_of[option], menu.over[Where.ANYWHERE, option, end]
    most, least = shape.most_in_flight(left), shape.least_in_flight(left)
    before = max(0, shape.least_in_flight(left - 1) - 1) if left > 1 else 0
    return Fan(
        option=option,
        vector=vector,
        end=end,
        ways=menu.beginnings.all_ways[:, :, vector],
        slow=count * tables.slow[at],
        gated=count * gated,
        waits=count * gated - (most - 1) * tables.ahead[at] + 2 * over,
        warm=(least - 1) * forward + quick,
        passing=quick + 2 * over,
        ahead=forward + over,
        tail=tail,
        late=late + tail,
        load=count * tables.load[at],
        over=menu.over[:, option, end],
        entering=menu.over[:, option, first],
        leaving=count * menu.crossing[:, option, end],
        sent=(count - 1) * menu.line[:, option, end],
        back=(count - 1) * menu.back[:, option, end] if menu.has_lines else None,
        arriving=before * menu.arriving[:, option, end] if menu.has_lines else None,
        sending=menu.sending[:, option, end],
        returning=count * menu.crossing[Where.OTHER_NODE, option, first] * menu.is_returned(first),
        fixed=np.array([forward, quick - forward, late, over, over, tail]),
    )
