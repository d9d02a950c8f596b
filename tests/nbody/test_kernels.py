"""What kernels call is a part of their machine code; else the bits would depend on what the disk
had kept of them."""

from __future__ import annotations

import ast
from pathlib import Path

import argosy.nbody

KERNELS = {"compiled", "compiled_exactly", "inlined"}


def test_a_kernel_that_reorders_sums_is_inlined_where_kernels_call_it() -> None:
    calls = []
    for path in sorted(Path(argosy.nbody.__path__[0]).rglob("*.py")):
        functions = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        builds = {
            function.name: decorator.id
            for function in functions
            for decorator in function.decorator_list
            if isinstance(decorator, ast.Name) and decorator.id in KERNELS
        }
        for function in functions:
            if function.name not in builds:
                continue
            for node in ast.walk(function):
                called = (
                    node.func.id
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                    else None
                )
                if called in builds and called != function.name:
                    calls.append((path.name, function.name, called, builds[called]))
    assert len(calls) >= 8
    assert [call for call in calls if call[-1] == "compiled"] == []
