import pytest

from app.api.media import JSON, MSGPACK, answer_media, body_media, header


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/json", JSON),
        ("APPLICATION/JSON", JSON),
        ("text/html, application/*;q=0.9", JSON),
        ("application/msgpack", MSGPACK),
        ("application/x-msgpack", MSGPACK),
        ("application/msgpack, */*", MSGPACK),
        ("application/msgpack;q=0.1, */*", JSON),
        ("application/json, application/msgpack", JSON),
        ("application/json;q=0.5, application/msgpack", MSGPACK),
        ("application/json;q=0, */*", MSGPACK),
        ("text/html", None),
        ("application/json;q=0", None),
        ("application/json;q=x", None),
        (",;,", None),
        (("*/*," * 600)[:2047], JSON),
        ("*/*," * 600, None),
    ],
)
def test_the_answer_follows_accept(accept, media):
    assert answer_media(accept) == media


@pytest.mark.parametrize(
    ("content_type", "media"),
    [
        ("", JSON),
        ("application/json", JSON),
        ("Application/Json; charset=UTF-8", JSON),
        ('application/json; charset="utf-8"', JSON),
        ("application/json; charset=utf-16", None),
        ("application/json" + ";" * 2100, None),
        ("application/msgpack", MSGPACK),
        ("application/vnd.msgpack", MSGPACK),
        ("application/json, application/msgpack", None),
        ("text/plain", None),
        ("*/*", None),
    ],
)
def test_the_body_is_what_content_type_says(content_type, media):
    assert body_media(content_type) == media


def test_a_repeated_header_is_joined():
    assert header([(b"accept", b"a"), (b"x", b"y"), (b"accept", b"b")], b"accept") == "a,b"
    assert header([], b"accept") == ""
