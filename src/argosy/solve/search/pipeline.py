"""Search pipelines: which stages, on how many devices of each pool, with how many layers each.

Stages are fixed one after the other from the front. With the terms of ``solve.search.bounds`` and
running sums over the fixed stages (``_Node``): F is the way of the first micro-batch to the next
stage; G is the way there and back to the end of the iteration, with the exchange and update of the
stage in front at which it is longest; Y is the same around a fixed stage whose forwards wait for
backwards. The next stage q, with c = max(G, F + w + tail), gives

    (1)  bound = max( what is fixed,  F + M t + tail,  c + M g,  M load,
                      M crossing,  c + p + 2x + W',  c + p + 2x + (M - 1) s + P',
                      c + p + 2x + (M - 1) s' + R',  F + f_p + x + S',
                      max(Y + p + 2x,  c + M g - (n_q - 1) f + 2x) + R',   Y + (n_q - 1) f_p + p )

which never decreases along a path: a best-first search on it meets complete plans in the order of
their bounds. When the best plan is no slower than the next bound, everything left in the queue is
proven no better. Children of a node are considered one by one, the best first, so that the queue
stays as long as the search is deep.

Placement follows from the numbers of devices (``space.place``), so the transfer from one fixed
stage to the next is priced by whether they share a node, a site, or neither. Contention between
boundaries and changes over time are not modelled here; the simulator judges those.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.boundary import Boundary, in_site
from argosy.solve.search.bounds import gathered, suffix_bounds
from argosy.solve.search.crossings import NO_STAGES, Crossed, NextStages, line_load
from argosy.solve.search.fan import Fan, fan_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.prefix import Fixed, Rest, prefix_times, with_longer_hop
from argosy.solve.search.replica_bound import replica_seconds
from argosy.solve.search.row import VectorSteps, Where, vector_steps
from argosy.solve.search.tied import with_tied
from argosy.space.option import Option, Vector
from argosy.space.price import FloatArray

# The recurrence of fixed stages is evaluated only up to this many forwards; more would cost more
# than it saves.
_MOST_STEPS = 2048
# A dive considers this many children of a node.
_CHILDREN = 4
# The bounds are followed down at once for this many numbers of stages.
_DESCENTS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage that a partial plan has fixed."""

    option: Option
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A list of stages that are fixed from the front, with the running sums of (1)."""

    choices: tuple[Choice, ...]
    left: int
    """Number of stages still to come."""
    first: int
    """The cut before the first layer that is not placed."""
    devices: Vector
    is_near: bool = False
    """Whether the last stage is to be in the node of the first one (``solve.search.tied``)."""
    has_odd: bool = False
    """Whether one of the fixed stages is odd (``solve.search.bounds``)."""
    ahead: float = 0.0
    """F, in seconds."""
    around: float = 0.0
    """G, in seconds."""
    fixed: float = 0.0
    """The largest term of (1) that does not depend on what follows."""
    drained: float = 0.0
    """Y, in seconds."""
    row: int = -1
    """The option of the last fixed stage."""
    is_placed: bool = False
    """Whether the place of the next stage is certain without it."""
    over: float = 0.0
    """Seconds of the transfer from the last fixed stage, as far as they are certain without the
    next one."""
    stages: tuple[Fixed, ...] = ()
    """The stages for the recurrence of ``solve.search.prefix``."""
    is_played: bool = False
    """Whether the recurrence has raised ``fixed`` already."""
    crossed: Crossed = NO_STAGES
    """What the fixed stages send over the line between two sites."""


class _Terms(NamedTuple):
    """The terms of every stage that may follow a node."""

    bound: FloatArray
    """The lower bound (1)."""
    rest: FloatArray
    """The rest of a plan, for ties."""
    hop: FloatArray
    """Seconds of the transfer from the last fixed stage."""
    alone: FloatArray
    """The largest term of (1) that does not depend on what follows."""


@dataclass(order=True)
class _Entry:
    """A node's next-best child that was not considered yet; its siblings follow when it is
    taken."""

    bound: float
    tie: tuple[int, ...]
    children: Iterator[tuple[float, _Node]] = field(compare=False)
    node: _Node = field(compare=False)


class PlanSearch:
    """A best-first search that covers the complete plans of one sub-problem."""

    def __init__(
        self,
        menu: Menu,
        counts: Vector,
        most_stages: int,
        upper: float,
        *,
        slack: float | None = 0.0,
        only_kind: bool = True,
    ) -> None:
        self.menu = menu
        self.shape = menu.shape
        self.slack = slack
        """Seconds by which options that dominance removes may be faster; None for no dominance."""
        self.upper = upper
        most_stages = min(most_stages, menu.prices.num_layers)
        bounding = menu if menu.grid.loose is None else menu.loose
        self.bounds = suffix_bounds(bounding, counts, most_stages, upper, only_kind=only_kind)
        self.cuts: list[int] = menu.grid.cuts.tolist()
        self.lengths = menu.lengths(np.arange(len(menu.options)), upper)
        self.odd = (
            menu.odd if self.bounds.odd is not None else np.zeros(len(menu.options), dtype=bool)
        )
        self.takes = np.array(menu.vectors)
        self.in_site = in_site(menu)
        self.line_load = line_load(menu, self.in_site)
        self.apart = menu.apart(upper)
        """The menu for first stages whose tied weights are not in one node; None if plans are not
        divided by that."""
        self.nexts: dict[Vector, VectorSteps] = {}
        self.fans: dict[tuple[int, int, bool], Fan] = {}
        self.lasts: dict[tuple[Vector, int], Fixed] = {}
        """The least last stages, by the devices that are left and the cut at which they begin."""
        self.heap: list[_Entry] = []
        self.tie = itertools.count()
        for left in range(1, len(self.bounds.any)):
            bound = self.bounds.root(left, counts)
            if bound < upper:
                self._push(bound, iter(()), _Node((), left, 0, counts))
                if self.apart is not None and left > 1:
                    self._push(bound, iter(()), _Node((), left, 0, counts, is_near=True))

    @property
    def bound(self) -> float:
        """Return a lower bound on every plan that was not returned yet."""
        return self.heap[0].bound if self.heap else np.inf

    def descend(self, upper: float) -> Iterator[tuple[Choice, ...]]:
        """Yield, for each number of stages, the plan that the bounds lead to directly, most
        promising first."""
        roots = sorted(
            (entry for entry in self.heap if not entry.node.choices), key=lambda entry: entry.bound
        )
        for root in roots[: _DESCENTS if self.apart is None else 2 * _DESCENTS]:
            if root.bound >= upper:
                return
            node: _Node | None = root.node
            while node is not None and node.left:
                node = next((child for _, child in self._children(node, upper * 1.5, most=1)), None)
            if node is not None:
                yield node.choices

    def next_plan(self, upper: float) -> tuple[float, tuple[Choice, ...]] | None:
        """Return the next complete plan in the order of bounds, or None if the next bound is
        ``upper`` or more."""
        while self.bound < upper:
            plan = self._step(upper)
            if plan is not None:
                return plan
        return None

    def advance(
        self, upper: float, goal: float, most: int
    ) -> list[tuple[float, tuple[Choice, ...]]]:
        """Return the complete plans below ``upper`` that the next ``most`` steps produce; stop at
        ``goal``."""
        plans: list[tuple[float, tuple[Choice, ...]]] = []
        for _ in range(most):
            if self.bound >= goal:
                return plans
            plan = self._step(upper)
            if plan is not None:
                plans.append(plan)
        return plans

    def dive(self, upper: float) -> tuple[Choice, ...] | None:
        """Return the complete plan that the next node leads to, by the recurrence of a few children
        of each node."""
        node = self.heap[0].node if self.heap else None
        while node is not None and node.left:
            children = itertools.islice(self._children(node, upper), _CHILDREN)
            played = (self._played(child, bound) for bound, child in children)
            node = min(played, key=lambda child: child.fixed, default=None)
        return node.choices if node is not None else None

    def _step(self, upper: float) -> tuple[float, tuple[Choice, ...]] | None:
        """Take the node with the least bound: it is put back with a higher one, or expanded, or
        returned as complete."""
        entry = heapq.heappop(self.heap)
        following = next(entry.children, None)
        if following is not None:
            self._push(following[0], entry.children, following[1])
        node = self._played(entry.node, entry.bound)
        if node.fixed > entry.bound:
            if node.fixed < upper:
                self._push(node.fixed, iter(()), node)
            return None
        if not node.left:
            return entry.bound, node.choices
        children = self._children(node, upper)
        first = next(children, None)
        if first is not None:
            self._push(first[0], children, first[1])
        return None

    def _played(self, node: _Node, bound: float) -> _Node:
        """Return the node with the bound of its stages' recurrence; only under a single
        schedule."""
        count = self.shape.num_micro_batches
        is_long = count * len(node.choices) > _MOST_STEPS
        if is_long or node.is_played or not node.choices or len(self.shape.schedules) > 1:
            return node
        (schedule,) = self.shape.schedules
        stages, rest = self._with_rest(node)
        times = prefix_times(schedule, len(node.choices) + node.left, count, stages, rest)
        seconds = times.end
        if self.line_load is not None:
            own = stages[: len(node.choices)]
            queued = self.line_load.queued(node.crossed, node.first, node.left, own, times)
            seconds = max(seconds, queued)
        if not node.left:
            ranges = [(choice.option, choice.first, choice.end) for choice in node.choices]
            seconds = max(seconds, replica_seconds(schedule, count, ranges, stages))
        return replace(node, fixed=max(node.fixed, bound, seconds * (1 - 1e-12)), is_played=True)

    def _with_rest(self, node: _Node) -> tuple[tuple[Fixed, ...], Rest]:
        """Return the stages of a node and the bounds of what follows; a single last stage follows
        as a stage of its own."""
        nothing = Rest(0.0, 0.0, 0.0)
        if not node.left:
            stages = [(choice.option, choice.first, choice.end) for choice in node.choices]
            return with_tied(node.stages, stages, self.menu.ground), nothing
        if node.left == 1:
            return (*node.stages, self._least_last(node)), nothing
        following = self.bounds.after(has_odd=node.has_odd)[node.left][0]
        state = self.bounds.states.index(node.devices)
        return node.stages, Rest(*following[:3, state, node.first].tolist())

    def _least_last(self, node: _Node) -> Fixed:
        """Return the last stage behind a node, with the least value of each number over all
        options."""
        key = (node.devices, node.first)
        if key not in self.lasts:
            fan = self._fan(node)
            which = ~self._next(node.devices).is_short[fan.vector]
            which &= fan.end == self.menu.grid.size
            least = fan.fixed[:, which].min(axis=1, initial=np.inf).tolist()
            self.lasts[key] = (*least, 0.0)
        return self.lasts[key]

    def _push(self, bound: float, children: Iterator[tuple[float, _Node]], node: _Node) -> None:
        heapq.heappush(self.heap, _Entry(bound, (node.left, next(self.tie)), children, node))

    def _children(
        self, node: _Node, upper: float, *, most: int | None = None
    ) -> Iterator[tuple[float, _Node]]:
        """Yield all ways to add the next stage that stay below ``upper``, by (1), ties by the
        shortest rest."""
        fan = self._fan(node)
        terms = self._terms(node, fan)
        bound = terms.bound
        if self.apart is not None:
            bound[~self._is_allowed(node, fan)] = np.inf
        at = np.nonzero(bound < upper)[0]
        if most is not None and len(at) > most:
            at = at[bound[at] <= bound[at].min() * (1 + 1e-9)]
        for row in at[np.lexsort((terms.rest[at], bound[at]))][:most].tolist():
            yield float(bound[row]), self._child(node, fan, row, terms)

    def _next(self, devices: Vector) -> VectorSteps:
        if devices not in self.nexts:
            ground = self.menu.ground
            self.nexts[devices] = vector_steps(self.bounds.states, devices, self.takes, ground)
        return self.nexts[devices]

    def _fan(self, node: _Node) -> Fan:
        is_apart = self.apart is not None and not node.choices and not node.is_near
        key = (node.left, node.first, is_apart)
        if key not in self.fans:
            menu = self.apart if self.apart is not None and is_apart else self.menu
            job = (node.left, node.first, self.lengths, self.upper, self.slack)
            self.fans[key] = fan_of(menu, *job)
        return self.fans[key]

    def _is_allowed(self, node: _Node, fan: Fan) -> NDArray[np.bool_]:
        """Return which rows keep the last stage in the node of the first one, or out of it, as the
        node requires."""
        first = node.choices[0].option if node.choices else None
        is_open = not node.is_near and (first is None or node.left > 1)
        if is_open or (first is not None and first.spans_nodes):
            return np.ones(len(fan.option), dtype=bool)
        home = first.parts[0].pool if first is not None else self.takes[fan.vector].argmax(axis=1)
        behind = self.bounds.states.counts[home] - np.array(self.menu.ground.node_units)[home]
        # Units that are left in the node of the first stage.
        free = self._next(node.devices).left[fan.vector, home] - behind
        if first is None:
            spans = np.array([self.menu.options[option].spans_nodes for option in fan.option])
            return np.asarray(~spans & self.menu.may_end[fan.vector] & (free > 0))
        if node.left > 1:
            return np.asarray(free > 0)
        is_inside = (free >= 0) & (
            self.takes[fan.vector, home] == self.takes[fan.vector].sum(axis=1)
        )
        return np.asarray(is_inside if node.is_near else ~is_inside)

    def _terms(self, node: _Node, fan: Fan) -> _Terms:
        """Return the terms of every row; its bound is infinite if there are too few devices."""
        following = self._next(node.devices)
        hop = self._entering(node, fan)
        longer = np.maximum(hop - node.over, 0.0)
        ahead, waiting = node.ahead + longer, node.drained + 2 * longer
        around = np.maximum(node.around + 2 * longer, ahead + fan.late)
        passing = around + fan.passing
        drained = np.maximum(waiting + fan.passing, around + fan.waits)
        boundary = self._boundary(node, fan.vector)
        joint = boundary.joint(node.left) if boundary is not None else None
        rows, state = np.arange(len(fan.option)), following.state[fan.vector]
        bound, rest = np.full(len(rows), np.inf), np.full(len(rows), np.inf)
        for where, group in fan.ways:
            way, first, whole, tail = self._following(node, fan, state, group)
            back = first
            if fan.arriving is not None and fan.back is not None:
                first = np.maximum(first, fan.arriving[where, rows])
                back = fan.back[where, rows] + first
            more = fan.over[where, rows] - fan.over[Where.ANYWHERE]
            sent = fan.sent[where, rows] + way
            here = np.maximum.reduce(
                [
                    fan.leaving[where, rows],
                    passing + 2 * more + np.maximum(np.maximum(whole, sent), back),
                    drained + 2 * more + first,
                    ahead + fan.ahead + more + tail,
                ]
            )
            if joint is not None:
                back = np.maximum(fan.passing + 2 * more + first, np.maximum(fan.warm, joint.taken))
                there = node.around + 2 * longer
                np.maximum(here, there + joint.back + back, out=here)
                np.maximum(here, passing + 2 * more + joint.sent + way, out=here)
                np.maximum(here, joint.crossing, out=here)
            here[group < 0] = np.inf
            np.minimum(bound, here, out=bound)
            np.minimum(rest, fan.passing + 2 * more + first, out=rest)
        alone = np.maximum(fan.alone(following, ahead, around, waiting), node.fixed)
        np.maximum(bound, alone, out=bound)
        if self.line_load is not None:
            stages = self._next_stages(fan, hop, slice(None))
            bound = np.maximum(bound, self.line_load.bound(node.crossed, node.first, stages))
        bound[following.is_short[fan.vector]] = np.inf
        return _Terms(bound, rest, hop, alone)

    def _next_stages(self, fan: Fan, hop: FloatArray, rows: slice) -> NextStages:
        """Return rows of a fan as ``LineLoad`` takes them."""
        forward, backward = fan.fixed[:2, rows]
        return NextStages(
            fan.vector[rows], fan.end[rows], hop[rows], forward, backward, fan.late[rows]
        )

    def _boundary(self, node: _Node, vectors: NDArray[np.intp]) -> Boundary | None:
        """Return the boundary between the last fixed stage and stages of some vectors; None if its
        place was certain before they were known."""
        if node.row < 0 or node.is_placed or not self.menu.has_lines:
            return None
        begins = self._next(node.devices).begins[vectors]
        return Boundary(self.menu, self.in_site, node.row, node.first, vectors, begins)

    def _following(
        self, node: _Node, fan: Fan, state: NDArray[np.intp], group: NDArray[np.intp]
    ) -> FloatArray:
        """Return P, R, W and S of what follows every row, for a group of beginnings."""
        after = gathered(
            self.bounds.after(has_odd=node.has_odd)[node.left - 1], group, state, fan.end
        )
        if not node.has_odd and self.bounds.odd is not None:
            of_all = gathered(self.bounds.any[node.left - 1], group, state, fan.end)
            after = np.where(self.odd[fan.option], of_all, after)
        return after

    def _entering(self, node: _Node, fan: Fan) -> FloatArray:
        """Return the seconds of the transfer from the last fixed stage to every row: each end needs
        its time for it."""
        begins = self._next(node.devices).begins[fan.vector]
        seconds = np.where(begins, fan.entering[Where.OTHER_NODE], fan.entering[Where.ANYWHERE])
        if node.row < 0:
            return np.asarray(seconds)
        out = [float(table[node.row, node.first]) for table in self.menu.over]
        seconds = np.maximum(seconds, np.where(begins, out[Where.OTHER_NODE], 0.0))
        paired = self.menu.paired(node.row, fan.option, node.first, begins)
        seconds = np.maximum(seconds, paired)
        if len(self.in_site) > 1:
            near = self.in_site[:, self.menu.vector_of[node.row]]
            is_far = ~self.in_site[near][:, fan.vector].any(axis=0)
            for site in np.nonzero(~near)[0].tolist():
                there = is_far & self.in_site[site, fan.vector]
                seconds = np.where(there, np.maximum(seconds, out[Where.SITE + site]), seconds)
        return np.asarray(seconds)

    def _child(self, node: _Node, fan: Fan, row: int, terms: _Terms) -> _Node:
        option, end = int(fan.option[row]), int(fan.end[row])
        following, vector = self._next(node.devices), int(fan.vector[row])
        longer = max(float(terms.hop[row]) - node.over, 0.0)
        ahead, waiting = node.ahead + longer, node.drained + 2 * longer
        around = max(node.around + 2 * longer, ahead + float(fan.late[row]))
        where = self._next_place(node, vector, is_outside=bool(following.ends[vector]))
        is_placed = where == Where.OTHER_NODE and len(self.in_site) == 1
        over = float(fan.over[where, row])
        more = over - float(fan.over[Where.ANYWHERE, row])
        passing = float(fan.passing[row]) + 2 * more
        forward, backward, late, hop, back, tail = fan.fixed[:, row].tolist()
        sent = float(fan.sending[where, row])
        only = slice(row, row + 1)
        stage = (forward, backward, late, hop + more, back + more, tail, sent)
        return _Node(
            choices=(
                *node.choices,
                Choice(self.menu.options[option], self.cuts[node.first], self.cuts[end]),
            ),
            left=node.left - 1,
            is_near=node.is_near,
            first=end,
            devices=tuple(following.left[vector].tolist()),
            has_odd=node.has_odd or bool(self.odd[option]),
            ahead=ahead + float(fan.ahead[row]) + more,
            around=around + passing,
            fixed=float(terms.alone[row]),
            drained=max(waiting + passing, around + float(fan.waits[row]) + 2 * more),
            row=option,
            is_placed=is_placed,
            over=over,
            stages=(*self._with_transfer(node, fan.vector[only], longer), stage),
            crossed=self.line_load.child(
                node.crossed, node.first, self._next_stages(fan, terms.hop, only)
            )
            if self.line_load is not None
            else node.crossed,
        )

    def _next_place(self, node: _Node, vector: int, *, is_outside: bool) -> int:
        """Return what is certain about the place of the stage behind the next one, which takes a
        vector; ``is_outside`` tells whether it is in another node."""
        site = self.menu.last_site
        if node.left == 2 and site is not None and not self.in_site[site, vector]:
            return Where.SITE + site
        return Where.OTHER_NODE if is_outside else Where.ANYWHERE

    def _with_transfer(
        self, node: _Node, vector: NDArray[np.intp], longer: float
    ) -> tuple[Fixed, ...]:
        """Return the fixed stages, the last of them with the transfer to a stage of a vector, whose
        place is known."""
        boundary = self._boundary(node, vector)
        if boundary is None:
            return with_longer_hop(node.stages, longer)
        sending = float(boundary.between(self.menu.sending)[0])
        return with_longer_hop(node.stages, longer, sending)
