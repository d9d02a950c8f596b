"""Read one node from NCCL's topology file or from ``nvidia-smi topo -m``.

    (1)  PCIe     GT/s x lanes / 8 x 128/130 from 8 GT/s on, x 8/10 below
    (2)  NVLink   links of a device x 25 GB/s each way (20 on Pascal, 14 at compute capability 8.6,
                  50 from 10.0 on)
    (3)  NIC      the fastest of the node's network devices, and how many are equally fast

NCCL writes speeds of network devices in Mbit/s, and the compute capability of each device, which
suggests its kind. Files that people write for it (``NCCL_TOPO_FILE``) may have bare slots instead,
in which a card has class 0x03: then NVLink is unknown, and a kind must be given. ``nvidia-smi``
writes neither kinds nor NIC speeds; ``nvidia-smi -L`` in the same file adds the kinds.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

from argosy.cluster.imports.found import FoundMedium, FoundNode, catalogue_kind
from argosy.errors import invalid

# Bytes/s of one NVLink each way, by compute capability (2).
_NVLINK = {60: 20e9, 70: 25e9, 75: 25e9, 80: 25e9, 86: 14e9, 90: 25e9, 100: 50e9}
# Most common device kind of each compute capability.
_USUAL_KIND = {
    60: "P100",
    70: "V100-16GB",
    75: "T4",
    80: "A100-40GB",
    86: "RTX-A6000",
    89: "L40S",
    90: "H100-80GB",
}
# Expected value of an attribute that counts.
_WHOLE = "a whole number, at least 0"
# Bytes/s if the file does not state it: PCIe 4.0 with 16 lanes, less its overhead.
_PCIE_GUESS = 25e9


def read_nccl(
    text: str, file: str, *, host: str, kind: str | None, nic: float | None = None
) -> FoundNode:
    """Return a node from the XML that NCCL writes to ``NCCL_TOPO_DUMP_FILE`` or reads from
    ``NCCL_TOPO_FILE``; ``nic`` is used if it has no speed of a network device."""
    root = _parsed(text, file)
    cards = list(root.iter("gpu")) or [
        slot for slot in root.iter("pci") if slot.get("class", "").startswith("0x03")
    ]
    if root.tag != "system" or not cards:
        raise invalid(
            file=file, found=f"<{root.tag}> with {len(cards)} gpu", expected="<system> with gpus"
        )
    capabilities = [_whole(card, "sm", file) for card in cards]
    kinds = [kind or _USUAL_KIND.get(capability) for capability in capabilities]
    if None in kinds:
        unknown = capabilities[kinds.index(None)]
        expected = "a compute capability that is known, or --kind"
        raise invalid("gpu.sm", str(unknown), expected, file=file)
    links = [sum(_whole(link, "count", file, 1) for link in card.iter("nvlink")) for card in cards]
    media = []
    if min(links):
        bandwidth = min(links) * _NVLINK.get(capabilities[0], 25e9)
        note = f"{min(links)} links"
        media.append(FoundMedium(name="nvlink", bandwidth=bandwidth, latency=3e-6, note=note))
    media.append(FoundMedium(name="pcie", bandwidth=_pcie(root, file), latency=5e-6))
    remark = (
        "" if root.find(".//gpu") is not None else "the file does not state whether there is NVLink"
    )
    if not kind:
        distinct = ", ".join(map(str, sorted(set(capabilities))))
        remark = f"kinds guessed from compute capability {distinct}"
    return FoundNode(
        hosts=(host,),
        devices=tuple(Counter(name for name in kinds if name).items()),
        intra=tuple(media) if len(cards) > 1 else (),
        nic=_nics([_whole(net, "speed", file) * 1e6 / 8 for net in root.iter("net")])
        or ((nic, 1) if nic else None),
        note=remark,
    )


def _parsed(text: str, file: str) -> ElementTree.Element:
    """Return the root of an XML text that defines no entities, which could fill the memory."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise invalid(file=file, found="a document type", expected="plain XML, as NCCL writes it")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise invalid(file=file, found=str(error), expected="XML, as NCCL writes it") from None


def _whole(element: ElementTree.Element, name: str, file: str, missing: int = 0) -> int:
    """Return an attribute that is a count or a number of Mbit/s."""
    text = element.get(name, "")
    if text and re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise invalid(f"{element.tag}.{name}", f'"{text[:40]}"', _WHOLE, file=file)
    return int(text or missing)


def _pcie(root: ElementTree.Element, file: str) -> float:
    """Return the bytes/s (1) of the narrowest slot that a card sits in."""
    rates = []
    for slot in root.iter("pci"):
        if slot.find("gpu") is None and not slot.get("class", "").startswith("0x03"):
            continue
        speed = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*GT/s", slot.get("link_speed", ""))
        width = _whole(slot, "link_width", file)
        transfers = float(speed[1]) if speed else 0.0
        if transfers and width:
            rates.append(transfers * 1e9 * width / 8 * (128 / 130 if transfers >= 8 else 0.8))
    return min(rates, default=_PCIE_GUESS)


def _nics(rates: list[float]) -> tuple[float, int] | None:
    """Return the bytes/s and the count of NICs (3); None if there is none."""
    fastest = max(rates, default=0.0)
    return (fastest, sum(rate == fastest for rate in rates)) if fastest else None


def read_nvidia_smi(
    text: str, file: str, *, host: str, kind: str | None, nic: float | None
) -> FoundNode:
    """Return a node from ``nvidia-smi topo -m``; its kinds are found if ``nvidia-smi -L`` is before
    or after it."""
    table = [
        line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in text.splitlines()
    ]
    rows = [row for row in table if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    names = [row[0] for row in rows]
    cells = {row[0]: row[1 : len(names) + 1] for row in rows}
    if not names or any(len(row) < len(names) for row in cells.values()):
        expected = "the table that nvidia-smi topo -m prints, a row for every GPU"
        raise invalid(file=file, found=f"{len(names)} rows", expected=expected)
    listed = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", text, re.M)
    kinds = [kind] * len(names) if kind else [catalogue_kind(name) for name in listed]
    if len(kinds) != len(names) or None in kinds:
        unknown = [name for name in listed if catalogue_kind(name) is None]
        actual = f'"{unknown[0]}"' if unknown else f"{len(listed)} names of cards"
        expected = "nvidia-smi -L of the same node with kinds of the catalogue, or --kind"
        raise invalid(file=file, found=actual, expected=expected)
    pairs = [cell for row in cells.values() for cell in row if cell not in ("X", "N/A")]
    counts = [int(cell[2:]) for cell in pairs if re.fullmatch(r"NV[0-9]{1,9}", cell)]
    media = []
    if counts and len(counts) == len(pairs):
        media.append(
            FoundMedium(
                name="nvlink",
                bandwidth=min(counts) * 25e9,
                latency=3e-6,
                note=f"{min(counts)} links",
            )
        )
    media.append(FoundMedium(name="pcie", bandwidth=_PCIE_GUESS, latency=5e-6, note="a guess"))
    partial = (
        f"NVLink joins only {len(counts) // 2} of {len(pairs) // 2} pairs and is left out"
        if counts and len(counts) < len(pairs)
        else ""
    )
    return FoundNode(
        hosts=(host,),
        devices=tuple(Counter(name for name in kinds if name).items()),
        intra=tuple(media) if len(names) > 1 else (),
        nic=(nic, 1) if nic else None,
        note=partial,
    )
