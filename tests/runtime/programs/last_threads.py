"""Write down the threads that are left when the interpreter ends, after every later exit
handler."""

import atexit
import os
import sys
from pathlib import Path

RANK = os.environ.get("RANK", "0")


def _write() -> None:
    tasks = Path("/proc/self/task").iterdir()
    names = sorted((task / "comm").read_text().strip() for task in tasks)
    (Path(sys.argv[1]) / f"threads-{RANK}.txt").write_text(" ".join(names))


atexit.register(_write)
