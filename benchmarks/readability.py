"""How dense a code base reads: ``python -m benchmarks.readability src/argosy [OTHER_PACKAGE ...]``.

    tokens        of code in a line that has any; comments, docstrings and layout are not counted
    wide          lines of more than 100 columns, in percent of all that are not blank
    constants     names of capital letters that are given a number, at the top of a module
    bare          loop variables and results that describe nothing: ``one``, ``each``, ``other``, ``found``
    parameters    functions with more than six
    long          functions of more than 50 lines
    moulds        docstrings that begin with "Of", "What" or a number in brackets, in percent
    twice         names of public classes that occur more than once in the package
    crowded       folders with more than 20 modules

Every figure is of the package alone, without its tests. ``--sizes`` prints tokens and lines of code, and all lines,
of each of its parts instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDEST = 100
"""Columns."""
MOST_PARAMETERS = 6
LONGEST = 50
"""Lines of a function."""
MOST_MODULES = 20
"""In one folder."""
BARE = {"one", "each", "other", "found"}
_MOULD = re.compile(r"(Of|What)\b|\(\d+\)")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of a package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> Iterator[_Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, _Function))

    @property
    def prose(self) -> Iterator[tuple[ast.Expr, str]]:
        """Docstrings, also those below a field or a constant, and their texts."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield node, text


def modules(package: Path) -> list[Module]:
    """Every module of a package, without its tests."""
    paths = sorted(path for path in package.rglob("*.py") if "tests" not in path.parts)
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [Module(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def tokens_per_line(module: Module) -> Counter[int]:
    """By line, the tokens of code that begin in it."""
    prose = {
        line
        for node, _ in module.prose
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _LAYOUT and token.start[0] not in prose:
            found[token.start[0]] += 1
    return found


def is_number(value: ast.expr | None) -> bool:
    """Whether an expression is a number, or several."""
    match value:
        case ast.Constant(value=int() | float()):
            return not isinstance(value.value, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=parts):
            return bool(parts) and all(map(is_number, parts))
    return False


def constants(module: Module) -> int:
    count = 0
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            count += sum(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    return count


def measures(package: Path) -> dict[str, float]:
    """The figures of a package, in the order in which the module describes them."""
    every = modules(package)
    lines = [line for module in every for line in module.text.splitlines() if line.strip()]
    tokens = [count for module in every for count in tokens_per_line(module).values()]
    functions = [function for module in every for function in module.functions]
    docstrings = [text.strip() for module in every for _, text in module.prose]
    names = [
        node for module in every for node in ast.walk(module.tree) if isinstance(node, ast.Name)
    ]
    classes = Counter(
        node.name
        for module in every
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    rooms = Counter(module.path.parent for module in every)
    return {
        "lines": len(lines),
        "tokens": sum(tokens) / len(tokens),
        "wide": 100 * sum(len(line) > WIDEST for line in lines) / len(lines),
        "constants": sum(map(constants, every)),
        "bare": sum(isinstance(name.ctx, ast.Store) and name.id in BARE for name in names),
        "parameters": sum(parameters(function) > MOST_PARAMETERS for function in functions),
        "long": sum(
            (function.end_lineno or 0) - function.lineno + 1 > LONGEST for function in functions
        ),
        "moulds": 100
        * sum(bool(_MOULD.match(text)) for text in docstrings)
        / max(len(docstrings), 1),
        "twice": sum(count > 1 for count in classes.values()),
        "crowded": sum(count > MOST_MODULES for count in rooms.values()),
    }


def sizes(package: Path) -> dict[str, tuple[int, int, int]]:
    """Tokens of code, lines of code and all lines, by folder of the package, and of all."""
    parts: dict[str, list[int]] = {}
    for module in modules(package):
        place = module.path.relative_to(package).parts
        tokens = tokens_per_line(module)
        counts = (tokens.total(), len(code_lines(module)), len(module.text.splitlines()))
        for part in (place[0] if len(place) > 1 else ".", "all"):
            parts[part] = [a + b for a, b in zip(parts.get(part, [0, 0, 0]), counts, strict=True)]
    return {part: (tokens, code, every) for part, (tokens, code, every) in sorted(parts.items())}


def code_lines(module: Module) -> set[int]:
    """The lines that a token of code is in, also those inside a text of several lines."""
    begun = tokens_per_line(module)
    return {
        line
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type not in _LAYOUT and token.start[0] in begun
        for line in range(token.start[0], token.end[0] + 1)
    }


def parameters(function: _Function) -> int:
    """Without ``self`` and ``cls``."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def table(packages: Sequence[Path]) -> str:
    """A column per package."""
    columns = {package.name: measures(package) for package in packages}
    rows = next(iter(columns.values()))
    width = max(9, *map(len, columns))
    head = " " * 11 + " ".join(f"{name:>{width}}" for name in columns)
    body = [
        f"{row:11}" + " ".join(f"{column[row]:{width},.4g}" for column in columns.values())
        for row in rows
    ]
    return "\n".join([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readability", description="How dense a code base reads."
    )
    parser.add_argument(
        "packages", nargs="+", type=Path, metavar="PACKAGE", help="the folder of a package"
    )
    parser.add_argument("--sizes", action="store_true", help="tokens and lines of every folder")
    given = parser.parse_args()
    packages = given.packages
    if missing := next((package for package in packages if not any(package.rglob("*.py"))), None):
        parser.error(f"found no Python file in {missing}, expected the folder of a package")
    if not given.sizes:
        print(table(packages))
        return
    for package in packages:
        print(f"{package.name:14} {'tokens':>9} {'code':>9} {'lines':>9}")
        for part, counts in sizes(package).items():
            print(f"{part:14} " + " ".join(f"{count:9,}" for count in counts))


if __name__ == "__main__":
    main()
