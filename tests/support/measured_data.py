"""Where the published measurements lie, for tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
VTRAIN = DATA / "vtrain" / "ground_truth_single.csv"
SAILOR = DATA / "sailor"
GH200 = SAILOR / "measured" / "gh200-opt350"
MIXED = SAILOR / "measured" / "mixed-rtx"

needs_vtrain = pytest.mark.skipif(
    not VTRAIN.exists(), reason="vTrain's measurements are not in ../shared/data"
)
needs_sailor = pytest.mark.skipif(
    not SAILOR.exists(), reason="Sailor's measurements are not in ../shared/data"
)
