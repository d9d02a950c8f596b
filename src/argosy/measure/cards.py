"""Read facts about a card from NVIDIA's management library, if its Python module (nvidia-ml-py) is
installed."""

from __future__ import annotations

from typing import Any

import torch


def card_facts(index: int) -> str:
    """Return driver, bus, links and power limit in a line; empty without the module, or if it
    fails."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return ""
    library: Any = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:
        return ""
    try:
        handle = library.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        )
        generation = library.nvmlDeviceGetMaxPcieLinkGeneration
        lanes = library.nvmlDeviceGetMaxPcieLinkWidth
        bus = f"PCIe {generation(handle)}.0 x{lanes(handle)}"
        watts = library.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        links = _active_links(library, handle)
        facts = [
            f"driver {_text(library.nvmlSystemGetDriverVersion())}",
            bus,
            f"{links} NVLinks",
            f"{watts:.0f} W",
        ]
        return ", ".join(fact for fact in facts if not fact.startswith("0 "))
    except library.NVMLError:
        return ""
    finally:
        library.nvmlShutdown()


def _active_links(library: Any, handle: Any) -> int:
    count = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        try:
            count += library.nvmlDeviceGetNvLinkState(handle, link) == 1
        except library.NVMLError:
            break
    return count


def _text(value: str | bytes) -> str:
    """Return text that older versions of the library return as bytes."""
    return value.decode() if isinstance(value, bytes) else value
