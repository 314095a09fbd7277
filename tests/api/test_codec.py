import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api import media
from app.api.codec import decoders
from app.api.errors import MalformedBody
from app.api.wire import body_type
from app.config import Limits
from app.errors import InvalidRequest
from tests.api.support import GOLDEN

DECODERS = decoders(body_type(Limits(k=100)))
KINDS = {"json": media.JSON, "msgpack": media.MSGPACK}
TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from([":", '":', '\\":"', "{:}", "\\u003a"])


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_a_body_comes_through_unchanged(kind):
    given_ = {**GOLDEN, "exclude": [":", '"'], "ctx": {"a:b": "c:d"}, "user": {"x": 1.0}, "seed": 2**63 - 1}
    body = DECODERS[kind].decode(media.ENCODE[kind](given_))
    assert msgspec.to_builtins(body) == given_ | {
        "context": {"history": ("a", "b")}, "exclude": (":", '"')
    }  # fmt: skip


def test_an_error_names_the_place(kind):
    for value, path in (
        ({**GOLDEN, "k": "3"}, "$.k"),
        ({**GOLDEN, "context": {"history": ["a", 1]}}, "$.context.history[1]"),
        ({**GOLDEN, "context": {"histori": []}}, "$.context.histori"),
        ({"context": {"history": []}}, "$.k"),
        ({**GOLDEN, "user": {"a": 1, "b": "2"}}, "$.user.b"),
        ({**GOLDEN, "user": {"a": 1, "": 2}}, "$.user"),
        ({**GOLDEN, "user": {"a": True}, "ctx": 3}, "$.user.a"),
        ({**GOLDEN, "ctx": {"a": "x", "b": "x" * 5000}}, "$.ctx.b"),
        ({**GOLDEN, "ctx": {"a": "x", "b": None}}, "$.ctx.b"),
        ([], "$"),
    ):
        with pytest.raises(InvalidRequest) as found:
            DECODERS[kind].decode(media.ENCODE[kind](value))
        assert type(found.value) is InvalidRequest
        assert found.value.path == path


def test_what_is_not_the_codec_is_malformed_even_where_a_type_is_wrong_first(kind):
    for value in (GOLDEN, {**GOLDEN, "k": "3"}):
        data = media.ENCODE[kind](value)
        with pytest.raises(MalformedBody):
            DECODERS[kind].decode(data[:-1])
        with pytest.raises(MalformedBody):
            DECODERS[kind].decode(data + b"\x01")


class Pairs(list):
    """An object of a JSON text with all its pairs."""


def has_duplicates(value) -> bool:
    if isinstance(value, Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(has_duplicates(inner) for _, inner in value)
    return isinstance(value, list) and any(has_duplicates(inner) for inner in value)


def dump(value, colon: str) -> str:
    """JSON text of nested Pairs, duplicates and all; some colons of strings escaped."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(k, colon)} : {dump(v, colon)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(dump(inner, colon) for inner in value) + "]"
    return json.dumps(value).replace(":", colon) if isinstance(value, str) else json.dumps(value)


def pack(value) -> bytes:
    """msgpack bytes of nested Pairs, duplicates and all."""
    if isinstance(value, Pairs):
        return b"\xde" + len(value).to_bytes(2, "big") + b"".join(pack(k) + pack(v) for k, v in value)
    if isinstance(value, list):
        return b"\xdc" + len(value).to_bytes(2, "big") + b"".join(map(pack, value))
    return msgspec.msgpack.encode(value)


FACTS = st.lists(st.tuples(TEXT.filter(bool), TEXT), max_size=3).map(Pairs)
NUMBERS = st.lists(st.tuples(TEXT.filter(bool), st.floats(-9, 9)), max_size=3).map(Pairs)
CONTEXTS = st.lists(TEXT.filter(bool), max_size=3).map(lambda ids: Pairs([("history", ids)]))
FIELDS = st.one_of(
    st.tuples(st.just("context"), CONTEXTS),
    st.tuples(st.just("k"), st.integers(1, 9)),
    st.tuples(st.just("ctx"), FACTS),
    st.tuples(st.just("user"), NUMBERS),
    st.tuples(st.just("exclude"), st.lists(TEXT.filter(bool), max_size=2)),
    st.tuples(st.just("user_id"), TEXT.filter(bool)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FIELDS, max_size=3), CONTEXTS, st.sampled_from([":", "\\u003a"]))
def test_a_key_that_comes_twice_is_refused_and_nothing_else_is(fields, context, colon):
    body = Pairs([("context", context), ("k", 1), *fields])
    for kind, data in ((media.JSON, dump(body, colon).encode()), (media.MSGPACK, pack(body))):
        if has_duplicates(body):
            with pytest.raises(InvalidRequest, match="same key twice"):
                DECODERS[kind].decode(data)
        else:
            DECODERS[kind].decode(data)


def test_a_key_twice_in_embeddings_is_found():
    tensor = Pairs([("dtype", "f32"), ("shape", [1]), ("data", b"\0\0\0\0")])
    for bad in (
        Pairs([("a", tensor), ("a", tensor)]),
        Pairs([("a", Pairs([*tensor, ("dtype", "f32")]))]),
    ):
        data = pack(Pairs([("context", Pairs([("embeddings", bad)])), ("k", 1)]))
        with pytest.raises(InvalidRequest, match="same key twice"):
            DECODERS[media.MSGPACK].decode(data)
