"""Requests that no honest client sends, beside requests that one does."""

import asyncio
import gzip
import json

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.codec import decoders
from app.api.wire import body_type, to_request
from app.config import Limits
from app.errors import WidebeamError
from tests.api.support import GOLDEN, ask, connect, get, message, served

SECRET = "do-not-log-me"


def body(**changes: object) -> bytes:
    return json.dumps({**GOLDEN, "user_id": SECRET, **changes}).encode()


def history(value: object) -> bytes:
    return body(context={"history": value})


def text(raw: str) -> bytes:
    return f'{{"context": {{"history": ["{SECRET}"]}}, "k": 3, {raw}}}'.encode()


HOSTILE = {
    "history null": (422, "$.context.history", history(None)),
    "history of null": (422, "$.context.history[0]", history([None])),
    "history of numbers": (422, "$.context.history[1]", history(["a", 7])),
    "history of 20,000": (422, "$.context.history", history(["1"] * 20_000)),
    "empty id": (422, "$.context.history[0]", history([""])),
    "id of 513 bytes": (422, "$.context.history[1]", history(["a", "ä" * 257])),
    "no context": (422, "$.context", b'{"k": 1}'),
    "empty context": (422, "$.context", body(context={})),
    "two contexts": (422, "$.context", body(context={"history": ["a"], "tokens": [1]})),
    "token -1": (422, "$.context.tokens[0]", body(context={"tokens": [-1]})),
    "token 2^31": (422, "$.context.tokens[0]", body(context={"tokens": [2**31]})),
    "token of 5,000 digits": (422, "$.context.tokens[0]", b'{"k":1,"context":{"tokens":[' + b"9" * 5000 + b"]}}"),
    "embeddings in JSON": (
        422,
        "$.context.embeddings",
        body(context={"embeddings": {"a": {"dtype": "f32", "shape": [1], "data": "AAAAAA=="}}}),
    ),
    **{f"k {k}": (422, "$.k", body(k=k)) for k in (0, -1, 10**9, 101, 1.5, "5", True, None, 2**63, 2**64)},
    "seed -1": (422, "$.seed", body(seed=-1)),
    "seed 2^63": (422, "$.seed", body(seed=2**63)),
    "seed of 5,000 digits": (422, "$.seed", text(f'"seed": {"9" * 5000}')),
    "deadline 0": (422, "$.deadline_ms", body(deadline_ms=0)),
    "explain": (422, "$.explain", body(explain="yes")),
    "explain why": (422, "$.explain.why", body(explain={"why": ["a"] * 101})),
    "policy": (422, "$.policy", body(policy="other")),
    "user 1e999": (422, "$.user.a", text('"user": {"a": 1e999}')),
    "user true": (422, "$.user.a", body(user={"a": True})),
    "too many facts": (422, "$.ctx", body(ctx={str(n): "" for n in range(257)})),
    "unknown field": (422, "$.beam_widht", body(beam_widht=3)),
    "unknown field inside": (422, "$.context.beam_widht", body(context={"history": [], "beam_widht": 3})),
    "unknown field of 100,000 letters": (422, None, body(**{"x" * 100_000: 1})),
    "same key twice": (422, "$", text('"k": 4')),
    "same inner key twice": (422, "$", text('"user": {"a": 1, "a": 2}')),
    "array": (422, "$", b"[1]"),
    "number": (422, "$", b"17"),
    "NaN": (400, None, b"NaN"),
    "history of NaN": (400, None, b'{"k":1,"context":{"history":[NaN]}}'),
    "Infinity": (400, None, text('"user": {"a": Infinity}')),
    "open arrays": (400, None, b"[" * 20_000),
    "open objects": (400, None, b'{"context":' + b'{"a":' * 20_000),
    "nested arrays": (400, None, b"[" * 20_000 + b"]" * 20_000),
    "nested in history": (422, "$.context.history[0]", history([[[[[1]]]]])),
    "wrong and truncated": (400, None, b'{"k": "5", "context": {"history": ["a"'),
    "byte FF": (400, None, b'{"k":1,"context":{"history":["\xff"]}}'),
    "lone surrogate": (400, None, b'{"k":1,"context":{"history":["\\ud800"]}}'),
    "lone low surrogate": (400, None, b'{"k":1,"context":{"history":["\\udc00 and more text"]}}'),
    "truncated": (400, None, body()[:-3]),
    "trailing": (400, None, body() + b"x"),
    "BOM": (400, None, b"\xef\xbb\xbf" + body()),
    "UTF-16": (400, None, body().decode().encode("utf-16")),
    "empty": (400, None, b""),
    "spaces": (400, None, b"   "),
}

HEADERS = {
    "text": (415, {"content_type": "text/plain"}),
    "form": (415, {"content_type": "application/x-www-form-urlencoded"}),
    "Latin-1": (415, {"content_type": "application/json; charset=latin-1"}),
    "gzip": (415, {"content_encoding": "gzip"}),
    "two encodings": (415, {"content_encoding": "identity, gzip"}),
    "accept html": (406, {"accept": "text/html"}),
    "accept nothing": (406, {"accept": "application/json;q=0, application/msgpack;q=0"}),
}


@pytest.fixture(scope="module")
def answer_schema():
    from tests.api.test_openapi import document

    found = document()
    return {**found, "$ref": "#/components/schemas/ErrorBody"}


async def test_hostile_bodies_get_their_status_and_harm_nobody(answer_schema):
    golden = None
    async with served() as server:
        url = server.addresses.public
        for name, (status, path, data) in HOSTILE.items():
            rogue, *company = await asyncio.gather(ask(url, data), *(ask(url, GOLDEN) for _ in range(3)))
            assert rogue.status == status, (name, rogue)
            error = rogue.json()["error"]
            jsonschema.validate(rogue.json(), answer_schema)
            assert error["retryable"] is False, name
            if path is not None:
                assert error.get("path") == path, (name, error)
            assert len(rogue.body) < 2000, name
            for good in company:
                answer = good.json()
                del answer["request_id"]
                golden = golden or answer
                assert (good.status, answer) == (200, golden)
        assert (await get(url, "/livez")).status == 200
    log = server.log.getvalue()
    assert b"Traceback" not in log
    assert SECRET.encode() not in log
    assert b"xxxx" not in log
    assert len(server.front.admitted) == 3 * len(HOSTILE)


async def test_hostile_headers_get_their_status(answer_schema):
    async with served() as server:
        for name, (status, headers) in HEADERS.items():
            reply = await ask(server.addresses.public, body(), **headers)
            assert reply.status == status, (name, reply)
            jsonschema.validate(reply.json(), answer_schema)
        packed = await ask(server.addresses.public, gzip.compress(body()), content_encoding="gzip")
        plain = await ask(server.addresses.public, body(), content_type=None)
        spaced = await ask(server.addresses.public, body(), content_type="Application/JSON ; charset=UTF-8")
    assert (packed.status, plain.status, spaced.status) == (415, 200, 200)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\xc1", 400),
        (b"", 400),
        (b"\x80\x80", 400),
        (b"\x91" * 100_000, 400),
        (b"\xdf\xff\xff\xff\xff", 400),
        (b"\x81\xa7context\x81\xa7history\xdd\xff\xff\xff\xff", 400),
        (b"\x81\xa7context\x81\xa7history\x91\xa1\xff", 400),
        (msgspec.msgpack.encode({**GOLDEN, "user": {"a": float("nan")}}), 422),
        (msgspec.msgpack.encode({**GOLDEN, "user": {"a": float("-inf")}}), 422),
        (msgspec.msgpack.encode({**GOLDEN, "k": 3.0}), 422),
        (b"\x83" + msgspec.msgpack.encode(GOLDEN)[1:] + b"\xa1k\x04", 422),
    ],
)
async def test_hostile_msgpack_gets_its_status(data, status):
    async with served() as server:
        reply = await ask(server.addresses.public, data, content_type="application/msgpack")
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"


# ---- decoding never breaks -----------------------------------------------------------------------------------------

DECODERS = decoders(body_type(Limits(k=100)))
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("context", "k", "exclude", "ctx", "user", "seed", "deadline_ms", "explain", "request_id", "policy", "zzz")
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSONS, max_size=6).map(lambda extra: {**GOLDEN, **extra})


def survives(kind: str, data: bytes) -> None:
    try:
        to_request(DECODERS[kind].decode(data), request_id="r", received=0.0, deadline=None, override=True)
    except WidebeamError as error:
        assert error.code in {"invalid_request", "malformed_body"}


QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=200))
def test_no_bytes_break_the_decoders(kind, data):
    survives(kind, data)


@QUICK
@given(BODIES)
def test_no_value_in_a_field_breaks_the_decoders(value):
    survives("application/json", json.dumps(value).encode())
    try:
        packed = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError):  # integers above 64 bits and lone surrogates have no msgpack
        return
    survives("application/msgpack", packed)


@QUICK
@given(st.sampled_from(sorted(DECODERS)), st.data())
def test_no_mutation_of_a_good_body_breaks_the_decoders(kind, data):
    encode = msgspec.json.encode if kind == "application/json" else msgspec.msgpack.encode
    good = bytearray(encode({**GOLDEN, "user": {"a": 1.5}, "ctx": {"b": "c"}, "seed": 2**40, "exclude": ["ä"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set":
            good[place] = data.draw(st.integers(0, 255))
        elif change == "cut" and len(good) > 1:
            del good[place]
        else:
            good.insert(place, data.draw(st.integers(0, 255)))
    survives(kind, bytes(good))


async def test_requests_after_a_refused_one_use_the_same_connection():
    async with served() as server, connect(server.addresses.public) as client:
        for data, status in ((b"[", 400), (b'{"k": 1}', 422), (json.dumps(GOLDEN).encode(), 200)):
            client.writer.write(message(data))
            assert (await client.reply()).status == status
