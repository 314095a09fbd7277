"""deployment.toml: defaults, and faults with their lines."""

import os
from pathlib import Path

import pytest

from app.config import (
    MAX_DEPLOYMENT,
    NO_FIELDS,
    Attribute,
    Deployment,
    Limits,
    Load,
    Log,
    Prior,
    RequestFields,
    Server,
    SidConfig,
    Unread,
    UserField,
    decode,
    parse,
    read_overlay,
    read_small,
)
from app.errors import BadDeployment

GOOD = 'family = "onerec"\n[sid]\nsizes = [64, 64, 64]\n'


def test_everything_but_family_and_sizes_has_a_default():
    deployment = parse(GOOD)
    assert deployment.limits.widths == (512, 512, 512)
    assert deployment.server.port == 8000
    assert deployment.precision == "auto"


def test_the_override_may_stand_under_limits():
    assert parse(GOOD + "[limits]\npolicy_override = true\n").server.policy_override


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 0, "family"),
        ('family = "onerec"\n', 0, "sid"),
        (GOOD + "beam_widht = 64\n", 4, "beam_widht"),
        (GOOD + "[limits]\nrows = 0\n", 5, "rows"),
        (GOOD + "[parallel]\ntp = 2\n", 5, "tp"),
        (GOOD + "[limits]\nrows = 1.5\n", 5, "int"),
        (GOOD + "[limits]\nrows = true\n", 5, "int"),
        (GOOD + '[limits]\nrows = "64"\n', 5, "int"),
        (GOOD + "[limits]\nwidths = [1, 2]\n", 5, "widths"),
        (GOOD + "[limits]\nwidths = [1, 2, 99999]\n", 5, "99999"),
        (GOOD + "[limits]\nrows = 100\n", 5, "512"),
        (GOOD + "[server]\nport = 99999\n", 5, "65535"),
        (GOOD + "[server]\npolicy_override = true\n[limits]\npolicy_override = true\n", 7, "policy_override"),
        (GOOD + "[sid]\n", 4, "sid"),
        (GOOD + "[nosuch]\na = 1\n", 4, "nosuch"),
        ('family = "onerec"\n[sid]\nsizes = []\n', 3, "sizes"),
        ('family = "onerec"\n[sid]\nsizes = [0]\n', 3, "1"),
        ('family = "qwen3"\n[sid]\nsizes = [4, 4]\ntoken_base = [1]\n', 4, "token_base"),
        ('family = "qwen3"\n[sid]\nsizes = [4, 4]\ntoken_base = [1, 2]\ntokens = "file"\n', 5, "tokens"),
        ("family = \n", 1, "Invalid"),
        (GOOD + '[attributes]\na = {of = "y", as = "max"}\nb = {of = "y", as = "mode"}\n', 6, "attributes.b.as"),
        (GOOD + '[attributes]\na = {of = "y"}\n', 5, "`as`"),
        (GOOD + '[attributes.a]\nas = "max"\nof = 3\n', 6, "str"),
        (GOOD + '[attributes]\na = {of = "y", as = "mean", most = 3}\n', 5, "what `share` and `any` count"),
        (GOOD + '[attributes]\na = {of = "y", as = "any", default = 3}\n', 5, "`default` is for max"),
        (GOOD + '[attributes]\na = {of = "y", as = "max", default = nan}\n', 5, "float"),
        (GOOD + '[attributes]\na = {of = "y", as = "max", from = 4}\n', 5, "step 4 of 3"),
        (GOOD + '[attributes]\n"a b" = {of = "y", as = "max"}\n', 4, "A-Za-z"),
        (GOOD + '[priors]\na = {of = "y", per = "step"}\n', 5, "priors.a.per"),
        (GOOD + '[lists]\na = {of = "y", is = "x", least = 1}\n', 5, "`is` is for texts"),
        (GOOD + '[lists]\na = {of = "y"}\nb = {of = "y", least = 2, most = 1}\n', 6, "between 2 and 1"),
        ('precision = "int3"\n' + GOOD, 1, "int3"),
    ],
)
def test_a_fault_has_its_line(text, line, word):
    with pytest.raises(BadDeployment) as bad:
        parse(text, "deployment.toml")
    assert bad.value.line == line, str(bad.value)
    assert word in bad.value.message
    assert str(bad.value).startswith("deployment.toml")


def test_a_deployment_is_frozen():
    with pytest.raises(AttributeError):
        parse(GOOD).family = "x"  # type: ignore[misc]
    assert isinstance(parse(GOOD), Deployment)


def test_records_are_off_users_are_hashed_and_testers_force_nothing_unless_the_file_says_so():
    plain = parse(GOOD)
    assert (plain.log.requests, plain.log.exposures, plain.log.units, plain.log.unit_salt) == (0.0, True, "hashed", "")
    assert plain.server.arm_override is False
    loud = parse(GOOD + '[log]\nrequests = 0.01\nunits = "plain"\n[server]\narm_override = true\n')
    assert (loud.log.requests, loud.log.units, loud.server.arm_override) == (0.01, "plain", True)
    lines = GOOD.count("\n")
    for text, word in (("requests = 1.5", "1.0"), ('units = "md5"', "md5"), ("exposures = 1", "bool")):
        with pytest.raises(BadDeployment) as bad:
            parse(GOOD + f"[log]\n{text}\n")
        assert bad.value.line == lines + 2
        assert word in bad.value.message


REQUEST = """\
[request.user]
age = {default = 3, low = 0, high = 10}
taste = {}
[request.ctx]
country = ["BR"]
device = []
"""


def test_fields_of_requests_are_declared_with_defaults_ranges_and_texts():
    found = parse(GOOD + REQUEST).request
    assert found.user == {"age": UserField(default=3.0, low=0.0, high=10.0), "taste": UserField()}
    assert found.ctx == {"country": ("BR",), "device": ()}
    assert parse(GOOD).request == NO_FIELDS


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("low = 0", "low = 11", 2, "`low` 11 above `high` 10"),
        ("default = 3", "default = 11", 2, "the default 11 outside 0 to 10"),
        ("default = 3", "default = nan", 1, ">= -1e+30"),
        ("high = 10", "high = inf", 1, "<= 1e+30"),
        ("taste", '"no name"', 0, "matching regex"),
        ("[]", "[1]", 4, "Expected `str`"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused_with_its_line(old, new, line, words):
    with pytest.raises(BadDeployment) as bad:
        parse(GOOD + REQUEST.replace(old, new, 1))
    assert words in bad.value.message
    assert bad.value.line >= GOOD.count("\n") + line if line else True


@pytest.mark.parametrize(
    ("table", "line", "place"),
    [
        ("[request.user]\nage = {}\ndays = {deflt = 1}\n", 3, "$.request.user.days"),
        ("[request.user.days]\nlow = 0\nhigh = nan\n", 3, "$.request.user.days.high"),
        ("[request]\nuser = {days = {default = '1'}}\n", 2, "$.request.user.days.default"),
        ("[request.ctx]\na = []\ncountry = ['BR', 1]\n", 3, "$.request.ctx.country[1]"),
        ("[lists]\na = {of = 'x'}\nb-c = {of = 'x'}\n", 3, "$.lists.b-c"),
        ('[lists]\n"b\\n" = {of = "x"}\n', 1, "$.lists.b\n"),
    ],
)
def test_a_fault_inside_an_entry_is_named_with_the_entry_and_its_line(table, line, place):
    with pytest.raises(BadDeployment) as bad:
        parse(GOOD + table)
    assert f"({place})" in bad.value.message
    assert bad.value.line == GOOD.count("\n") + line


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('familly = "onerec"\n' + GOOD, 1, "unknown key `familly`; did you mean `family`?"),
        ("port = 1\n" + GOOD, 1, "unknown key `port`; did you mean `port` under [server]?"),
        (GOOD + "[sever]\nport = 1\n", 4, "unknown key `sever`; did you mean `server`?"),
        (GOOD + "[limits]\nk = 3\nwidht = [3]\n", 6, "unknown key `widht`; did you mean `widths`? ($.limits)"),
        (GOOD + "[parallel]\nqqq = 3\n", 5, "unknown key `qqq`; known: `tp` ($.parallel)"),
        (GOOD + "[request.user]\na = {lo = 3}\n", 5, "unknown key `lo`; did you mean `low`? ($.request.user.a)"),
        (GOOD + '[lists]\na = {of = "x", mots = 3}\n', 5, "unknown key `mots`; did you mean `most`? ($.lists.a)"),
        ('device = "gpu"\n' + GOOD, 1, "'gpu' is none of `auto`, `cpu`, `cuda` ($.device)"),
        ('precision = "float23"\n' + GOOD, 1, "did you mean `float32`? ($.precision)"),
        (GOOD + '[server]\nadmin_auth = "tokens"\n', 5, "none of `none`, `token`; did you mean `token`?"),
        (GOOD + '[attributes]\na = {of = "y", as = "maxi"}\n', 5, "did you mean `max`? ($.attributes.a.as)"),
        (GOOD + '[log]\nunits = "md5"\n', 5, "'md5' is none of `hashed`, `plain` ($.log.units)"),
        (GOOD + "[parallel]\ntp = 2\n", 5, "2 is none of `1` ($.parallel.tp)"),
    ],
)
def test_an_unknown_key_or_value_comes_with_the_nearest_one(text, line, said):
    with pytest.raises(BadDeployment) as bad:
        parse(text)
    assert said in bad.value.message
    assert bad.value.line == line


def test_load_thresholds_have_defaults_and_must_be_in_order():
    assert parse(GOOD).load == Load(busy=1.0, quiet=0.1, window_s=1.0, hold_s=30.0)
    for text, words in (
        ("quiet = 1", "`quiet` 1 is not below `busy` 1"),
        ("hold_s = 0.5", ">= 1.0"),
        ("busy = nan", "> 0"),
        ("window = 3", "unknown key `window`; did you mean `window_s`?"),
    ):
        with pytest.raises(BadDeployment) as bad:
            parse(GOOD + f"[load]\n{text}\n")
        assert words in bad.value.message
        assert bad.value.line >= GOOD.count("\n") + 1


def test_every_key_is_on_the_page():
    page = (Path(__file__).parent.parent / "docs" / "deployment.md").read_text()
    keys = [key for part in (SidConfig, Limits, Server, Log, RequestFields, Load) for key in part.__struct_fields__]
    keys += [key for part in (Attribute, Prior) for key in part.__struct_encode_fields__]
    assert [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, GOOD + "[limits]\nk = " + "9" * 5000])
def test_what_python_cannot_read_is_the_files_fault(text):
    with pytest.raises(BadDeployment):
        parse(text)


def test_a_fifo_is_no_file_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "deployment.toml")
    with pytest.raises(OSError, match="no regular file"):
        read_small(tmp_path / "deployment.toml", 10)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_small(tmp_path / "file", 4) == b"0123"


def test_an_overlay_is_read_whole_or_not_at_all(tmp_path):
    """One that was cut could be a good one that says something else."""
    file, text = tmp_path / "deployment.toml", b'family = "onerec"\n'
    file.write_bytes(text + b"#" * (MAX_DEPLOYMENT - len(text)))
    assert read_overlay(tmp_path) == file.read_bytes()
    file.write_bytes(text + b"#\n" * MAX_DEPLOYMENT)
    found = read_overlay(tmp_path)
    assert found == Unread("bad_deployment", "has more than 1048576 bytes")
    with pytest.raises(BadDeployment, match="has more than"):
        decode(found)
    file.unlink()
    assert read_overlay(tmp_path) == Unread("bad_deployment", "cannot be read: No such file or directory")


def test_what_is_no_file_is_refused_and_closed_again(tmp_path):
    """A folder under a file's name is looked at every few seconds, for as long as it lies there."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("folder", "pipe") * 10:
        with pytest.raises(OSError, match="is no regular file"):
            read_small(tmp_path / name, 9, tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
