"""End a process when the process that started it ends. Needs no torch."""

from __future__ import annotations

import ctypes
import signal
import sys

# The number of this operation of ``prctl`` in Linux.
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel end this process when its parent ends for any reason; on systems other than
    Linux do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
