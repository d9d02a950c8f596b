"""How a plan is chosen: exact solvers of the small problems that the planner is made of."""

from argosy.solve.search.chain import ChainCut, cut_chain

__all__ = ["ChainCut", "cut_chain"]
