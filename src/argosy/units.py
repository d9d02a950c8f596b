"""Text with a unit to SI floats, and back: ``"25 Gbit/s"`` is 3.125e9 bytes/s.

Inside Argosy a size is in bytes, a rate in bytes/s, a time in seconds and a compute rate in FLOP/s. Units exist only
while parsing and printing. Four kinds of quantity, one ``Quantity`` each:

    SIZE      B kB MB GB TB PB (powers of 1000), KiB MiB GiB TiB PiB (powers of 1024), bit kbit Mbit Gbit Tbit
    RATE      any size per second: GB/s, GiB/s, Gbit/s
    TIME      ns us ms s min h d
    COMPUTE   FLOP/s with k M G T P E

What is ambiguous is refused with a suggestion instead of guessed: a lone ``b`` ("25 Gb/s") may mean bits or bytes,
``Gbps`` likewise, a bare number has no unit at all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from argosy.errors import Mismatch

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

_SIZES = (
    {f"{prefix}B": Decimal(factor) for prefix, factor in (_DECIMAL | _BINARY).items() if prefix != "E"}
    | {f"{prefix}bit": Decimal(factor) / 8 for prefix, factor in (_DECIMAL | _BINARY).items() if prefix not in "EP"}
    | {"bit": Decimal(1) / 8}
)
_TIMES = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}


@dataclass(frozen=True)
class Quantity:
    """One kind of quantity: how its text is read and written."""

    name: str
    example: str
    units: dict[str, Decimal]
    printed: tuple[str, ...]
    """Units used for printing, smallest first."""

    @property
    def expected(self) -> str:
        article = "an" if self.name[0] in "aeiou" else "a"
        return f'{article} {self.name} such as "{self.example}"'

    def parse(self, text: object) -> float:
        """The value in SI.

        >>> RATE.parse("25 Gbit/s"), SIZE.parse("80 GiB"), TIME.parse("30 us"), COMPUTE.parse("312 TFLOP/s")
        (3125000000.0, 85899345920.0, 3e-05, 312000000000000.0)
        """
        if not isinstance(text, str):
            raise Mismatch(text, self.expected, self._suggest_for_bare(text))
        match = _NUMBER.match(text)
        if match is None:
            raise Mismatch(text, self.expected)
        number, unit = Decimal(match[1].replace("_", "")), match[2].replace("µ", "u").replace("μ", "u")
        if unit == "":
            raise Mismatch(text, self.expected, self._suggest_for_bare(match[1]))
        factor = self.units.get(unit)
        if factor is None:
            raise Mismatch(text, self.expected, self._suggest(match[1], unit))
        value = float(number * factor)
        if value < 0:
            raise Mismatch(text, f"{self.expected}, not negative")
        if not math.isfinite(value):
            raise Mismatch(text, f"{self.expected}, finite")
        return value

    def format(self, value: float, *, digits: int | None = 4) -> str:
        """Text for people with ``digits`` significant digits; ``digits=None`` writes a text that parses back exactly.

        >>> RATE.format(3.125e9), TIME.format(0.0215), SIZE.format(2**33), COMPUTE.format(9.89e14)
        ('3.125 GB/s', '21.5 ms', '8 GiB', '989 TFLOP/s')
        >>> TIME.format(1 / 3, digits=None)
        '0.3333333333333333 s'
        """
        if digits is None:
            base = next(unit for unit, factor in self.units.items() if factor == 1)
            return f"{value!r} {base}"
        if not math.isfinite(value):
            return "never" if self.name == "time" else str(value)
        unit = self.printed[0]
        for candidate in self.printed:
            if abs(value) >= float(self.units[candidate]) * (1 - 0.5 * 10.0**-digits):
                unit = candidate
        return f"{_plain(value / float(self.units[unit]), digits)} {unit}"

    def _suggest_for_bare(self, number: object) -> str | None:
        if isinstance(number, bool):
            return None
        try:
            float(str(number))
        except ValueError:
            return None
        unit = self.example.split(" ", 1)[1]
        return f'a number needs its unit: did you mean "{number} {unit}"?'

    def _suggest(self, number: str, unit: str) -> str | None:
        meant = [known for known in self.units if known.lower() == unit.lower()]
        per_second = "/s" if self.name in ("rate", "compute rate") else ""
        bare = re.sub(r"(ps|/s|/sec|/second|s)$", "", unit)
        prefix_b = re.fullmatch(r"([kKmMgGtTpP]i?)?([bB])", bare)
        if self.name in ("size", "rate") and prefix_b:
            prefix = (prefix_b[1] or "").replace("K", "k") if "i" not in (prefix_b[1] or "") else prefix_b[1]
            prefix = prefix if prefix in ("k", "Ki") else prefix[:1].upper() + prefix[1:]
            meant = [f"{prefix}bit{per_second}", f"{prefix}B{per_second}"]
            if prefix_b[2] == "B" and self.name == "rate":
                return f'write a rate per second: "{number} {meant[1]}"'
            if prefix_b[2] == "B":
                return f'did you mean "{number} {meant[1]}"?'
            return f'"{unit}" could be bits or bytes: write "{number} {meant[0]}" or "{number} {meant[1]}"'
        if self.name == "compute rate" and re.fullmatch(r"[kKmMgGtTpPeE]?flops?", bare + "s", re.IGNORECASE):
            prefix = "" if bare.lower().startswith("flop") else bare[0].upper().replace("K", "k")
            meant = [f"{prefix}FLOP/s"]
        if meant:
            return "did you mean " + " or ".join(f'"{number} {known}"' for known in meant) + "?"
        return None


def _plain(value: float, digits: int) -> str:
    """``value`` with at most ``digits`` significant digits, no exponent where a person would write none."""
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-4 <= abs(value) < 1e15:
        text = str(round(value))
    return text


SIZE = Quantity("size", "80 GiB", _SIZES, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
RATE = Quantity(
    "rate",
    "25 Gbit/s",
    {f"{unit}/s": factor for unit, factor in _SIZES.items()},
    ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"),
)
TIME = Quantity("time", "30 us", _TIMES, ("ns", "us", "ms", "s"))
COMPUTE = Quantity(
    "compute rate",
    "312 TFLOP/s",
    {f"{prefix}FLOP/s": Decimal(factor) for prefix, factor in _DECIMAL.items()},
    tuple(f"{prefix}FLOP/s" for prefix in _DECIMAL),
)
