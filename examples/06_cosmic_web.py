"""The cosmic web in about a minute: 64^3 particles in 64 Mpc/h, from z = 30 to today, as a picture.

    python examples/06_cosmic_web.py [FOLDER]   (out/cosmic-web unless you name one)

Makes initial conditions, evolves them with ``argosy nbody run``, counts halos and draws a slice.
Needs ``argosy[nbody]`` and two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

from argosy.cli import main

STEPS = (
    ("ic", "--box", "64", "--per-side", "64", "-z", "30", "--seed", "7", "-o", "{folder}/ic.hdf5"),
    ("run", "{folder}/ic.hdf5", "-o", "{folder}/run", "--steps", "40", "--softening", "0.05"),
    ("halos", "{folder}/run/snapshot_000.hdf5", "--show", "5"),
    (
        "picture",
        "{folder}/run/snapshot_000.hdf5",
        "-o",
        "{folder}/web.png",
        "--depth",
        "0.2",
        "--pixels",
        "1000",
    ),
)


def draw(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        try:
            main(["nbody", *(part.format(folder=folder) for part in step)])
        except SystemExit as end:
            if end.code:
                return int(end.code)
    return 0


if __name__ == "__main__":
    sys.exit(draw(Path(sys.argv[1] if len(sys.argv) > 1 else "out/cosmic-web")))
