import json

import pytest
from starlette.exceptions import HTTPException

from app import errors as tree
from app.api import errors


class NewRefusal(tree.QueueFull):
    code = "brand_new"


class NewInvalid(tree.InvalidRequest):
    code = "brand_new"


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (tree.InvalidRequest("x"), 422, "invalid"),
        (NewInvalid("x"), 422, "invalid"),
        (errors.MalformedBody("x"), 400, "invalid"),
        (errors.BodyTooLarge("x"), 413, "invalid"),
        (tree.QueueFull("x"), 503, "refused"),
        (NewRefusal("x"), 503, "refused"),
        (tree.Draining("x"), 503, "refused"),
        (tree.NotReady("x"), 503, "refused"),
        (tree.DeadlineTooShort("x"), 503, "refused"),
        (tree.Expired("x"), 504, "expired"),
        (tree.Underfilled("x"), 503, "underfilled"),
        (tree.Cancelled("x"), 499, "cancelled"),
        (tree.ModelOutput("x"), 503, "failed"),
        (tree.Fault("x"), 500, "failed"),
        (tree.Rejected("code", "x"), 500, "failed"),
        (ValueError("x"), 500, "failed"),
    ],
)
def test_a_class_has_the_status_of_its_nearest_ancestor(error, status, outcome):
    assert errors.status_of(error) == status
    assert errors.outcome_of(error) == outcome


def test_a_refusal_says_when_to_come_back_and_a_fault_says_nothing():
    reply = errors.reply(tree.QueueFull("full", retry_after_s=3))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
    assert json.loads(reply.body) == {"error": {"code": "queue_full", "message": "full", "retryable": True}}
    assert "retry-after" not in errors.reply(tree.QueueFull("full", retry_after_s=None)).headers
    assert b"secret" not in errors.reply(tree.Fault("secret", path="secret")).body


def test_a_long_message_is_cut():
    body = json.loads(errors.reply(tree.InvalidRequest("m" * 9999, path="$." + "p" * 9999)).body)["error"]
    assert len(body["message"]) == len(body["path"]) == errors.MAX_TEXT + 3


def test_errors_of_others_join_the_tree():
    assert isinstance(errors.known(HTTPException(404)), errors.NotFound)
    assert isinstance(errors.known(HTTPException(405)), errors.MethodNotAllowed)
    cause = KeyError("x")
    assert errors.known(cause).__cause__ is cause
    assert isinstance(errors.known(cause), tree.Fault)
