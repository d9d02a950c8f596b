"""``make fuzz``: changed inputs for every reader and command, in several processes, until a count
or a time is reached.

python tests/fuzz [TARGET ...] [--count N] [--seconds S] [--jobs J] [--first N]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.fuzz_targets import BY_NAME, TARGETS
from fuzz.fuzz_workers import fuzz


def main() -> int:
    options = _options()
    names = options.targets or [target.name for target in TARGETS]
    counts, failures = fuzz(names, options.count, options.seconds, options.jobs, options.first)
    for name, count in counts.items():
        print(f"{name:14} {count:9,}")
    print(
        f"{'all':14} {sum(counts.values()):9,}  failures {sum(failures.values()):,} in {len(failures)} places"
    )
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[[], *BY_NAME])
    parser.add_argument("--count", type=int, default=100_000, help="inputs, over all targets")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input of every target"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
