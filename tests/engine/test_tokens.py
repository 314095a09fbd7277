import json

import numpy as np
import pytest

from app.config import SidConfig
from app.engine.tokens import sid_tokens
from app.errors import Rejected

SIZES = (3, 4)


def resolve(directory, vocabulary=50, **sid):
    return [ids.tolist() for ids in sid_tokens(SidConfig(sizes=SIZES, **sid), directory, vocabulary)]


def write(directory, **files):
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


def added(**tokens):
    return [{"id": token, "content": f"<{name}>", "special": False} for name, token in tokens.items()]


def test_contiguous_blocks(tmp_path):
    assert resolve(tmp_path, token_base=(7, 20)) == [[7, 8, 9], [20, 21, 22, 23]]
    assert resolve(tmp_path, token_base=(7, 7)) == [[7, 8, 9], [7, 8, 9, 10]], "steps may share one codebook's tokens"


def test_codes_in_use_sorted_as_text(tmp_path):
    """MiniOneRec adds the sorted texts of the codes in use: <a_10>, <a_1>, <a_2>."""
    used = [*sorted(f"<a_{code}>" for code in (1, 2, 10)), "<b_0>"]
    write(tmp_path, tokenizer={"added_tokens": [{"id": 30 + i, "content": text} for i, text in enumerate(used)]})
    ids = sid_tokens(SidConfig(sizes=(11, 2), tokens="<{level}_{code}>"), tmp_path, 50)
    assert np.flatnonzero(ids[0] >= 0).tolist() == [1, 2, 10]
    assert ids[0][[1, 2, 10]].tolist() == [31, 32, 30]
    assert ids[1].tolist() == [33, -1]


PLACES = {
    "added tokens": {"tokenizer": {"added_tokens": added(a_0=4, a_2=6, b_3=9)}},
    "vocabulary": {"tokenizer": {"model": {"vocab": {"<a_0>": 4, "<a_2>": 6, "<b_3>": 9, "x": 1}}}},
    "unigram": {
        "tokenizer": {
            "model": {
                "vocab": [[text, -1.0] for text in "pqrs"]
                + [["<a_0>", 0.0], ["z", 0.0], ["<a_2>", 0.0], ["y", 0.0], ["w", 0.0], ["<b_3>", 0.0]]
            }
        }
    },
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {str(e["id"]): e for e in added(a_0=4, a_2=6, b_3=9)}}},
    "old added tokens": {"added_tokens": {"<a_0>": 4, "<a_2>": 6, "<b_3>": 9}},
    "plain vocabulary": {"vocab": {"<a_0>": 4, "<a_2>": 6, "<b_3>": 9}},
    "several files": {"tokenizer": {"added_tokens": added(a_0=4, a_2=6)}, "added_tokens": {"<b_3>": 9, "<a_0>": 4}},
}


@pytest.mark.parametrize("files", PLACES.values(), ids=PLACES)
def test_a_pattern_is_found_in_every_kind_of_tokenizer_file(files, tmp_path):
    write(tmp_path, **files)
    assert resolve(tmp_path, tokens="<{level}_{code}>") == [[4, -1, 6], [-1, -1, -1, 9]]


def test_a_pattern_without_a_level_names_one_codebook(tmp_path):
    write(tmp_path, added_tokens={f"<c{code}>": 10 + code for code in range(4)})
    assert resolve(tmp_path, tokens="<c{code}>") == [[10, 11, 12], [10, 11, 12, 13]]


def test_ids_from_a_file(tmp_path):
    write(tmp_path, sid_tokens=[[5, -1, 9], [-1, 3, 2, 1]])
    assert resolve(tmp_path, tokens="file") == [[5, -1, 9], [-1, 3, 2, 1]]


FILE = "sid_tokens.json"
BASE = "deployment.toml: sid.token_base"
PATTERN = "deployment.toml: sid.tokens"
FAULTS = [
    ({}, {}, "tokens_not_named", "deployment.toml: sid", "needs `token_base` or `tokens`"),
    ({}, {"token_base": (7, 48)}, "token_out_of_range", BASE, "step 2, code 2: token 50 is outside"),
    ({}, {"tokens": "file"}, "unreadable", FILE, "No such file"),
    ({"sid_tokens": [[1, 2, 3]]}, {"tokens": "file"}, "bad_tokens", FILE, "a list of 2 lists"),
    ({"sid_tokens": [[1, 2, 3], [1, 2]]}, {"tokens": "file"}, "bad_tokens", FILE, "step 2: 4 ids expected, 2 entries"),
    ({"sid_tokens": [[1, 2, 3], 7]}, {"tokens": "file"}, "bad_tokens", FILE, "step 2: 4 ids expected, no list found"),
    ({"sid_tokens": [[1, True, 3], [1, 2, 3, 4]]}, {"tokens": "file"}, "bad_tokens", FILE, "code 1: True is no token"),
    ({"sid_tokens": [[1, -2, 3], [1, 2, 3, 4]]}, {"tokens": "file"}, "bad_tokens", FILE, "code 1: -2 is no token"),
    ({"sid_tokens": [[1, 2, 1], [1, 2, 3, 4]]}, {"tokens": "file"}, "duplicate_token", FILE, "codes 0 and 2 share"),
    ({"sid_tokens": [[1, 2, 3], [-1] * 4]}, {"tokens": "file"}, "no_tokens", FILE, "no code of step 2"),
    ({"sid_tokens": [[1, 2, 50], [1, 2, 3, 4]]}, {"tokens": "file"}, "token_out_of_range", FILE, "code 2: token 50"),
    ({}, {"tokens": "<{level}>"}, "bad_pattern", PATTERN, "must name {code}"),
    ({}, {"tokens": "<{code.__class__}_{code}>"}, "bad_pattern", PATTERN, "nothing else in braces"),
    ({}, {"tokens": "<{level}_{code}>"}, "no_tokens", PATTERN, "none of `<a_0>` to `<a_2>` is a token (no tokenizer"),
    (PLACES["added tokens"], {"tokens": "{level}{code}"}, "no_tokens", PATTERN, "(tokenizer.json read)"),
    ({"added_tokens": {"<a_0>": 1, "<a_1>": 1, "<b_0>": 2}}, {"tokens": "<{level}_{code}>"}, "duplicate_token", PATTERN,
     "step 1: codes 0 and 1 share token 1"),
    ({"added_tokens": {"<a_0>": "x", "<b_0>": 2}}, {"tokens": "<{level}_{code}>"}, "bad_tokens", "added_tokens.json",
     "`<a_0>` has no token id but 'x'"),
    ({"added_tokens": {"<a_0>": 1, "<b_0>": 2}, "vocab": {"<a_0>": 3}}, {"tokens": "<{level}_{code}>"},
     "duplicate_token", "vocab.json", "`<a_0>` is token 3 here and 1 in added_tokens.json"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "sid", "code", "location", "message"), FAULTS)
def test_a_wrong_naming_is_refused_with_its_place(files, sid, code, location, message, tmp_path):
    write(tmp_path, **files)
    with pytest.raises(Rejected) as caught:
        resolve(tmp_path, **sid)
    assert (caught.value.code, caught.value.location) == (code, location)
    assert message in caught.value.message


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udcff"])
def test_a_tokenizer_file_that_is_no_json_is_refused(text, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Rejected) as caught:
        resolve(tmp_path, tokens="<{level}_{code}>")
    assert (caught.value.code, caught.value.location) == ("bad_json", "tokenizer.json")


@pytest.mark.parametrize(
    "value", [[], 3, {"model": []}, {"model": {"vocab": 3}}, {"added_tokens": {"a": 1}}, {"added_tokens": [3]}]
)
def test_tokenizer_files_of_another_form_give_nothing(value, tmp_path):
    write(tmp_path, tokenizer=value, tokenizer_config=value, added_tokens={"<a_0>": 1, "<b_0>": 2})
    assert resolve(tmp_path, tokens="<{level}_{code}>") == [[1, -1, -1], [2, -1, -1, -1]]
