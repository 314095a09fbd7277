import io
import json
import logging

import pytest

from app.runtime.logs import StdlibHandler, make_log


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_the_event_first():
    stream = io.BytesIO()
    make_log(stream).bind(snapshot="s").info("loaded", version="v1\nforged", shape=(1, 2), odd=object)
    assert stream.getvalue().count(b"\n") == 1
    (line,) = lines(stream)
    assert list(line) == ["at", "level", "event", "snapshot", "version", "shape", "odd"]
    assert (line["level"], line["event"], line["version"]) == ("info", "loaded", "v1\nforged")


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels_below_the_deployment_s_are_not_written(level, seen):
    stream = io.BytesIO()
    log = make_log(stream, level)
    for write in (log.debug, log.info, log.warning, log.error):
        write("event")
    assert len(lines(stream)) == seen


def test_an_error_carries_its_traceback_once():
    stream = io.BytesIO()
    try:
        int("no number")
    except ValueError as error:
        make_log(stream).error("failed", exc_info=error)
    assert lines(stream)[0]["exception"].count("ValueError: ") == 1


def test_records_of_other_libraries_become_lines():
    stream = io.BytesIO()
    logger = logging.getLogger("some.library")
    handler = StdlibHandler(make_log(stream))
    logger.addHandler(handler)
    try:
        logger.warning("odd %s", "thing")
        logger.error("bad", exc_info=KeyError("x"))
    finally:
        logger.removeHandler(handler)
    warning, error = lines(stream)
    assert (warning["level"], warning["logger"], warning["message"]) == ("warning", "some.library", "odd thing")
    assert error["level"] == "error"
    assert "KeyError" in error["exception"]
