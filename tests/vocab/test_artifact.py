from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from app.errors import Rejected
from app.vocab import items, manifest
from app.vocab.arrays import from_bytes, to_bytes
from app.vocab.artifact import load_vocab, open_vocab, save_vocab
from app.vocab.items import Numbers, Strings, Table, Texts
from app.vocab.manifest import FileEntry, encode, make_manifest
from app.vocab.publish import commit, draft
from app.vocab.vocab import arrange

SIZES = (4, 8)


def table_of(ids: list[str], seed: int = 0) -> Table:
    random = np.random.default_rng(seed)
    count = len(ids)
    codes = np.stack([random.integers(0, size, count) for size in SIZES], axis=1).astype(np.int32)
    columns = {
        "year": Numbers(random.normal(size=count).astype(np.float32), random.random(count) < 0.5),
        "a b.é": Texts(random.integers(-1, 2, count).astype(np.int32), Strings.of([b"Drama", "喜劇".encode()])),
    }
    return arrange(Table(Strings.of([name.encode() for name in ids]), codes, columns), SIZES)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(min_size=1, max_size=20).filter(lambda text: text.encode("utf-8", "ignore").decode() == text),
        unique=True,
        max_size=20,
    )
)
def test_a_saved_vocab_comes_back(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    root = tmp_path_factory.mktemp("root")
    table = table_of(ids)
    made = save_vocab(table, SIZES, root, "v1", made_by="test")
    vocab = load_vocab(made.directory, SIZES)
    assert (vocab.version, vocab.digest, vocab.sizes) == ("v1", made.digest, SIZES)
    assert vocab.ids(range(len(ids))) == [table.ids.get(i) for i in range(len(ids))]
    assert sorted(vocab.ids(range(len(ids)))) == sorted(ids)
    assert vocab.codes.tolist() == table.codes.tolist()
    year, genre = vocab.attributes["year"], vocab.attributes["a b.é"]
    assert isinstance(year, Numbers)
    assert isinstance(genre, Texts)
    assert np.array_equal(year.values, table.columns["year"].values)  # type: ignore[union-attr]
    assert np.array_equal(genre.codes, table.columns["a b.é"].codes)  # type: ignore[union-attr]
    assert [genre.words.get(i) for i in range(2)] == ["Drama", "喜劇"]


def test_equal_contents_have_equal_digests_under_any_name(tmp_path: Path) -> None:
    first = save_vocab(table_of(["a", "b"]), SIZES, tmp_path, "v1", made_by="test")
    second = save_vocab(table_of(["a", "b"]), SIZES, tmp_path, "v2", made_by="somebody else")
    third = save_vocab(table_of(["a", "c"]), SIZES, tmp_path, "v3", made_by="test")
    assert first.digest == second.digest != third.digest


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    table = table_of(["a", "b", "c"])
    made = save_vocab(table, SIZES, tmp_path, "v1", made_by="test")
    arrays = load_file(made.directory / "items.safetensors")
    assert arrays["sid"].tolist() == table.codes.tolist()
    assert bytes(arrays["id.text"]) == table.ids.text.tobytes()


def test_a_loaded_vocab_does_not_see_its_file_any_more(tmp_path: Path) -> None:
    made = save_vocab(table_of(["a", "b"]), SIZES, tmp_path, "v1", made_by="test")
    vocab = load_vocab(made.directory, SIZES)
    (made.directory / "items.safetensors").write_bytes(b"")
    assert sorted(vocab.ids([0, 1])) == ["a", "b"]


def test_an_existing_version_is_never_overwritten(tmp_path: Path) -> None:
    save_vocab(table_of(["a"]), SIZES, tmp_path, "v1", made_by="test")
    before = (tmp_path / "vocab/v1/MANIFEST.json").read_bytes()
    with pytest.raises(Rejected) as caught:
        save_vocab(table_of(["b"]), SIZES, tmp_path, "v1", made_by="test")
    assert caught.value.code == "version_exists"
    assert (tmp_path / "vocab/v1/MANIFEST.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "vocab").iterdir()] == ["v1"], "a draft was left behind"


def test_whoever_loads_is_asked_between_pieces_and_may_give_up_at_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "BLOCK", 50)
    monkeypatch.setattr(manifest, "CHUNK", 1000)
    made = save_vocab(table_of([f"item {n}" for n in range(200)]), SIZES, tmp_path, "v1", made_by="test")
    asked: list[int] = []
    load_vocab(made.directory, SIZES, lambda: asked.append(1))
    size = (made.directory / "items.safetensors").stat().st_size
    # the file's chunks, the table, the levels of the tree, 200 / 50 blocks of ids, what is made of their order
    assert len(asked) >= size // 1000 + 1 + len(SIZES) + 4 + 4

    class Enough(Exception):
        """Somebody has had it."""

    for last in range(1, len(asked) + 1):
        left = iter(range(last - 1))

        def give_up(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Enough

        with pytest.raises(Enough):
            load_vocab(made.directory, SIZES, give_up)


def test_other_sizes_than_the_deployments_are_refused(tmp_path: Path) -> None:
    made = save_vocab(table_of(["a"]), SIZES, tmp_path, "v1", made_by="test")
    with pytest.raises(Rejected, match=r"made for sizes \[4, 8\], the deployment has \[8, 8\]"):
        load_vocab(made.directory, (8, 8))
    assert open_vocab(made.directory).sizes == SIZES


METADATA = '{"format":1,"sizes":[4,8],"attributes":[]}'
GOOD = {
    "sid": np.array([[0, 1], [2, 3]], np.int32),
    "id.text": np.frombuffer(b"ab", np.uint8),
    "id.start": np.array([0, 1, 2], np.int32),
}
HOSTILE: dict[str, tuple[Callable[[], dict[str, np.ndarray]], str, str, str]] = {
    "code out of range": (lambda: GOOD | {"sid": GOOD["sid"] + 4}, METADATA, "code_out_of_range", "row 0"),
    "negative code": (lambda: GOOD | {"sid": GOOD["sid"] - 1}, METADATA, "code_out_of_range", "row 0"),
    "sids out of order": (lambda: GOOD | {"sid": GOOD["sid"][::-1].copy()}, METADATA, "not_in_sid_order", "row 0"),
    "an id twice": (lambda: GOOD | {"id.text": np.frombuffer(b"aa", np.uint8)}, METADATA, "duplicate_id", "row 1"),
    "an empty id": (lambda: GOOD | {"id.start": np.array([0, 0, 2], np.int32)}, METADATA, "arrays_invalid", "row 0"),
    "a long id": (
        lambda: GOOD | {"id.text": np.full(601, 97, np.uint8), "id.start": np.array([0, 1, 601], np.int32)},
        METADATA,
        "arrays_invalid",
        "row 1",
    ),
    "bounds beyond the text": (
        lambda: GOOD | {"id.start": np.array([0, 1, 9], np.int32)},
        METADATA,
        "arrays_invalid",
        "id.start",
    ),
    "descending bounds": (
        lambda: GOOD | {"id.start": np.array([0, 5, 2], np.int32)},
        METADATA,
        "arrays_invalid",
        "id.start",
    ),
    "ids that are not UTF-8": (
        lambda: GOOD | {"id.text": np.array([97, 255], np.uint8)},
        METADATA,
        "arrays_invalid",
        "id.text",
    ),
    "a cut character": (
        lambda: GOOD | {"id.text": np.frombuffer("é".encode(), np.uint8)},
        METADATA,
        "arrays_invalid",
        "id.start",
    ),
    "too few ids": (lambda: GOOD | {"id.start": np.array([0, 2], np.int32)}, METADATA, "arrays_invalid", "id.start"),
    "a missing array": (lambda: {"sid": GOOD["sid"]}, METADATA, "arrays_invalid", "id.text"),
    "an array too many": (lambda: GOOD | {"x": GOOD["sid"]}, METADATA, "arrays_invalid", "x"),
    "a wrong dtype": (lambda: GOOD | {"sid": GOOD["sid"].astype(np.int64)}, METADATA, "arrays_invalid", "sid"),
    "a wrong number of steps": (lambda: GOOD | {"sid": np.zeros((2, 3), np.int32)}, METADATA, "sid_length", ""),
    "an attribute without its array": (lambda: GOOD, METADATA.replace("[]", '["x"]'), "arrays_invalid", "attr.0.code"),
    "an attribute with NaN": (
        lambda: GOOD | {"attr.0.value": np.array([0, np.nan], np.float32), "attr.0.present": np.ones(2, bool)},
        METADATA.replace("[]", '["x"]'),
        "arrays_invalid",
        "attr.0",
    ),
    "an attribute text that does not exist": (
        lambda: (
            GOOD
            | {
                "attr.0.code": np.array([0, 1], np.int32),
                "attr.0.text": np.zeros(1, np.uint8),
                "attr.0.start": np.array([0, 1], np.int32),
            }
        ),
        METADATA.replace("[]", '["x"]'),
        "arrays_invalid",
        "attr.0",
    ),
    "no metadata": (lambda: GOOD, "", "metadata_invalid", "items.safetensors"),
    "an unknown format": (lambda: GOOD, METADATA.replace("1", "2", 1), "metadata_invalid", "items.safetensors"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arrays_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    arrays, metadata, code, place = HOSTILE[name]
    with draft(tmp_path, "vocab") as made:
        made.write("items.safetensors", to_bytes(arrays(), metadata))
        directory = commit(made, "vocab", "v1", "test", {}).directory
    with pytest.raises(Rejected) as caught:
        load_vocab(directory, SIZES)
    assert caught.value.code == code
    assert place in (caught.value.location or "")


def refused(root: Path, arrays: dict[str, np.ndarray], metadata: str = METADATA) -> list[tuple[str, str | None]]:
    with draft(root, "vocab") as made:
        made.write("items.safetensors", to_bytes(arrays, metadata))
        directory = commit(made, "vocab", "v1", "test", {}).directory
    with pytest.raises(Rejected) as caught:
        load_vocab(directory, SIZES)
    return [(one.code, one.location) for one in (caught.value, *caught.value.others)]


def test_every_row_that_is_wrong_is_named_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    codes = np.array([[0, 1], [9, 1], [1, -1], [2, 0], [2, 8]], np.int32)
    ids = Strings.of([b"a", b"b", b"a", b"c", b"b"])
    column = {"attr.0.value": np.full(5, np.inf, np.float32), "attr.0.present": np.ones(5, bool)}
    arrays = {"sid": codes, "id.text": ids.text, "id.start": ids.start, **column}
    assert refused(tmp_path, arrays, METADATA.replace("[]", '["year"]')) == [
        ("code_out_of_range", "items.safetensors: row 1"),
        ("code_out_of_range", "items.safetensors: row 2"),
        ("code_out_of_range", "items.safetensors: row 4"),
        ("arrays_invalid", "items.safetensors: attr.0"),
        ("duplicate_id", "items.safetensors: row 2"),
        ("duplicate_id", "items.safetensors: row 4"),
    ]
    arrays = {"sid": codes[[3, 0, 0]], "id.text": ids.text[:3], "id.start": ids.start[:4]}
    assert refused(tmp_path / "other", arrays) == [
        ("not_in_sid_order", "items.safetensors: row 0"),
        ("not_in_sid_order", "items.safetensors: row 1"),
        ("not_in_sid_order", "items.safetensors: row 2"),
        ("duplicate_id", "items.safetensors: row 2"),
    ]


def test_of_very_many_rows_the_first_twenty_are_named_and_that_there_are_more(tmp_path: Path) -> None:
    ids = Strings.of([b"%d" % number for number in range(1000)])
    arrays = {"sid": np.full((1000, 2), 99, np.int32), "id.text": ids.text, "id.start": ids.start}
    found = refused(tmp_path, arrays)
    assert found[:21] == [("code_out_of_range", f"items.safetensors: row {row}") for row in [*range(20), 19]]
    assert len(found) == 42  # of each of the two steps


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_array_file_is_refused_or_still_well_formed(data: st.DataObject) -> None:
    whole = b"".join(to_bytes(GOOD, METADATA))
    damage = data.draw(st.sampled_from(["cut", "longer", "flip", "header"]))
    if damage == "cut":
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif damage == "longer":
        broken = whole + b"xyz"
    elif damage == "header":
        broken = (2**40).to_bytes(8, "little") + whole[8:]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        broken = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    try:
        from_bytes(bytearray(broken), "f")
    except Rejected as error:
        assert error.code == "arrays_invalid"
        assert (error.location or "").startswith("f")
    else:
        assert damage == "flip"


def test_a_version_without_its_items_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "vocab" / "v1"
    directory.mkdir(parents=True)
    (directory / "MANIFEST.json").write_bytes(encode(make_manifest("vocab", "v1", {}, "test", {})))
    with pytest.raises(Rejected) as caught:
        load_vocab(directory, SIZES)
    assert (caught.value.code, caught.value.location) == ("file_missing", "items.safetensors")
    assert json.loads((directory / "MANIFEST.json").read_text())["files"] == {}
    assert FileEntry(0, "0" * 64).size == 0
