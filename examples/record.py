"""Run examples and keep what they print beside them: ``python examples/record.py [01 02 ...]``; by
default all."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = sorted(HERE.glob("[0-9][0-9]_*.py"))


def printed(example: Path, *arguments: str) -> str:
    """Return what an example prints on stdout, without times that depend on the machine."""
    done = subprocess.run(
        [sys.executable, str(example), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{example.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    text = re.sub(r"in [\d.]+ s(, drift[^:]*)?:\s+\S*/", "in ... s: ", done.stdout)
    text = re.sub(r"in [\d.]+ m?s of CPU time", "in ... of CPU time", text)
    return "\n".join(line.rstrip() for line in text.split("\n"))


if __name__ == "__main__":
    for example in EXAMPLES:
        if not sys.argv[1:] or example.name[:2] in sys.argv[1:]:
            example.with_suffix(".txt").write_text(printed(example), encoding="utf-8")
            print(f"recorded {example.stem}")
