"""Units: text and SI floats are inverse, bits are never bytes, and what is ambiguous is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from argosy.errors import Mismatch
from argosy.units import COMPUTE, RATE, SIZE, TIME, Quantity

QUANTITIES = (SIZE, RATE, TIME, COMPUTE)
EVERY_UNIT = [(quantity, unit) for quantity in QUANTITIES for unit in quantity.units]

quantities = st.sampled_from(QUANTITIES)
values = st.floats(min_value=0, allow_infinity=False)
everyday = st.floats(min_value=1e-9, max_value=1e18)


def refusal(quantity: Quantity, text: object) -> Mismatch:
    with pytest.raises(Mismatch) as caught:
        quantity.parse(text)
    return caught.value


@given(quantities, values)
def test_exact_text_parses_back_exactly(quantity, value):
    assert quantity.parse(quantity.format(value, digits=None)) == value


@given(quantities, everyday, st.integers(2, 12))
def test_rounded_text_parses_back_to_its_digits(quantity, value, digits):
    parsed = quantity.parse(quantity.format(value, digits=digits))
    assert parsed == pytest.approx(value, rel=10.0 ** -(digits - 1), abs=0)


@given(quantities, everyday, everyday, st.integers(2, 6))
def test_a_larger_value_never_prints_as_a_smaller_one(quantity, one, other, digits):
    low, high = sorted((one, other))
    assert quantity.parse(quantity.format(low, digits=digits)) <= quantity.parse(
        quantity.format(high, digits=digits)
    )


@given(st.sampled_from(EVERY_UNIT), values, values)
def test_a_larger_number_of_the_same_unit_is_never_smaller(known, one, other):
    quantity, unit = known
    low, high = sorted((one, other))
    factor = float(quantity.units[unit])
    assume(
        high * factor < math.inf and all(value == 0 or value * factor > 0 for value in (low, high))
    )
    assert quantity.parse(f"{low!r} {unit}") <= quantity.parse(f"{high!r} {unit}")


@given(quantities, values, st.sampled_from([None, 3, 4]))
def test_printed_text_names_a_unit_that_is_not_ambiguous(quantity, value, digits):
    unit = quantity.format(value, digits=digits).split(" ", 1)[1]
    assert unit in quantity.units
    assert not unit.removesuffix("/s").endswith("b")


@pytest.mark.parametrize(("quantity", "unit"), EVERY_UNIT)
def test_every_unit_parses_to_its_factor(quantity, unit):
    assert quantity.parse(f"1 {unit}") == float(quantity.units[unit])
    assert quantity.parse(f" 1{unit} ") == float(quantity.units[unit])


@pytest.mark.parametrize("prefix", ["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"])
def test_eight_bits_are_a_byte(prefix):
    assert RATE.parse(f"1 {prefix}bit/s") * 8 == RATE.parse(f"1 {prefix}B/s")
    assert SIZE.parse(f"8 {prefix}bit") == SIZE.parse(f"1 {prefix}B")


def test_known_values():
    assert RATE.parse("25 Gbit/s") == 3.125e9
    assert SIZE.parse("80 GiB") == 80 * 2**30
    assert SIZE.parse("1_000 kB") == 1e6
    assert TIME.parse("30 µs") == TIME.parse("30 μs") == TIME.parse("30 us") == 30e-6
    assert TIME.parse("1.5e3 ms") == 1.5
    assert COMPUTE.parse("312 TFLOP/s") == 312e12


def test_text_for_people():
    assert TIME.format(math.inf) == "never"
    assert TIME.format(0) == TIME.format(-0.0) == "0 ns"
    assert TIME.format(0.999996) == "1 s"
    assert TIME.format(12345.6) == "12346 s"
    assert SIZE.format(1023.99 * 2**20) == "1 GiB"
    assert RATE.format(-3.125e9) == "-3.125 GB/s"


@pytest.mark.parametrize(
    ("quantity", "text", "meant"),
    [
        (COMPUTE, "312 TFLOPS", ["312 TFLOP/s"]),
        (COMPUTE, "312 TFLOPs/s", ["312 TFLOP/s"]),
        (COMPUTE, "3 gflops", ["3 GFLOP/s"]),
        (COMPUTE, "3 TFLOP", ["3 TFLOP/s"]),
        (TIME, "3 sec", ["3 s"]),
        (TIME, "10 usec", ["10 us"]),
        (TIME, "10 msec", ["10 ms"]),
        (TIME, "5 minutes", ["5 min"]),
        (TIME, "2 hrs", ["2 h"]),
        (TIME, "5 m", ["5 min", "5 ms"]),
        (TIME, "5 MS", ["5 ms"]),
        (SIZE, "80 KB", ["80 kB"]),
        (SIZE, "80 Gb", ["80 Gbit", "80 GB"]),
        (SIZE, "80 gbytes", ["80 GB"]),
        (SIZE, "80 GB/s", ["80 GB"]),
        (RATE, "25 Gb/s", ["25 Gbit/s", "25 GB/s"]),
        (RATE, "25 Gbps", ["25 Gbit/s", "25 GB/s"]),
        (RATE, "25 mb/s", ["25 Mbit/s", "25 MB/s"]),
        (RATE, "25 GBps", ["25 GB/s"]),
        (RATE, "25 GB", ["25 GB/s"]),
        (RATE, "25 MiB/sec", ["25 MiB/s"]),
        (RATE, "25 gbit", ["25 Gbit/s"]),
        (RATE, 25, ["25 Gbit/s"]),
        (TIME, "0.5", ["0.5 us"]),
    ],
)
def test_a_wrong_spelling_is_refused_with_what_was_meant(quantity, text, meant):
    suggestion = refusal(quantity, text).suggestion
    assert suggestion is not None
    quoted = suggestion.split('"')[1::2]
    assert [part for part in quoted if " " in part] == meant
    for text_meant in meant:
        quantity.parse(text_meant)


def test_a_lone_b_says_why_it_is_refused():
    assert "bits or bytes" in str(refusal(RATE, "25 Gb/s"))


@pytest.mark.parametrize(
    "number",
    ["inf", "nan", "-inf", "-1", "-0", "-0.0", "1e400", "1e-400", "1e99999999999999999999", "٣"],
)
@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_what_is_not_a_finite_positive_number_is_refused(quantity, number):
    unit = next(unit for unit, factor in quantity.units.items() if factor == 1)
    assert refusal(quantity, f"{number} {unit}").expected.startswith(quantity.expected)


@pytest.mark.parametrize(
    "found", [None, True, [], {}, "", "fast", "Gbit/s", "25 furlongs", "1 2 GB/s"]
)
def test_what_is_no_quantity_is_refused_without_a_guess(found):
    assert refusal(RATE, found).suggestion is None


@given(st.text(max_size=12))
def test_any_text_either_parses_to_a_finite_value_or_is_refused(text):
    for quantity in QUANTITIES:
        try:
            assert 0 <= quantity.parse(text) < math.inf
        except Mismatch as mismatch:
            assert mismatch.expected.startswith(quantity.expected)
