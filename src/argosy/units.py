"""Convert text with a unit to SI floats, and back: ``"25 Gbit/s"`` is 3.125e9 bytes/s.

Inside Argosy a size is in bytes, a rate in bytes/s, a time in seconds and a compute rate in FLOP/s.
Units exist only while parsing and printing. Four kinds of quantity, one ``Quantity`` each:

    SIZE      B kB MB GB TB PB (powers of 1000), KiB MiB GiB TiB PiB (powers of 1024),
              bit kbit Mbit Gbit Tbit, Kibit Mibit Gibit Tibit
    RATE      any size per second: GB/s, GiB/s, Gbit/s
    TIME      ns us ms s min h d
    COMPUTE   FLOP/s with k M G T P E

Ambiguous text is rejected with a suggestion instead of guessed: a lone ``b`` ("25 Gb/s") may mean
bits or bytes, ``Gbps`` likewise, and a bare number has no unit at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property

from argosy.errors import Mismatch

_NUMBER = re.compile(r"([+-]?(?:[0-9][0-9_]*+\.?+[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)\s*+(.*)")
"""A number and the text after it. Possessive quantifiers rule out backtracking, because a file may
hold a very long text."""

# Decimal prefixes and their factors.
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
# Binary prefixes and their factors.
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

# All prefixes and their factors.
_PREFIXES = {prefix: Decimal(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
# Length of the longest prefix, in characters.
_LONGEST_PREFIX = max(map(len, _PREFIXES))
# Units of bytes and their factors, in bytes.
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items() if prefix != "E"}
# Units of bits and their factors, in bytes.
_BITS = {
    f"{prefix}bit": factor / 8
    for prefix, factor in _PREFIXES.items()
    if prefix not in ("P", "E", "Pi")
}
_SIZES = _BYTES | _BITS
# Units of time and their factors, in seconds.
_TIMES = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}

_WRONG_SPELLINGS = {
    "B": ("B",),
    "b": ("bit", "B"),
    "bit": ("bit",),
    "bits": ("bit",),
    "byte": ("B",),
    "bytes": ("B",),
    "flop": ("FLOP",),
    "flops": ("FLOP",),
    "s": ("s",),
    "sec": ("s",),
    "secs": ("s",),
    "second": ("s",),
    "seconds": ("s",),
    "m": ("min", "ms"),
    "mins": ("min",),
    "minute": ("min",),
    "minutes": ("min",),
    "hr": ("h",),
    "hrs": ("h",),
    "hour": ("h",),
    "hours": ("h",),
    "day": ("d",),
    "days": ("d",),
}
"""Spellings that people use after a prefix, and the units that they may mean; looked up as written,
then in lower case."""

# Bytes of a MiB and of a GiB, and seconds of an hour.
MIB, GIB, HOUR = 2**20, 2**30, 3600.0
# Significant digits after which any two different floats differ.
_MOST_DIGITS = 17
# Products below this value are computed in decimals, because one with a power of two may be rounded
# twice.
_SMALLEST_NORMAL = 1e-300
# Endings that people use for "per second".
_PER_SECOND = ("", "/s", "ps", "/sec", "/second", " per second")


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity that defines how its text is read and written."""

    name: str
    example: str
    units: dict[str, Decimal]
    printed: tuple[str, ...]
    """Units used for printing, smallest first."""

    @property
    def expected(self) -> str:
        """Return the expected value for error messages."""
        article = "an" if self.name[0] in "aeiou" else "a"
        return f'{article} {self.name} such as "{self.example}"'

    def parse(self, text: object) -> float:
        """Return the value of a text in SI units; raise a ``Mismatch`` if it is no such quantity.

        >>> RATE.parse("25 Gbit/s"), SIZE.parse("80 GiB"), TIME.parse("30 us")
        (3125000000.0, 85899345920.0, 3e-05)
        >>> COMPUTE.parse("312 TFLOP/s")
        312000000000000.0
        """
        match = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise Mismatch(text, self.expected, self._suggest_unit(text))
        digits, unit = match[1].replace("_", ""), match[2].replace("µ", "u").replace("μ", "u")
        if unit == "":
            raise Mismatch(text, self.expected, self._suggest_unit(match[1]))
        factor = self.units.get(unit)
        if factor is None:
            raise Mismatch(text, self.expected, self._suggest_spelling(match[1], unit))
        if digits.startswith("-"):
            raise Mismatch(text, f"{self.expected}, not negative")
        value = _product(digits, factor, self._powers[unit])
        if not math.isfinite(value):
            raise Mismatch(text, f"{self.expected}, within the range of a float")
        return value

    def format(self, value: float, *, digits: int | None = 4) -> str:
        """Return text for people with ``digits`` significant digits, or text that parses back
        exactly if ``digits`` is None.

        >>> RATE.format(3.125e9), TIME.format(0.0215), SIZE.format(2**33), COMPUTE.format(9.89e14)
        ('3.125 GB/s', '21.5 ms', '8 GiB', '989 TFLOP/s')
        >>> TIME.format(1 / 3, digits=None)
        '0.3333333333333333 s'
        """
        value = float(value) + 0.0  # -0.0 is 0
        if digits is None:
            return self.exact([value])[0]
        if not math.isfinite(value):
            return "never" if self.name == "time" and value > 0 else str(value)
        unit = self.printed[0]
        for candidate in self.printed:
            if abs(value) >= float(self.units[candidate]) * (1 - 0.5 * 10.0**-digits):
                unit = candidate
        return f"{_plain(value / float(self.units[unit]), digits)} {unit}"

    def short(self, value: float) -> str:
        """Return text for people with three significant digits."""
        return self.format(value, digits=3)

    def exact(self, values: Iterable[float]) -> list[str]:
        """Return texts that parse back to exactly these values.

        >>> RATE.exact([0.1, 3e9])
        ['0.1 B/s', '3000000000.0 B/s']
        """
        base = self._base
        return [f"{float(value) + 0.0!r} {base}" for value in values]

    def apart(self, first: float, second: float, *, digits: int = 4) -> tuple[str, str]:
        """Return both values as text for people, with enough digits to tell them apart if they
        differ.

        >>> TIME.apart(0.12, 0.119), TIME.apart(0.12004, 0.12), TIME.apart(2.0, 2.0)
        (('120 ms', '119 ms'), ('120.04 ms', '120 ms'), ('2 s', '2 s'))
        """
        while True:
            texts = self.format(first, digits=digits), self.format(second, digits=digits)
            if texts[0] != texts[1] or first == second or digits >= _MOST_DIGITS:
                return texts
            digits += 1

    @cached_property
    def _base(self) -> str:
        """Return the SI unit."""
        return next(unit for unit, factor in self.units.items() if factor == 1)

    @cached_property
    def _powers(self) -> dict[str, tuple[str, float] | None]:
        """Return ``_as_powers`` of every unit."""
        return {unit: _as_powers(factor) for unit, factor in self.units.items()}

    def _suggest_unit(self, number: object) -> str | None:
        """Return a suggestion for a bare number, which has no unit at all."""
        if isinstance(number, bool) or not _is_number(number):
            return None
        unit = self.example.split(" ", 1)[1]
        return f'a number needs its unit: did you mean "{number} {unit}"?'

    def _suggest_spelling(self, number: str, unit: str) -> str | None:
        """Return a suggestion for a unit that this quantity does not have."""
        meant = [known for known in dict.fromkeys(_respelt(unit)) if known in self.units]
        if not meant:
            return None
        choice = " or ".join(f'"{number} {known}"' for known in meant)
        if len(meant) == 2 and self.name in ("size", "rate"):
            return f'"{unit}" could be bits or bytes: write {choice}'
        return f"did you mean {choice}?"


def finite(value: object) -> float | None:
    """Return a number of a document as a float; None for anything else, and for an integer beyond
    the range of floats.

    >>> finite(3), finite(True), finite(10**400), finite(math.inf)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _respelt(unit: str) -> Iterator[str]:
    """Yield everything that a misspelt unit may stand for; not all of it need be a unit.

    >>> sorted(RATE.units.keys() & set(_respelt("Gbps")))
    ['GB/s', 'Gbit/s']
    """
    for ending in _PER_SECOND:
        stem = unit.removesuffix(ending)
        for cut in range(min(len(stem), _LONGEST_PREFIX + 1)):
            prefix, word = stem[:cut], stem[cut:]
            for symbol in _WRONG_SPELLINGS.get(word) or _WRONG_SPELLINGS.get(word.lower(), ()):
                for known in (
                    prefix + symbol,
                    prefix.lower() + symbol,
                    prefix.capitalize() + symbol,
                ):
                    yield known
                    yield f"{known}/s"


def _as_powers(factor: Decimal) -> tuple[str, float] | None:
    """Return a factor 10**e * 2**k as the text of its power of ten and the value of its power of
    two; None for any other factor.

    >>> _as_powers(Decimal(10**9) / 8), _as_powers(Decimal(1024)), _as_powers(Decimal(3600))
    (('e9', 0.125), ('e0', 1024.0), None)
    """
    for k in range(-3, 51):
        power_of_two = Decimal(2) ** k
        exponent = (factor / power_of_two).normalize()
        if exponent.as_tuple().digits == (1,):
            return f"e{exponent.adjusted()}", float(power_of_two)
    return None


def _product(digits: str, factor: Decimal, powers: tuple[str, float] | None) -> float:
    """Return ``digits`` times ``factor``, rounded once; infinity if the product is too large or too
    small for a float and is not 0.

    A power of ten is parsed together with the digits, and multiplying by a power of two is exact,
    so a float product gives the same result as decimal arithmetic, faster.
    """
    if powers is not None and digits.isascii() and "e" not in digits and "E" not in digits:
        value = float(digits + powers[0]) * powers[1]
        if value > _SMALLEST_NORMAL:
            return value
    with localcontext(Context(traps=[])):
        number = Decimal(digits)
        value = float(number * factor)
    return math.inf if value == 0 and number != 0 else value


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return False


def _plain(value: float, digits: int) -> str:
    """Return ``value`` with at most ``digits`` significant digits, without an exponent if people
    would write none."""
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-4 <= abs(value) < 1e15:
        text = str(round(value))
    return text


# Sizes in bytes, printed with binary prefixes.
SIZE = Quantity("size", "80 GiB", _SIZES, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
# Rates in bytes/s, printed with decimal prefixes.
RATE = Quantity(
    "rate",
    "25 Gbit/s",
    {f"{unit}/s": factor for unit, factor in _SIZES.items()},
    ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"),
)
# Times in seconds.
TIME = Quantity("time", "30 us", _TIMES, ("ns", "us", "ms", "s"))
# Compute rates in FLOP/s.
COMPUTE = Quantity(
    "compute rate",
    "312 TFLOP/s",
    {f"{prefix}FLOP/s": Decimal(factor) for prefix, factor in _DECIMAL.items()},
    tuple(f"{prefix}FLOP/s" for prefix in _DECIMAL),
)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun in the singular or plural.

    >>> counted(1, "stage"), counted(2, "stage"), counted(0, "micro-batch", "micro-batches")
    ('1 stage', '2 stages', '0 micro-batches')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"
