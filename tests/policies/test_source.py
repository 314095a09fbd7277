from __future__ import annotations

import time

import pytest

from app.policies.diagnostics import Findings
from app.policies.source import MAX_BYTES, Broken, Items, Scalar, Source, Table, compose


def tree(data: bytes | str, size: int | None = None):
    source = Source("policies/x.yaml", data if isinstance(data, bytes) else data.encode(), size)
    found = Findings(lambda _: source.lines())
    return compose(source, found), found


def codes(data: bytes | str) -> list[str]:
    return [one.rule.code for one in tree(data)[1]]


def test_scalars_stay_text_with_their_places():
    root, found = tree("a: no\nb: 010\nc: 1e3\nd: 12:30\non: true\n")
    assert not len(found)
    assert isinstance(root, Table)
    assert [(key.text, value.text) for key, value in root.entries if isinstance(value, Scalar)] == [
        ("a", "no"), ("b", "010"), ("c", "1e3"), ("d", "12:30"), ("on", "true"),
    ]  # fmt: skip
    assert root.entries[1][1].span.line == 2
    assert (root.entries[1][1].span.col, root.entries[1][1].span.end) == (4, 7)


def test_lines_of_a_block_know_their_columns():
    root, _ = tree("a:\n  b: |\n\n      one\n        two\n    # no comment\n")
    value = root.entries[0][1].entries[0][1]
    assert value.text.splitlines() == ["", "one", "  two"]
    assert value.at(1, 0, 3).line == 4
    assert value.at(1, 0, 3).col == 7
    assert (value.at(2, 2, 5).line, value.at(2, 2, 5).col) == (5, 9)


def test_quoted_text_maps_inside_its_quotes_and_not_at_all_with_escapes():
    root, _ = tree("a: 'x + y'\nb: \"x \\x2b y\"\n")
    plain, escaped = (value for _, value in root.entries)
    assert plain.at(0, 4, 5).col == 9
    assert escaped.text == "x + y"
    assert escaped.at(0, 4, 5) == escaped.span


def test_crlf_and_non_ascii_count_characters():
    root, found = tree("é: ü\r\nkey: [ß, end]\r\n")
    assert not len(found)
    items = root.entries[1][1]
    assert isinstance(items, Items)
    assert (items.items[1].span.line, items.items[1].span.col) == (2, 10)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("mask: !seen\n", "S005"),
        ("mask: !!python/object:os.system x\n", "S005"),
        ("a: &x 1\n", "S004"),
        ("a: *x\n", "S004"),
        ("a:\n  <<: {b: 1}\n", "S004"),
        ("a: 1\n---\nb: 2\n", "S006"),
        ("%YAML 1.1\n---\na: 1\n", "S006"),
        ("a:\n\tb: 1\n", "S002"),
        ("a: [1, 2\n", "S002"),
        ("a: b: c\n", "S002"),
        ("a: \x07\n", "S002"),
        ('a: "\\ud800"\n', "S002"),
        ('a: "\\Uffffffff"\n', "S002"),
        ("", "S010"),
        ("# only a comment\n", "S010"),
        ("[" * 40 + "]" * 40, "S012"),
        ("[" + "1," * 5000 + "]", "S012"),
        ("? [a]\n: b\n", "S008"),
    ],
)
def test_what_yaml_can_do_and_a_policy_cannot_is_refused(text, code):
    assert code in codes(text)


def test_an_anchor_bomb_is_refused_at_its_first_anchor_and_costs_nothing():
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    start = time.thread_time()
    assert set(codes(bomb)) == {"S004"}
    assert time.thread_time() - start < 5.0  # unfolded it would be 10^9 values


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfa: 1\n", b"\xff\xfea\x00", "a: \xe9".encode("latin-1"), b"\x00" * 10])
def test_bytes_that_are_no_utf8_text_are_refused(data):
    root, found = tree(data)
    assert root is None
    assert found.errors[0].rule.code in {"S001", "S002"}


def test_the_place_of_a_byte_that_is_no_utf8_is_shown():
    _, found = tree("a: 1\nb: ü".encode() + b"\xff\n")
    assert [(one.span.line, one.span.col) for one in found] == [(2, 5)]


def test_a_file_over_the_limit_is_refused_before_it_is_parsed():
    root, found = tree(b"a: 1\n", size=50 * 2**20)
    assert root is None
    assert found.errors[0].message == f"the file has {50 * 2**20} bytes"
    assert tree(b"#" * MAX_BYTES)[1].errors[0].rule.code == "S010"


def test_a_refused_value_leaves_a_broken_node_so_that_nobody_repeats_it():
    root, _ = tree("a: !x 1\nb: *c\n")
    assert [type(value) for _, value in root.entries] == [Broken, Broken]
