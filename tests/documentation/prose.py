"""Find docstrings that are no sentences: ``python tests/documentation/prose.py PATH ...``.

A docstring of a module, class or function must

    (1)  contain a verb in its first sentence: an imperative ("Return the ..."), a finite verb
         ("is", "holds", "may run"), or a relative clause ("A stage that runs on ..."),
    (2)  not begin with a word that makes a riddle of it: "Of", "What", "Whether", "The same", or a
         number in brackets.

Verbs are recognised by a word list, so a noun that is spelled as a verb passes (1).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AUXILIARIES = """
is are was were be been has have had do does did can cannot may might must will would shall should
could
"""
REGULAR = """
accept account achieve act adapt add adjust admit advance agree align allocate allow analyse answer
append apply approach arrive ask assemble assert assign assume attach attend average avoid balance
begin behave belong block bound break bring buffer build bundle cache calculate call cancel capture
carry cast catch change charge check choose claim clean clear clip clone close code collect combine
come compare compile complete compose compress compute concatenate configure connect consist
construct consume contain continue contribute control convert coordinate copy correct cost count
cover crash create cross cut cycle deal decide declare decode decompress decrease define delay
delete deliver depend deposit derive describe deserialize detach detect determine differ
differentiate disable discard distribute divide drain draw drift drop emit emulate enable encode end
enforce ensure enter enumerate equal escape estimate evaluate exceed exchange exclude execute exist
exit expand expect explain export express extend extract fail fall feed fetch fill filter find
finish fit fix flatten fold follow forget form format forward free freeze gather generate get give
go group grow guard handle happen hash help hide hold hold identify ignore import improve include
increase infer inform initialise initialize insert inspect install interpolate interrupt invert
iterate join jump keep kick kill know label lack last launch lead leave let lie limit list listen
load locate lock log look lose lower make map mark match mean measure meet merge migrate minimise
minimize miss model modify move multiply name need normalise notice notify number obtain occur offer
open optimise order overlap overwrite own pack pad parse partition pass pause pay perform pick pin
place plan play point poll post predict prefer prepare prevent price print probe process produce
profile promise propagate protect prove provide prune pull push put raise rank reach react read rebuild
receive recognise recompute record recover reduce refer refuse register reject relate release rely
remain remember remove rename render repeat replace replay report represent request require reserve
reset reshape resolve respect respond restart restore restrict result resume retry return reuse
reverse rewrite round route run sample satisfy save scale scan scatter schedule score search see
select send separate serialise serialize serve set shape shard share shift show shrink shut sign
simulate size skip slice snap solve sort split spread stand start state stay step stop store
stream subtract suggest sum summarise summarize supply support suppress survive switch synchronise
take talk target tell terminate test tie time total trace track trade train transfer transform
translate transmit traverse treat trim truncate try turn undo unpack update use validate vary verify
view visit wait walk warn watch weigh win wrap write yield
"""
IRREGULAR = """
made took taken gave given held kept sent ran went gone came built chosen chose found left lost
met put read said seen saw shown stood told thought understood won written wrote began begun
broken brought caught cut drawn drew fell fallen got grew grown hid hidden knew known laid led
lent let paid sold set shut split spent spread
"""
RIDDLE = re.compile(r"(Of|What|Whatever|Whether|Who|Whose|The same)\b|\(\d+\)")


def _forms(verb: str) -> set[str]:
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        third = verb + "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        third = verb[:-1] + "ies"
    else:
        third = verb + "s"
    stem = verb[:-1] if verb.endswith("e") else verb
    past = verb[:-1] + "ied" if verb.endswith("y") and verb[-2] not in "aeiou" else stem + "ed"
    return {third, past, verb + verb[-1] + "ed"}


BASES = set(REGULAR.split())
VERBS = {*AUXILIARIES.split(), *IRREGULAR.split()} | {
    form for verb in BASES for form in _forms(verb)
}


@dataclass(frozen=True)
class Finding:
    """A docstring that breaks a rule."""

    path: Path
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text[:90]}"


def first_sentence(docstring: str) -> str:
    """Return the text up to the first full stop, colon or empty line."""
    paragraph = docstring.strip().split("\n\n")[0]
    return re.split(r"(?<=[.:;])\s", " ".join(paragraph.split()))[0]


def has_verb(sentence: str) -> bool:
    """Return whether a sentence has a verb by (1)."""
    words = re.findall(r"[A-Za-z']+", re.sub(r"``[^`]*``", "code", sentence))
    if not words:
        return False
    if words[0].lower() in BASES:
        return True
    negated = any(word.endswith("n't") for word in words)
    return negated or any(word.lower() in VERBS for word in words)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring of a file."""
    yield from docstrings(ast.parse(path.read_text(encoding="utf-8")))


def findings(path: Path) -> Iterator[Finding]:
    """Yield the docstrings of a file that break (1) or (2)."""
    for line, text in docstrings_of(path):
        sentence = first_sentence(text)
        if RIDDLE.match(sentence):
            yield Finding(path, line, sentence, "riddle")
        elif not has_verb(sentence):
            yield Finding(path, line, sentence, "no verb")


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]]
    files = [file for root in roots for file in (sorted(root.rglob("*.py")) or [root])]
    broken = [finding for file in files for finding in findings(file)]
    sys.stdout.write("".join(f"{finding}\n" for finding in broken))
    sys.stdout.write(f"{len(broken)} docstrings to mend in {len(files)} files\n")


if __name__ == "__main__":
    main()
