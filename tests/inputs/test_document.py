"""Documents: every value knows its line, and every problem is reported at once, in line order."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field

from argosy.document import (
    Document,
    Location,
    Schema,
    parse_json,
    parse_toml,
    read_json,
    read_toml,
    validate,
)
from argosy.errors import InputError
from argosy.units import RATE

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=25,
)
json_objects = st.dictionaries(st.text(), values, max_size=5)


def leaves(value: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Every scalar below ``value``, with where it stands."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*location, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*location, index))
    else:
        yield location, value


def toml(text: str) -> Document:
    return parse_toml(textwrap.dedent(text).lstrip("\n"), file="test.toml")


@given(json_objects, st.booleans(), st.sampled_from([0, 1, 4, "\t"]))
def test_the_line_of_every_json_scalar_contains_it(data, ascii_only, indent):
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
    lines = text.split("\n")
    document = parse_json(text, file="test.json")
    for location, value in leaves(data):
        line = document.lines[location]
        assert json.dumps(value, ensure_ascii=ascii_only) in lines[line - 1]
        if isinstance(location[-1], str):
            assert json.dumps(location[-1], ensure_ascii=ascii_only) in lines[line - 1]


@given(json_objects)
def test_every_json_value_has_a_line_that_never_goes_back(data):
    document = parse_json(json.dumps(data, indent=2), file="test.json")
    found = [document.lines[location] for location, _ in leaves(data)]
    assert found == sorted(found)


@given(json_objects)
def test_json_on_one_line_is_all_on_line_one(data):
    document = parse_json(json.dumps(data), file="test.json")
    assert set(document.lines.values()) == {1}


@given(json_objects)
def test_windows_line_ends_change_no_line(data):
    text = json.dumps(data, indent=1)
    assert parse_json(text, file="").lines == parse_json(text.replace("\n", "\r\n"), file="").lines


TOML_CASES = {
    "plain keys and comments": """
        # a comment = 1
        a = 1       # b = 2
        b = "x"
    """,
    "strings that look like syntax": """
        a = "x = 1, # ] } y"
        b = 'it''s' # no
    """.replace("it''s", "[its]"),
    "quoted and dotted keys": """
        "a.b = c" = 1
        'd # e'.f."g\\"h" = 2
        i . j = 3
        bare-key_1 = 4
    """,
    "multi-line array": """
        a = [
          1,  # one, [
          2,
          [3,
           4], ]
        b = 5
    """,
    "array of inline tables over lines": """
        a = [ { b = 1, c = { d = "}" } },
              { b = 2 } ]
        e = { f.g = 1, "h i" = [2, 3] }
    """,
    "multi-line strings": '''
        a = """
        x = 1
        "" quotes \\""" inside
        """
        b = \'\'\'
        y = 2 \\
        \'\'\'
        c = """ends with quotes"""""
        d = 3
    ''',
    "tables": """
        top = 0
        [a]
        b = 1
        [ a . "c d" ]
        e = 2
        [f.g]
        h = 3
        [f]
        i = 4
    """,
    "arrays of tables in arrays of tables": """
        [[a]]
        n = 0
        [[a.b]]
        n = 1
        [[a.b]]
        n = 2
        [a.b.c]
        n = 3
        [[a]]
        n = 4
        [[a.b]]
        n = 5
        [[a.b.d]]
        n = 6
    """,
    "dates and numbers": """
        a = 1979-05-27T07:32:00Z
        b = 1_000.5e-3
        c = [inf, -nan, 0xff, true]
    """,
    "no value at all": """
        # nothing
    """,
}

EXPECTED_LINES = {
    "plain keys and comments": {("a",): 2, ("b",): 3},
    "strings that look like syntax": {("a",): 1, ("b",): 2},
    "quoted and dotted keys": {
        ("a.b = c",): 1,
        ("d # e", "f", 'g"h'): 2,
        ("d # e",): 2,
        ("i", "j"): 3,
        ("bare-key_1",): 4,
    },
    "multi-line array": {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 1): 3,
        ("a", 2): 4,
        ("a", 2, 1): 5,
        ("b",): 6,
    },
    "array of inline tables over lines": {
        ("a", 0, "b"): 1,
        ("a", 0, "c", "d"): 1,
        ("a", 1, "b"): 2,
        ("e", "f", "g"): 3,
        ("e", "h i", 1): 3,
    },
    "multi-line strings": {("a",): 1, ("b",): 5, ("c",): 8, ("d",): 9},
    "tables": {
        ("top",): 1,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c d"): 4,
        ("a", "c d", "e"): 5,
        ("f", "g"): 6,
        ("f", "g", "h"): 7,
        ("f",): 8,
        ("f", "i"): 9,
    },
    "arrays of tables in arrays of tables": {
        ("a",): 1,
        ("a", 0): 1,
        ("a", 0, "n"): 2,
        ("a", 0, "b"): 3,
        ("a", 0, "b", 0, "n"): 4,
        ("a", 0, "b", 1, "n"): 6,
        ("a", 0, "b", 1, "c", "n"): 8,
        ("a", 1): 9,
        ("a", 1, "n"): 10,
        ("a", 1, "b", 0, "n"): 12,
        ("a", 1, "b", 0, "d", 0, "n"): 14,
    },
    "dates and numbers": {("a",): 1, ("b",): 2, ("c", 3): 3},
    "no value at all": {},
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("case", TOML_CASES)
def test_lines_of_toml(case, ending):
    text = textwrap.dedent(TOML_CASES[case]).lstrip("\n").replace("\n", ending)
    document = parse_toml(text, file="test.toml")
    for location, line in EXPECTED_LINES[case].items():
        assert (location, document.lines[location]) == (location, line)
    for location, _ in leaves(document.data):
        assert location in document.lines


def test_a_place_without_a_line_has_that_of_what_encloses_it():
    document = toml("""
        [a]
        b = 1
        c = { d = 2 }
    """)
    assert document.line(("a", "missing")) == 1
    assert document.line(("a", "c", "missing", 3)) == 3
    assert document.line(("missing",)) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = = 2\n", 2),
        ("a = 1\na = 2\n", 2),
        ("a = [1,\n2", None),
        ('x = 1\n\ny = "', None),
    ],
)
def test_broken_toml_says_where(text, line):
    with pytest.raises(InputError) as caught:
        parse_toml(text, file="broken.toml")
    (problem,) = caught.value.problems
    assert (problem.file, problem.expected) == ("broken.toml", "valid TOML")
    if line is not None:
        assert problem.line == line


@pytest.mark.parametrize(("text", "line"), [('{"a": 1,\n "b" 2}', 2), ("", 1), ("{\n", 2)])
def test_broken_json_says_where(text, line):
    with pytest.raises(InputError) as caught:
        parse_json(text, file="broken.json")
    (problem,) = caught.value.problems
    assert (problem.line, problem.expected) == (line, "valid JSON")


def test_json_that_is_no_object_is_refused():
    with pytest.raises(InputError, match="expected a JSON object"):
        parse_json("[1, 2]", file="list.json")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(InputError, match="found a folder, expected a file"):
        read_toml(tmp_path)
    with pytest.raises(InputError, match="/dev/zero: found a device, expected a file"):
        read_toml("/dev/zero")
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(InputError, match="expected UTF-8 text"):
        read_toml(tmp_path / "latin.toml")
    with pytest.raises(
        InputError, match=r'^Cannot read .* because the system reports "File name too long"'
    ):
        read_toml(tmp_path / (300 * "a" + ".toml"))
    (tmp_path / "fine.json").write_text('{"a": 1}', encoding="utf-8")
    assert read_json(str(tmp_path / "fine.json")).data == {"a": 1}


class Nic(Schema):
    bandwidth: Annotated[float, BeforeValidator(RATE.parse)]
    ports: int = Field(default=1, ge=1)


class Node(Schema):
    name: str
    nic: Nic | None = None
    medium: Literal["nvlink", "pcie"] = "pcie"


class Cluster(Schema):
    name: str
    nodes: list[Node]
    size: float = 1.0


def test_a_good_document_is_its_schema():
    document = toml("""
        name = "small"
        [[nodes]]
        name = "a"
        nic = { bandwidth = "8 Gbit/s" }
    """)
    assert validate(document, Cluster) == Cluster(
        name="small", nodes=[Node(name="a", nic=Nic(bandwidth="8 Gbit/s"))]
    )


def test_all_problems_come_at_once_in_line_order():
    document = toml("""
        nam = "small"
        size = "big"
        [[nodes]]
        name = "a"
        nic = { bandwidth = "25 Gb/s", ports = 0 }
        [[nodes]]
        medium = "nvlnk"
        nic = 3
        [[nodes]]
        name = 7
        nic = { bandwith = "8 Gbit/s" }
    """)
    with pytest.raises(InputError) as caught:
        validate(document, Cluster)
    assert str(caught.value).splitlines() == [
        "test.toml: name: expected a value: this field is required",
        'test.toml:1: nam: found an unknown field, expected one of the fields name, nodes, size; did you mean "name"?',
        'test.toml:2: size: found "big", expected a valid number',
        'test.toml:5: nodes[0].nic.bandwidth: found "25 Gb/s", expected a rate such as "25 Gbit/s"; '
        '"Gb/s" could be bits or bytes: write "25 Gbit/s" or "25 GB/s"',
        "test.toml:5: nodes[0].nic.ports: found 0, expected greater than or equal to 1",
        "test.toml:6: nodes[1].name: expected a value: this field is required",
        'test.toml:7: nodes[1].medium: found "nvlnk", expected one of "nvlink", "pcie"; did you mean "nvlink"?',
        "test.toml:8: nodes[1].nic: found 3, expected a table",
        "test.toml:10: nodes[2].name: found 7, expected a valid string",
        "test.toml:11: nodes[2].nic.bandwidth: expected a value: this field is required",
        "test.toml:11: nodes[2].nic.bandwith: found an unknown field, "
        'expected one of the fields bandwidth, ports; did you mean "bandwidth"?',
    ]


def test_nothing_where_something_is_needed():
    with pytest.raises(InputError) as caught:
        validate(parse_json('{"name": null,\n "nodes": {}}', file="test.json"), Cluster)
    assert [str(problem) for problem in caught.value.problems] == [
        "test.json:1: name: found nothing, expected a valid string",
        "test.json:2: nodes: found a table, expected a valid list",
    ]


def test_numbers_are_not_taken_for_text_nor_text_for_numbers():
    for name, size in ((3, 1.0), ("a", "1.0"), (True, 1.0), ("a", True)):
        with pytest.raises(InputError):
            validate(Document("test", {"name": name, "nodes": [], "size": size}, {}), Cluster)
    assert (
        validate(Document("test", {"name": "a", "nodes": [], "size": 2}, {}), Cluster).size == 2.0
    )
