import hashlib
import json
import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from app.engine import safetensors
from app.engine.safetensors import Reader, read_header
from app.errors import Rejected


def write(path, header, data=b"", *, raw=None):
    text = raw if raw is not None else json.dumps(header).encode()
    file = path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def tensor(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3), max_size=5), st.data())
def test_what_the_formats_own_library_writes_is_read_back(tmp_path_factory, shapes, data):
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    tensors = {
        name: torch.randn(shape).to(data.draw(dtypes)) for name, shape in shapes.items() if name != "__metadata__"
    }
    file = tmp_path_factory.mktemp("made") / "x.safetensors"
    file.write_bytes(save(tensors, metadata={"format": "pt"}))
    entries = read_header(file)
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(x.shape) for n, x in tensors.items()}
    with Reader(file) as reader:
        assert reader.entries == entries
        for name, entry in reader.entries.items():
            data = b"".join(piece.tobytes() for _, piece in reader.read(entry, entry.shape[0] if entry.shape else 1))
            assert data == bytes(tensors[name].reshape(-1).view(torch.uint8).numpy())


MALFORMED = [
    ({"a": tensor()}, b"1234567", "truncated", "the tensors end at byte"),
    ({"a": tensor()}, b"123456789", "bad_safetensors", "followed by 1 byte"),
    ({"a": tensor(4, 12)}, b"0" * 12, "bad_safetensors", "a hole or an overlap"),
    ({"a": tensor(), "b": tensor(4, 12)}, b"0" * 12, "bad_safetensors", "a hole or an overlap"),
    ({"a": tensor(end=4)}, b"0" * 4, "bad_safetensors", "does not take the 4 bytes"),
    ({"a": tensor(8, 0)}, b"0" * 8, "bad_safetensors", "does not take the -8 bytes"),
    ({"a": tensor(dtype="F99")}, b"0" * 8, "bad_safetensors", "unknown dtype F99"),
    ({"a": tensor(shape=(-2,))}, b"0" * 8, "bad_safetensors", "no dtype, shape and data_offsets"),
    ({"a": tensor(shape=(True, 2))}, b"0" * 8, "bad_safetensors", "no dtype, shape and data_offsets"),
    ({"a": {"dtype": "F32"}}, b"", "bad_safetensors", "no dtype, shape and data_offsets"),
    ({"a": 3}, b"", "bad_safetensors", "no dtype, shape and data_offsets"),
    ([1, 2], b"", "bad_safetensors", "no JSON object"),
]


@pytest.mark.parametrize(("header", "data", "code", "message"), MALFORMED)
def test_each_way_to_be_malformed_has_its_error(header, data, code, message, tmp_path):
    with pytest.raises(Rejected) as caught:
        read_header(write(tmp_path, header, data))
    assert (caught.value.code, caught.value.location) == (code, "x.safetensors")
    assert message in caught.value.message


@pytest.mark.parametrize("raw", [b"{" * 5000, b'{"a": 1', b"\xff\xfe{}", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(raw, tmp_path):
    with pytest.raises(Rejected, match="the header is no JSON object"):
        read_header(write(tmp_path, None, raw=raw))


HUGE = 10**4300 - 1
LIES = {
    "a place with more digits than Python writes": {"a": tensor(HUGE, HUGE, (0,))},
    "a size with more digits than Python writes": {"a": tensor(0, HUGE, (HUGE,), "I8")},
    "a dimension above 63 bits": {"a": tensor(0, 0, (0, 2**63))},
    "thousands of dimensions": {"a": tensor(0, 8, [10**4000] * 5000)},
    "a dtype of a megabyte": {"a": tensor(dtype="F" * 1_000_000)},
    "a name of a megabyte": {"a" * 1_000_000: tensor()},
    "a name that comes again, the last of very many": None,
}


@pytest.mark.parametrize("what", LIES)
def test_lies_of_any_size_are_refused_at_once_and_in_few_words(what, tmp_path):
    again = b"{%s}" % b",".join(b'"%d":1' % number for number in (*range(200_000), 199_999))
    file = write(tmp_path, LIES[what], b"0" * 4, raw=again if LIES[what] is None else None)
    began = time.thread_time()
    with pytest.raises(Rejected) as caught:
        read_header(file)
    assert time.thread_time() - began < 20  # some took hours, and held the interpreter all the while
    assert caught.value.code in {"bad_safetensors", "truncated"}
    assert len(str(caught.value)) < 5000


def test_a_header_that_would_stop_the_interpreter_is_refused_unread(tmp_path):
    with pytest.raises(Rejected, match="a header of 4194305 bytes"):
        read_header(write(tmp_path, None, raw=b" " * (4 << 20) + b"{"))
    with pytest.raises(Rejected, match="the header is no JSON object"):
        read_header(write(tmp_path, None, raw=b" " * ((4 << 20) - 1) + b"{"))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_or_read(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    file.write_bytes(data)
    try:
        read_header(file)
    except Rejected:
        return


def test_a_file_that_shrinks_between_header_and_tensor_is_refused(tmp_path):
    file = write(tmp_path, {"a": tensor()}, b"12345678")
    with Reader(file) as reader:
        os.truncate(file, file.stat().st_size - 3)
        with pytest.raises(Rejected, match="8 bytes expected, 5 found") as caught:
            list(reader.read(reader.entries["a"], 2))
    assert caught.value.location == "x.safetensors: a"


@pytest.mark.parametrize("chunk", [1, 8, 24, 1 << 20])
def test_a_file_is_read_once_in_pieces_and_hashed_on_the_way(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(safetensors, "CHUNK", chunk)
    tensors = {"b": torch.randn(5, 3), "a": torch.arange(7).half(), "none": torch.zeros(0, 4)}
    file = tmp_path / "x.safetensors"
    file.write_bytes(save(tensors))
    with Reader(file) as reader:
        for name, entry in reader.entries.items():
            pieces = [(first, data.copy()) for first, data in reader.read(entry, entry.shape[0])]
            assert [first for first, _ in pieces] == sorted({first for first, _ in pieces})
            assert b"".join(data.tobytes() for _, data in pieces) == tensors[name].numpy().tobytes()
        assert reader.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()


def test_neighbours_are_read_and_hashed_in_one_go(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK", 1 << 20)
    tensors = {f"a{n:02}": torch.randn(80, 64) for n in range(100)}  # 2 MB, 20 KB each
    file, reads, real = tmp_path / "x.safetensors", [], os.readv
    file.write_bytes(save(tensors))
    monkeypatch.setattr(os, "readv", lambda *given: reads.append(real(*given)) or reads[-1])
    between = []
    with Reader(file, lambda: between.append(len(reads))) as reader:
        for name, entry in reader.entries.items():
            pieces = [data.copy() for _, data in reader.read(entry, 80)]
            assert b"".join(pieces) == tensors[name].numpy().tobytes()
        assert reader.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()
    assert between == [2, 3], "before each piece"
    assert sum(reads) == file.stat().st_size
    assert len(reads) == 4, "the length of the header, the header, and two pieces"


def test_numbers_lie_whole_in_memory_wherever_they_lie_in_the_file(tmp_path):
    header = {"a": tensor(0, 3, (3,), "I8"), "b": tensor(3, 11), "c": tensor(11, 15, (2,), "BF16"), "d": tensor(15, 23)}
    file = write(tmp_path, header, bytes(range(23)))
    with Reader(file) as reader:
        found = {name: list(reader.read(entry, entry.shape[0])) for name, entry in reader.entries.items()}
        assert b"".join(data.tobytes() for pieces in found.values() for _, data in pieces) == bytes(range(23))
        for name, size in (("b", 4), ("c", 2), ("d", 4)):
            assert [data.ctypes.data % size for _, data in found[name]] == [0]


def test_a_piece_is_hashed_while_the_next_one_is_read_and_no_longer_used_then(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK", 1 << 20)
    file, told = tmp_path / "x.safetensors", threading.Event()
    file.write_bytes(save({"a": torch.randn(5 << 18)}))
    with Reader(file) as reader:
        digest, waited = reader._digest._digest, []

        class Slow:
            hexdigest = digest.hexdigest

            def update(self, piece):
                waited.append(told.wait(30))  # until the next piece is there
                digest.update(piece)

        monkeypatch.setattr(reader._digest, "_digest", Slow())
        for number, _ in enumerate(reader.read(reader.entries["a"], 5 << 18)):
            if number == 1:
                told.set()
        assert reader.sha256() == hashlib.sha256(file.read_bytes()).hexdigest()
    assert waited == [True] * 5


def test_a_reader_that_is_left_early_leaves_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK", 1 << 20)
    file, before = tmp_path / "x.safetensors", set(threading.enumerate())
    file.write_bytes(save({"a": torch.zeros(5 << 18)}))
    with pytest.raises(KeyError), Reader(file) as reader:
        for _ in reader.read(reader.entries["a"], 5 << 18):
            raise KeyError
    assert set(threading.enumerate()) <= before  # others may have ended


def test_a_header_is_parsed_once_for_a_file_until_its_text_or_its_size_changes(tmp_path, monkeypatch):
    parsed, real = [], json.loads
    monkeypatch.setattr(safetensors.json, "loads", lambda *given, **how: parsed.append(1) or real(*given, **how))
    file = tmp_path / "x.safetensors"
    file.write_bytes(save({"a": torch.zeros(3)}))
    known = read_header(file)
    known.pop("a")  # whoever asks has a table of its own
    assert list(read_header(file)) == ["a"]
    assert len(parsed) == 1
    file.write_bytes(save({"b": torch.zeros(3)}))
    assert list(read_header(file)) == ["b"]
    with file.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(Rejected, match="followed by 4 bytes"):
        read_header(file)
