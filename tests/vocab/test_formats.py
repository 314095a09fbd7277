"""One suite over all formats: what each writes comes back, and what is broken is refused with its place."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import SidConfig
from app.errors import Rejected
from app.vocab.artifact import load_vocab, save_vocab
from app.vocab.formats import FORMATS, jsonl, source
from app.vocab.formats.source import Source
from app.vocab.items import Table
from app.vocab.table import read_table
from app.vocab.vocab import Vocab, make_vocab

SID = SidConfig(sizes=(4, 8, 8), token_base=(100, 200, 300))
TOKENS = np.array([100, 200, 300])
Item = tuple[str, tuple[int, ...]]
Catalogue = list[Item]

any_text = st.text(min_size=1, max_size=12).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)
sids = st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 7))


def catalogues(ids: st.SearchStrategy[str]) -> st.SearchStrategy[Catalogue]:
    return st.lists(st.tuples(ids, sids), min_size=1, max_size=30, unique_by=lambda item: item[0])


def write_jsonl(items: Catalogue, path: Path) -> None:
    path.write_text("".join(json.dumps({"id": name, "sid": sid}) + "\n" for name, sid in items))


def write_index(items: Catalogue, path: Path, form: str = "<{}_{}>") -> None:
    path.write_text(json.dumps({name: [form.format("abc"[i], c) for i, c in enumerate(sid)] for name, sid in items}))


def write_openonerec(items: Catalogue, path: Path) -> None:
    tree: dict[str, list[dict[str, object]]] = {}
    for rank, (name, (a, b, c)) in enumerate(items):
        entry = {"pid": name, "count": 1000 - rank, "count_after_downsample": 1}
        tree.setdefault(str((a * 8192 + b) * 8192 + c), []).insert(
            0, entry
        )  # the file's order is not that of the counts
    path.write_text(json.dumps(tree, indent=1))


def write_nvidia(items: Catalogue, path: Path) -> None:
    rows = ({"item_id": name, "token_ids": (TOKENS + sid).tolist()} for name, sid in items)
    path.write_text("\n".join(map(json.dumps, rows)))


def write_xllm(items: Catalogue, path: Path) -> None:
    path.write_bytes(b"".join(struct.pack("<q3i", int(name), *(TOKENS + sid)) for name, sid in items))


def write_xllm_extended(items: Catalogue, path: Path) -> None:
    def text(data: bytes) -> bytes:
        return struct.pack("<I", len(data)) + data

    path.write_bytes(
        b"".join(
            struct.pack("<q", int(name)) + text(b"d\xc3\xa9") + text(b"") + struct.pack("<3i", *(TOKENS + sid))
            for name, sid in items
        )
    )


def write_npy(items: Catalogue, path: Path) -> None:
    np.save(path, np.array([sid for _, sid in items], np.int16))
    path.with_suffix(".ids.json").write_text(json.dumps([name for name, _ in items]))


WRITERS: dict[str, tuple[str, Callable[[Catalogue, Path], None], st.SearchStrategy[str]]] = {
    "jsonl": ("jsonl", write_jsonl, any_text),
    "index-json": ("index-json", write_index, any_text),
    "index-json of OneRec": ("index-json", lambda items, path: write_index(items, path, "<s_{}_{}>"), any_text),
    "openonerec": ("openonerec", write_openonerec, any_text),
    "nvidia-jsonl": ("nvidia-jsonl", write_nvidia, any_text),
    "xllm": ("xllm", write_xllm, st.integers(-(2**63), 2**63 - 1).map(str)),
    "xllm extended": ("xllm", write_xllm_extended, st.integers(0, 2**63 - 1).map(str)),
    "npy": ("npy", write_npy, any_text),
}


def vocab_of(name: str, path: Path, sid: SidConfig = SID, **files: Path) -> Vocab:
    return make_vocab(read_table(name, Source(path, sid, **files)), sid.sizes)


def contents(vocab: Vocab) -> Catalogue:
    return [(vocab.id(i), tuple(vocab.codes[i].tolist())) for i in range(len(vocab))]


def in_sid_order(items: Catalogue) -> Catalogue:
    return sorted(items, key=lambda item: item[1])  # stable: the order of the lines is the preference


@pytest.mark.parametrize("case", WRITERS)
def test_a_written_catalogue_comes_back_with_ids_sids_and_preference(
    case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, write, ids = WRITERS[case]

    @settings(max_examples=25, deadline=None)
    @given(items=catalogues(ids), piece=st.sampled_from([1, 7, 64, 1 << 20]))
    def check(items: Catalogue, piece: int) -> None:
        path = tmp_path_factory.mktemp("f") / ("catalogue.npy" if name == "npy" else "catalogue")
        write(items, path)
        files = {"ids": path.with_suffix(".ids.json")} if name == "npy" else {}
        whole, source.PIECE = source.PIECE, piece
        try:
            vocab = vocab_of(name, path, **files)
        finally:
            source.PIECE = whole
        assert contents(vocab) == in_sid_order(items)

    check()


@settings(max_examples=25, deadline=None)
@given(items=st.lists(sids, min_size=1, max_size=20, unique=True), form=st.integers(0, 5))
def test_flashrecs_forms_come_back_with_the_sid_as_id(
    items: list[tuple[int, ...]], form: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("f") / "vocab"
    forms = [
        lambda: json.dumps({",".join(map(str, sid)): 1 for sid in items}, separators=(",", ":")),
        lambda: json.dumps({",".join(map(str, [*sid, 1])): {"any": "thing"} and 1 for sid in items}),
        lambda: json.dumps(items),
        lambda: "# a comment\n\n" + "\n".join(" ".join(map(str, sid)) for sid in items),
        lambda: "".join(",".join(map(str, sid)) + " # x\r\n" for sid in items),
        lambda: "\n".join(" , ".join(map(str, [*sid, 1])) for sid in items),
    ]
    path.write_text(forms[form]())
    assert contents(vocab_of("flashrec", path)) == [(",".join(map(str, sid)), sid) for sid in sorted(items)]


def test_npy_without_ids_takes_the_row_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 0, 0], [0, 0, 0]]))
    assert contents(vocab_of("npy", tmp_path / "a.npy")) == [("1", (0, 0, 0)), ("0", (1, 0, 0))]


@pytest.mark.parametrize(
    ("file", "data", "expected"),
    [
        ("ids.txt", b"a b\n\xc3\xa9\n", ["a b", "é"]),
        ("ids.txt", "a\u2028\x85b\nc".encode(), ["a\u2028\x85b", "c"]),
        ("ids.json", b'["a\\nb", "7"]', ["a\nb", "7"]),
    ],
)
def test_npy_takes_ids_from_a_second_file(file: str, data: bytes, expected: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), int))
    (tmp_path / file).write_bytes(data)
    assert vocab_of("npy", tmp_path / "a.npy", ids=tmp_path / file).ids([0, 1]) == expected


def test_the_layouts_that_others_publish_are_read(tmp_path: Path) -> None:
    wide = SidConfig(sizes=(8192, 8192, 8192), token_base=(0, 0, 0))
    one = tmp_path / "sid2pid.json"
    one.write_text('{"22870808035": [{"pid": 17, "count": 4, "count_after_downsample": 2}]}')
    assert contents(vocab_of("openonerec", one, wide)) == [("17", (340, 6566, 5603))]
    one.write_text('{"22870808035": [{"iid": 17, "count": 4}]}')
    assert contents(vocab_of("openonerec", one, wide)) == [("17", (340, 6566, 5603))]
    one.write_text('{"0,4,6,1":1,"0,4,51,1":1}')
    assert contents(vocab_of("flashrec", one, wide)) == [("0,4,6", (0, 4, 6)), ("0,4,51", (0, 4, 51))]
    one.write_bytes(bytes.fromhex("6400000000000000 01000000 02000000 03000000"))
    assert contents(vocab_of("xllm", one, wide)) == [("100", (1, 2, 3))]
    one.write_text('{"0": ["<|sid_begin|>", "<s_a_7060>", "<s_b_18>", "<s_c_1748>", "<|sid_end|>"]}')
    assert contents(vocab_of("index-json", one, wide)) == [("0", (7060, 18, 1748))]
    one.write_text('{"item_id": 7, "token_ids": [151670, 159863, 168060], "metadata": {"cat": "toy"}}\n')
    onerec = SidConfig(sizes=(8192,) * 3, token_base=(151669, 159861, 168053))
    vocab = vocab_of("nvidia-jsonl", one, onerec)
    assert contents(vocab) == [("7", (1, 2, 7))]
    assert jsonl.values(vocab.attributes["cat"], range(1)) == ["toy"]


def test_minionerecs_index_is_read_with_its_collisions() -> None:
    path = Path(__file__).parent / "fixtures" / "minionerec.index.json"
    vocab = vocab_of("index-json", path, SidConfig(sizes=(256, 256, 256)))
    assert len(vocab) == 40
    assert vocab.sids(vocab.find(["0"])).tolist() == [[236, 231, 226]]
    seven, eight = vocab.find(["7", "8"]).tolist()
    assert eight == seven + 1, "two items of one SID, in the file's order"
    with pytest.raises(Rejected) as caught:
        vocab_of("flashrec", path, SidConfig(sizes=(256, 256, 256)))
    assert caught.value.location == "minionerec.index.json: item 1 (key '0')"


def test_tokens_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "sid_tokens.json").write_text("[[9, 5, -1], [7, 8]]")
    (tmp_path / "a").write_text('{"item_id": "x", "token_ids": [5, 7]}\n{"item_id": "y", "token_ids": [9, 8]}\n')
    sid = SidConfig(sizes=(3, 2), tokens="file")
    vocab = vocab_of("nvidia-jsonl", tmp_path / "a", sid, tokens=tmp_path / "sid_tokens.json")
    assert contents(vocab) == [("y", (0, 1)), ("x", (1, 0))]
    with pytest.raises(Rejected, match="needs `token_base`"):
        vocab_of("nvidia-jsonl", tmp_path / "a", sid)
    (tmp_path / "sid_tokens.json").write_text("[[9, 5], [7, 8]]")
    with pytest.raises(Rejected, match=r"lists \[2, 2\] tokens for sizes \[3, 2\]"):
        vocab_of("nvidia-jsonl", tmp_path / "a", sid, tokens=tmp_path / "sid_tokens.json")


@pytest.mark.parametrize("case", [case for case in WRITERS if case != "npy" and "xllm" not in case])
def test_text_formats_may_be_packed(case: str, tmp_path: Path) -> None:
    name, write, _ = WRITERS[case]
    write([("a", (0, 1, 2)), ("b", (3, 7, 7))], tmp_path / "plain")
    packed = gzip.compress((tmp_path / "plain").read_bytes())
    (tmp_path / "packed.gz").write_bytes(packed)
    assert contents(vocab_of(name, tmp_path / "packed.gz")) == contents(vocab_of(name, tmp_path / "plain"))
    for broken in (packed[:-9], packed[:20], packed[:15] + b"xxxx" + packed[19:]):
        (tmp_path / "packed.gz").write_bytes(broken)
        with pytest.raises(Rejected):
            vocab_of(name, tmp_path / "packed.gz")


def line(**change: object) -> bytes:
    return json.dumps({"id": "x", "sid": [1, 2, 3]} | change).encode() + b"\n"


OK = line(id="ok")
REFUSED: dict[str, tuple[str, bytes, str, str | None]] = {
    "jsonl: empty file": ("jsonl", b"", "no_items", None),
    "jsonl: not JSON": ("jsonl", OK + b"{\n", "bad_item", "line 2"),
    "jsonl: cut": ("jsonl", OK + OK[:-5], "bad_item", "line 2"),
    "jsonl: blank line": ("jsonl", OK + b"\n" + line(), "bad_item", "line 2"),
    "jsonl: two on a line": ("jsonl", OK.strip() + b"," + line() + line(id="y"), "bad_item", "line 1"),
    "jsonl: two on a line and an empty one": ("jsonl", OK.strip() + b"," + line() + b"\n", "bad_item", "line 1"),
    "jsonl: an array": ("jsonl", b"[" + OK.strip() + b"]", "bad_item", "line 1"),
    "jsonl: number as id": ("jsonl", line(id=7), "bad_item", "line 1"),
    "jsonl: unknown field": ("jsonl", OK + line(title="t"), "bad_item", "line 2"),
    "jsonl: no sid": ("jsonl", b'{"id": "x"}', "bad_item", "line 1"),
    "jsonl: fraction as code": ("jsonl", line(sid=[1, 2, 3.5]), "bad_item", "line 1"),
    "jsonl: text as code": ("jsonl", line(sid=[1, 2, "3"]), "bad_item", "line 1"),
    "jsonl: huge code": ("jsonl", line(sid=[1, 2, 2**70]), "bad_item", "line 1"),
    "jsonl: mixed lengths": ("jsonl", OK + line(sid=[1, 2]), "sid_length", "line 2"),
    "jsonl: offset code": ("jsonl", OK + line(sid=[1, 8, 3]), "code_out_of_range", "line 2"),
    "jsonl: negative code": ("jsonl", OK + line(sid=[1, -1, 3]), "code_out_of_range", "line 2"),
    "jsonl: an id twice": ("jsonl", OK + line() + line(), "duplicate_id", "line 3"),
    "jsonl: empty id": ("jsonl", OK + line(id=""), "bad_id", "line 2"),
    "jsonl: long id": ("jsonl", OK + line(id="é" * 257), "bad_id", "line 2"),
    "jsonl: not UTF-8": ("jsonl", OK + b'{"id": "\xff", "sid": [1, 2, 3]}', "bad_item", "line 2"),
    "jsonl: deep": ("jsonl", b'{"id": "x", "sid": ' + b"[" * 99999, "bad_item", "line 1"),
    "jsonl: attribute of changing type": (
        "jsonl",
        line(attrs={"year": 1994}) + line(id="y", attrs={"year": "1994"}),
        "attribute_type",
        "line 2",
    ),
    "jsonl: attribute true": ("jsonl", line(attrs={"new": True}), "bad_item", "line 1"),
    "jsonl: attribute list": ("jsonl", line(attrs={"genres": ["a"]}), "bad_item", "line 1"),
    "jsonl: attribute that float32 would change": ("jsonl", line(attrs={"key": 16777217}), "bad_attribute", "line 1"),
    "jsonl: attribute too large": ("jsonl", line(attrs={"price": 1e39}), "bad_attribute", "line 1"),
    "jsonl: attribute far too large": ("jsonl", line(attrs={"price": 10**400}), "bad_attribute", "line 1"),
    "jsonl: half a surrogate pair in an id": ("jsonl", b'{"id": "\\ud800", "sid": [1, 2, 3]}', "bad_item", "line 1"),
    "jsonl: half a surrogate pair in a name": (
        "jsonl",
        OK + b'{"id": "y", "sid": [1, 2, 3], "attrs": {"\\udc00": 1}}',
        "bad_item",
        "line 2",
    ),
    "jsonl: half a surrogate pair in a value": (
        "jsonl",
        OK + b'{"id": "y", "sid": [1, 2, 3], "attrs": {"a": "\\udc00"}}',
        "bad_item",
        "line 2",
    ),
    "jsonl: too many attributes": (
        "jsonl",
        OK + line(attrs={str(i): i for i in range(257)}),
        "too_many_attributes",
        "line 2",
    ),
    "jsonl: a late attribute of another type": (
        "jsonl",
        line(attrs={"a": 1})
        + b"".join(line(id=str(i), attrs={"a": None}) for i in range(9))
        + line(id="z", attrs={"a": "1"}),
        "attribute_type",
        "line 11",
    ),
    "index-json: empty": ("index-json", b"", "bad_json", "item 1"),
    "index-json: no items": ("index-json", b" {} ", "no_items", None),
    "index-json: cut": ("index-json", b'{"0": ["<a_1>", "<b_2>", "<c_3>"], "1": ["<a_', "bad_json", "item 2"),
    "index-json: no end": ("index-json", b'{"0": ["<a_1>", "<b_2>", "<c_3>"]', "bad_json", "item 1"),
    "index-json: comma at the end": ("index-json", b'{"0": ["<a_1>", "<b_2>", "<c_3>"],}', "bad_json", "item 2"),
    "index-json: more after the end": ("index-json", b'{"0": ["<a_1>", "<b_2>", "<c_3>"]} {}', "bad_json", "item 2"),
    "index-json: an array": ("index-json", b'[["<a_1>", "<b_2>", "<c_3>"]]', "bad_json", None),
    "index-json: codes": ("index-json", b'{"0": [1, 2, 3]}', "bad_item", "item 1 (key '0')"),
    "index-json: an id twice": (
        "index-json",
        b'{"0": ["<a_1>", "<b_2>", "<c_3>"], "0": ["<a_1>", "<b_2>", "<c_4>"]}',
        "duplicate_id",
        "item 2",
    ),
    "index-json: swapped levels": (
        "index-json",
        b'{"0": ["<b_1>", "<a_2>", "<c_3>"]}',
        "bad_token",
        "item 1 (key '0')",
    ),
    "index-json: leading zero": ("index-json", b'{"0": ["<a_01>", "<b_2>", "<c_3>"]}', "bad_token", "item 1 (key '0')"),
    "index-json: two steps": ("index-json", b'{"7": ["<a_1>", "<b_2>"]}', "sid_length", "item 1 (key '7')"),
    "index-json: out of range": ("index-json", b'{"7": ["<a_1>", "<b_8>", "<c_0>"]}', "code_out_of_range", "item 1"),
    "index-json: given flashrec": ("index-json", b'{"0,4,6,1":1}', "bad_item", "item 1 (key '0,4,6,1')"),
    "openonerec: no number": ("openonerec", b'{"1,2,3": []}', "bad_key", "entry 1 (key '1,2,3')"),
    "openonerec: leading zero": ("openonerec", b'{"012": []}', "bad_key", "entry 1 (key '012')"),
    "openonerec: too large": ("openonerec", b'{"549755813888": []}', "bad_key", "entry 1 (key '549755813888')"),
    "openonerec: a code too large": (
        "openonerec",
        b'{"7": [{"count": 1, "pid": 1}], "9": [{"count": 1, "pid": 2}]}',
        "code_out_of_range",
        "item 2",
    ),
    "openonerec: huge": ("openonerec", b'{"' + b"9" * 5000 + b'": []}', "bad_key", None),
    "openonerec: no count": ("openonerec", b'{"7": [{"pid": 1}]}', "bad_item", "entry 1 (key '7')"),
    "openonerec: no id": ("openonerec", b'{"7": [{"count": 1}]}', "bad_item", "entry 1 (key '7')"),
    "openonerec: both ids": (
        "openonerec",
        b'{"7": [{"count": 1, "pid": 1, "iid": 1}]}',
        "bad_item",
        "entry 1 (key '7')",
    ),
    "openonerec: an id twice": (
        "openonerec",
        b'{"6": [{"count": 1, "pid": 1}], "7": [{"count": 1, "pid": "1"}]}',
        "duplicate_id",
        "item 2",
    ),
    "openonerec: given an index": (
        "openonerec",
        b'{"0": ["<a_1>", "<b_2>", "<c_3>"]}',
        "bad_item",
        "entry 1 (key '0')",
    ),
    "flashrec: packed keys": ("flashrec", b'{"22870808035": [1]}', "bad_key", "item 1 (key '22870808035')"),
    "flashrec: single numbers": ("flashrec", b'{"0": 1}', "sid_length", "item 1 (key '0')"),
    "flashrec: end token that is not 1": ("flashrec", b'{"0,4,6,2": 1}', "sid_length", "item 1 (key '0,4,6,2')"),
    "flashrec: end token here and there": (
        "flashrec",
        b'{"0,4,6,1": 1, "0,4,6": 1}',
        "sid_length",
        "item 2 (key '0,4,6')",
    ),
    "flashrec: twice": ("flashrec", b"0 4 6\n0 4 6\n", "duplicate_id", "item 2"),
    "flashrec: out of range": ("flashrec", b"0 4 6\n4 4 6\n", "code_out_of_range", "item 2"),
    "flashrec: negative": ("flashrec", b"0 4 6\n0 -4 6\n", "bad_line", "line 2"),
    "flashrec: text": ("flashrec", b"0 4 6\n0 4 six\n", "bad_line", "line 2"),
    "flashrec: array of texts": ("flashrec", b'[["0", "4", "6"]]', "bad_item", "item 1"),
    "flashrec: flat array": ("flashrec", b"[0, 4, 6]", "bad_item", "item 1"),
    "flashrec: nothing": ("flashrec", b"# nothing\n", "no_items", None),
    "nvidia-jsonl: no token of the step": (
        "nvidia-jsonl",
        b'{"item_id": 1, "token_ids": [100, 200, 308]}',
        "bad_token",
        "line 1",
    ),
    "nvidia-jsonl: codes": ("nvidia-jsonl", b'{"item_id": 1, "token_ids": [1, 2, 3]}', "bad_token", "line 1"),
    "nvidia-jsonl: 7 and '7'": (
        "nvidia-jsonl",
        b'{"item_id": 7, "token_ids": [100, 200, 300]}\n{"item_id": "7", "token_ids": [100, 200, 301]}',
        "duplicate_id",
        "line 2",
    ),
    "nvidia-jsonl: nested metadata": (
        "nvidia-jsonl",
        b'{"item_id": 1, "token_ids": [100, 200, 300], "metadata": {"a": {}}}',
        "bad_item",
        "line 1",
    ),
    "xllm: trailing bytes": ("xllm", struct.pack("<q3i", 1, 100, 200, 300) + b"xyz", "bad_record", None),
    "xllm: cut": ("xllm", struct.pack("<q3i", 1, 100, 200, 300)[:-1], "bad_record", None),
    "xllm: codes": ("xllm", struct.pack("<q3i", 1, 1, 2, 3), "bad_record", None),
    "xllm: an id twice": ("xllm", struct.pack("<q3i", 1, 100, 200, 300) * 2, "duplicate_id", "record 2"),
    "xllm: empty": ("xllm", b"", "no_items", None),
    "npy: text": ("npy", b"1 2 3", "bad_npy", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_file_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    name, data, code, place = REFUSED[case]
    path = tmp_path / "catalogue"
    path.write_bytes(data)
    with pytest.raises(Rejected) as caught:
        vocab_of(name, path)
    assert caught.value.code == code, str(caught.value)
    location = caught.value.location or ""
    assert location.startswith("catalogue")
    if place is not None:
        assert location == f"catalogue: {place}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="No such file"):
        vocab_of(name, tmp_path / "nothing")


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
def test_no_bytes_whatever_give_anything_but_a_vocab_or_a_refusal(
    data: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("f") / "catalogue"
    case = data.draw(st.sampled_from([case for case in WRITERS if WRITERS[case][0] == name] or ["jsonl"]))
    WRITERS[case][1]([("1", (0, 1, 2)), ("2", (3, 7, 7))], path)
    path = path if path.exists() else path.with_suffix(".npy")
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + data.draw(st.integers(0, 4)) :])
    try:
        vocab_of(name, path)
    except Rejected as error:
        assert error.location


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((2, 2), int), "codes_shape"),
        (np.zeros(3, int), "codes_shape"),
        (np.zeros((2, 3)), "codes_shape"),
        (np.array([[0, 0, 9]]), "code_out_of_range"),
        (np.array([[2**64 - 1, 0, 0]], np.uint64), "code_out_of_range"),
        (np.array([[{}]], object), "bad_npy"),
        (np.zeros((0, 3), int), "no_items"),
    ],
)
def test_arrays_that_are_no_sids_are_refused(array: np.ndarray, code: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(Rejected) as caught:
        vocab_of("npy", tmp_path / "a.npy")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("file", "data", "place"),
    [
        ("ids.txt", b"a\n", "a.npy"),
        ("ids.txt", b"a\r\nb\r\n", "ids.txt: line 1"),
        ("ids.txt", b"a\n\xff\n", "ids.txt: line 2"),
        ("ids.txt", b"a\n\n", "a.npy: row 1"),
        ("ids.txt", b"a\na\n", "a.npy: row 1"),
        ("ids.json", b'["a", 7]', "ids.json"),
    ],
)
def test_id_files_that_do_not_fit_are_refused(file: str, data: bytes, place: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), int))
    (tmp_path / file).write_bytes(data)
    with pytest.raises(Rejected) as caught:
        vocab_of("npy", tmp_path / "a.npy", ids=tmp_path / file)
    assert caught.value.location == place


def test_an_xllm_file_that_reads_both_ways_is_refused(tmp_path: Path) -> None:
    # 40 bytes: two plain records, or one extended record with texts of 4 and 8 bytes
    sid = SidConfig(sizes=(300, 300, 300), token_base=(0, 0, 0))
    data = struct.pack("<q", 1) + struct.pack("<I", 4) + b"\0\0\0\0" + struct.pack("<I", 8) + bytes(8) + bytes(12)
    (tmp_path / "a").write_bytes(data)
    assert len(data) == 40
    with pytest.raises(Rejected) as caught:
        vocab_of("xllm", tmp_path / "a", sid)
    assert caught.value.code == "ambiguous"


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-(2**24), 2**24)
attributes = st.dictionaries(st.sampled_from(["n", "m", "é "]), numbers, max_size=3) | st.none()


@settings(max_examples=60, deadline=None)
@given(items=catalogues(any_text), data=st.data())
def test_the_plain_form_out_gives_the_same_vocab_again(
    items: Catalogue, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    rows = []
    for name, sid in items:
        attrs = dict(data.draw(attributes) or {}) | ({"text": data.draw(any_text | st.just(""))} if name < "m" else {})
        rows.append({"id": name, "sid": sid} | ({"attrs": attrs} if attrs else {}))
    (root / "in").write_text("\n".join(map(json.dumps, rows)))
    first = save(read_table("jsonl", Source(root / "in", SID)), root, "v1")
    assert export(first, root / "out") == len(items)
    second = save(read_table("jsonl", Source(root / "out", SID)), root, "v2")
    export(second, root / "again")
    assert (root / "out").read_bytes() == (root / "again").read_bytes()
    assert contents(second) == in_sid_order(items)
    written = {row["id"]: row for row in map(json.loads, (root / "out").read_text().split("\n")[:-1])}
    for row in rows:
        attrs = {k: v if isinstance(v, str) else np.float32(v) for k, v in row.get("attrs", {}).items()}
        found = written[row["id"]].get("attrs", {})
        assert {k: v if isinstance(v, str) else np.float32(v) for k, v in found.items()} == attrs


def save(table: Table, root: Path, version: str) -> Vocab:
    return load_vocab(save_vocab(table, SID.sizes, root, version, made_by="test").directory, SID.sizes)


def export(vocab: Vocab, path: Path) -> int:
    with path.open("wb") as stream:
        return jsonl.write(vocab, stream)
