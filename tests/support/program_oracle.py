"""The choice of a program as an integer programme: the independent answer of HiGHS."""

from __future__ import annotations

import itertools
from typing import Any

import highspy
import numpy as np

from argosy.solve.programs.elimination import AssignmentProblem


def _total(both: dict[tuple[int, int], Any], x: int | None = None, y: int | None = None) -> Any:
    terms = [term for (a, b), term in both.items() if x in (None, a) and y in (None, b)]
    return sum(terms[1:], terms[0] + 0.0) if terms else 0.0


def integer_programme(problem: AssignmentProblem, weights: Any = None) -> float:
    """(1) of ``elimination`` as HiGHS sees it: a binary per choice, one per pair of choices."""
    solver: Any = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    scale = 1e6  # HiGHS stops at absolute gaps of 1e-6
    chosen = [[solver.addBinary(obj=scale * float(c)) for c in cost] for cost in problem.costs]
    for binaries in chosen:
        solver.addConstr(sum(binaries[1:], binaries[0] + 0.0) == 1)
    for i, j, table in problem.pairs:
        both = {}
        for x, y in itertools.product(range(table.shape[0]), range(table.shape[1])):
            if np.isfinite(table[x, y]):
                both[x, y] = solver.addVariable(lb=0.0, ub=1.0, obj=scale * float(table[x, y]))
        for x in range(table.shape[0]):
            solver.addConstr(_total(both, x=x) - chosen[i][x] == 0)
        for y in range(table.shape[1]):
            solver.addConstr(_total(both, y=y) - chosen[j][y] == 0)
    if weights is not None:
        rows = zip(weights, chosen, strict=True)
        terms = [float(w) * b for table, row in rows for w, b in zip(table, row, strict=True)]
        solver.addConstr(sum(terms[1:], terms[0]) <= 1)
    solver.run()
    return float(solver.getInfo().objective_function_value) / scale
