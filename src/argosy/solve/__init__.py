"""Choose a plan: exact solvers of the small problems that the planner consists of."""

from argosy.solve.search.chain import ChainCut, cut_chain

__all__ = ["ChainCut", "cut_chain"]
