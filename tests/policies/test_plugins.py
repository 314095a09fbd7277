"""Operators of other packages: what is read, what is refused and why, and what a wrong one cannot do."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, distributions

import numpy as np
import pytest
import torch

from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.choose import request_best
from app.policies.compile import check_policy, compile_policy
from app.policies.explain import explain, explain_text
from app.policies.load import Folder, compile_folder
from app.policies.operators import Arg, Operator, Operators
from app.policies.plugins import fault, installed, read
from app.policies.resolve import Library
from app.policies.schema import schema
from tests.policies.contracts import contract, sources

ON = contract((6, 6, 6), (8, 8, 8))


def bottom(logp, valid, n):
    """All but the n best: nothing built in does that."""
    order = torch.where(valid, logp, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (order >= n) | (valid.sum(dim=1, keepdim=True) <= n)


def bottom_definition(logp, n):
    return (np.arange(len(logp)) >= n) | (len(logp) <= n)


BOTTOM = Operator(
    "bottom",
    "keep",
    (Arg("n", "int", 0, 100, 1, param=True),),
    "all but the n best codes",
    torch=bottom,
    reference=bottom_definition,
)


def with_(operator: Operator) -> Operators:
    return Operators({**BUILT_IN.known, operator.name: replace(operator, source="widebeam-bottom")})


def compiled(operators: Operators, line: str = "bottom(1)", phase: str = "keep"):
    text = f"widebeam: 1\nsteps:\n  all:\n    normalize: valid\n    {phase}:\n      - {line}\n"
    return compile_policy("feed", Library(sources(text), operators), ON)


# ---- reading -------------------------------------------------------------------------------------------------------


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Puts a distribution with one module and one entry point on the path; returns what `read` makes of all of them."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(module: str, code: str, name: str = "bottom", value: str = "OPERATOR", dist: str = "widebeam-bottom"):
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        lines = f"[widebeam.policy_operators]\n{name} = {module}:{value}\n"
        (info / "entry_points.txt").write_text(lines)
        return read(one for found in distributions(path=[str(tmp_path)]) for one in found.entry_points)

    return put


GOOD = "from tests.policies.test_plugins import BOTTOM as OPERATOR\n"


def test_an_operator_of_another_package_is_known_with_its_distribution(offer):
    operators = offer("plugin_good", GOOD)
    assert operators["bottom"] == replace(BOTTOM, source="widebeam-bottom")
    assert operators.broken == {}
    assert set(operators.known) == {*BUILT_IN.known, "bottom"}


def test_without_packages_there_are_the_built_in_ones():
    assert read([]) == BUILT_IN
    assert set(installed().known) >= set(BUILT_IN.known)


@pytest.mark.parametrize(
    ("module", "code", "reason"),
    [
        ("plugin_import", "import no_such_module\n", "fails when it is imported: ModuleNotFoundError: No module named"),
        ("plugin_syntax", "def (\n", "fails when it is imported: SyntaxError"),
        ("plugin_exit", "raise SystemExit(3)\n", "fails when it is imported: SystemExit: 3"),
        ("plugin_absent", "x = 1\n", "fails when it is imported: AttributeError"),
        ("plugin_other", "OPERATOR = len\n", "has no Operator at `plugin_other:OPERATOR`, but a builtin"),
        ("plugin_named", f"{GOOD}import dataclasses\nOPERATOR = dataclasses.replace(OPERATOR, name='top')\n", "calls"),
        (
            "plugin_typed",
            f"{GOOD}import dataclasses\nOPERATOR = dataclasses.replace(OPERATOR, version='1')\n",
            "wrongly",
        ),
        (
            "plugin_listed",
            f"{GOOD}import dataclasses\nfrom app.policies.operators import Arg\n"
            "OPERATOR = dataclasses.replace(OPERATOR, args=(Arg(['n'], 'int', 0, 9, 1),))\n",
            "declares it wrongly: TypeError: unhashable",
        ),
        (
            "plugin_huge",
            f"{GOOD}import dataclasses\nfrom app.policies.operators import Arg\n"
            "OPERATOR = dataclasses.replace(OPERATOR, args=(Arg('n', 'int', 0, 10**400, 1),))\n",
            "declares it wrongly: OverflowError",
        ),
    ],
    ids=lambda value: value if str(value).startswith("plugin") else "",
)
def test_a_broken_package_costs_its_own_operator_and_says_whose_it_is(offer, module, code, reason):
    operators = offer(module, code)
    assert operators.known == BUILT_IN.known
    assert operators.broken["bottom"].startswith("widebeam-bottom 1.2 ")
    assert reason in operators.broken["bottom"]


@pytest.mark.parametrize("name", ["top_p", "diverse", "log"])
def test_no_package_takes_the_name_of_what_is_built_in(offer, name):
    operators = offer("plugin_shadow", GOOD, name=name)
    assert operators.known == BUILT_IN.known
    assert operators.broken == {name: "widebeam-bottom 1.2 gives it the name of what Widebeam has itself"}
    assert compiled(operators, "top_p(0.5)")[0] is not None  # the built-in one still serves


def test_of_two_packages_with_one_name_neither_is_taken(offer):
    offer("plugin_one", GOOD)
    operators = offer("plugin_two", GOOD, dist="another-bottom")
    assert operators.known == BUILT_IN.known
    assert operators.broken == {"bottom": "another-bottom 1.2 and widebeam-bottom 1.2 offer it both"}


def test_an_entry_point_without_a_distribution_is_named_by_what_it_points_to():
    [reason] = read([EntryPoint("bottom", "no_such_module:X", "widebeam.policy_operators")]).broken.values()
    assert reason.startswith("no_such_module:X fails when it is imported")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"name": "Bottom"}, "`name` is 'Bottom'"),
        ({"name": 7}, "`name` is 7"),
        ({"phase": "select"}, "`phase` is 'select'; other packages may add to keep, prune"),
        ({"about": "two\nlines"}, "`about` is no line"),
        ({"version": True}, "`version` is True"),
        ({"precut": "L"}, "`precut` is 'L'"),
        ({"args": [Arg("n", "int", 0, 9)]}, "`args` is no tuple"),
        ({"args": (Arg("n", "int", 0, 9),) * 2}, "two arguments have one name"),
        ({"args": (Arg("n", "int", 0, 9, 1), Arg("m", "int", 0, 9))}, "an argument without a default follows"),
        ({"args": (Arg("n", "group"),)}, "argument `n` is of the form 'group'"),
        ({"args": (Arg("n", "int", 0, 9, 10),)}, "argument `n` has no range, or a default outside"),
        ({"args": (Arg("n", "int", 3, 3),)}, "argument `n` has no range"),
        ({"args": (Arg("n", "int", 0, 9, 1.5),)}, "argument `n` is a whole number"),
        ({"args": (Arg("n", "number", 0, float("inf")),)}, "argument `n` has a bound"),
        ({"args": (Arg("n", "number", 0, "many"),)}, "argument `n` has a bound"),
        ({"args": (Arg("n n", "int", 0, 9),)}, "an argument is called 'n n'"),
        ({"torch": None}, "`torch` is no function"),
        ({"torch": lambda logp, valid: valid}, "`torch` cannot be called with 3 arguments"),
        ({"reference": lambda logp, n, m: logp}, "`reference` cannot be called with 2 arguments"),
    ],
)
def test_a_declaration_says_what_is_wrong_with_it(change, wrong):
    assert fault(BOTTOM) is None
    assert (fault(replace(BOTTOM, **change)) or "").startswith(wrong)


# ---- in policies ---------------------------------------------------------------------------------------------------


def test_a_policy_uses_it_like_a_built_in_one():
    plan, found = compiled(with_(BOTTOM))
    assert plan is not None, found.text()
    assert plan.structure.steps[0].precut == "E"  # as it declares
    assert plan.resolved["operators"] == {"bottom": "widebeam-bottom/1", "sid": 1, "top": 1}


@pytest.mark.parametrize(
    ("line", "code"),
    [("bottom(n=200)", "T013"), ("bottom(1.5)", "T013"), ("bottom(1, 2)", "T012"), ("botom(1)", "P001")],
)
def test_it_gets_the_checks_of_a_built_in_one(line, code):
    plan, found = compiled(with_(BOTTOM), line)
    assert plan is None
    assert [one.rule.code for one in found.errors] == [code]
    if code == "P001":
        assert found.errors[0].help == "did you mean `bottom`?"
    assert [one.rule.code for one in compiled(with_(BOTTOM), "bottom(1)", "prune")[1].errors] == ["P002"]


def test_its_arguments_may_be_left_out_or_be_parameters():
    text = "widebeam: 1\nparams: {n: {value: 2, range: [0, 9]}}\nsteps: {all: {keep: [bottom(param.n), bottom()]}}\n"
    plan, found = compile_policy("feed", Library(sources(text), with_(BOTTOM)), ON)
    assert plan is not None, found.text()
    assert plan.structure.params == ("n",)


def test_its_version_and_whose_it_is_are_in_the_ids():
    one, other = compiled(with_(BOTTOM))[0], compiled(with_(replace(BOTTOM, version=2)))[0]
    assert one.policy_id != other.policy_id
    assert one.structure.id != other.structure.id
    known = with_(BOTTOM).known
    third = compiled(Operators({**known, "bottom": replace(known["bottom"], source="another-bottom")}))[0]
    assert len({one.structure.id, other.structure.id, third.structure.id}) == 3
    # and nothing changes for policies that do not use it
    assert compiled(with_(BOTTOM), "top_p(0.5)")[0].policy_id == compiled(BUILT_IN, "top_p(0.5)")[0].policy_id


def test_explain_and_the_schema_say_whose_it_is():
    plan, _ = compiled(with_(BOTTOM))
    library = Library(sources("widebeam: 1\nsteps: {all: {keep: [bottom(1)]}}\n"), with_(BOTTOM))
    policy, _ = check_policy("feed", library, ON)
    assert "  operator bottom(n=1) version 1, precut class E <- package widebeam-bottom\n" in (
        explain_text(policy, plan, ON) + "\n"
    )
    data = explain(policy, plan, ON)
    assert data["plugins"] == [{"name": "bottom", "from": "widebeam-bottom", "version": 1, "precut": "E"}]
    step = schema(with_(BOTTOM))["properties"]["steps"]["patternProperties"]["^(all|first|last|[1-9][0-9]?)$"]
    assert "bottom(n=1): all but the n best codes" in step["properties"]["keep"]["description"]


BAD = {
    "differs": ({"torch": lambda logp, valid, n: valid}, "step 1: scores differ"),
    "raises": ({"torch": lambda logp, valid, n: 1 / 0}, "it cannot be compared, ZeroDivisionError"),
    "its reference raises": ({"reference": lambda logp, n: 1 / 0}, "it cannot be compared, ZeroDivisionError"),
    "has another shape": (
        {"torch": lambda logp, valid, n: valid[:1]},
        "it cannot be compared, Fault: operator `bottom` gives no tensor of (6, 6) truth values",
    ),
    "is no condition": ({"torch": lambda logp, valid, n: logp}, "it cannot be compared, Fault: operator `bottom`"),
    "its reference has another shape": (
        {"reference": lambda logp, n: np.ones(len(logp) + 1, bool)},
        "it cannot be compared, TypeError: the reference of `bottom`",
    ),
    "brings nobody back": ({"torch": lambda logp, valid, n: ~valid | bottom(logp, valid, n)}, None),
}


@pytest.mark.parametrize("name", BAD)
def test_the_self_check_refuses_an_operator_that_is_not_its_reference(name):
    change, message = BAD[name]
    plan, found = compiled(with_(replace(BOTTOM, **change)))
    if message is None:  # who is out stays out, whatever it says
        assert plan is not None
        return
    assert plan is None
    [error] = found.errors
    assert (error.rule.code, error.message.startswith(f"the plan differs from the reference: {message}")) == (
        "C101",
        True,
    ), error.message
    assert "try it without `bottom` of widebeam-bottom" in error.help


def test_a_broken_one_fails_the_policies_that_use_it_and_no_others():
    operators = Operators(BUILT_IN.known, {"bottom": "widebeam-bottom 1.2 fails when it is imported: ImportError: x"})
    uses = "widebeam: 1\nextends: base\nsteps: {all: {keep: [bottom(1)]}}\n"
    folder = Folder(dict(sources(uses)))
    loaded = compile_folder(folder, ON, cache=Cache(operators))
    assert [name for name, one in loaded.policies.items() if one.plan] == ["base"]
    [error] = loaded.policies["feed"].errors
    assert error.rule.code == "P004"
    assert error.message == ("`bottom` cannot be used: widebeam-bottom 1.2 fails when it is imported: ImportError: x")


# ---- prune ---------------------------------------------------------------------------------------------------------

SQUARED = Operator(
    "squared",
    "prune",
    (),
    "candidates with at least the square of the request's best probability",
    torch=lambda rank, field: rank >= request_best(rank, field)[field.request][:, None] * 2,
    reference=lambda rank: rank >= rank.max(initial=-np.inf) * np.float32(2),
    precut="M",
)


def test_prune_is_open_too_and_an_operator_may_take_no_argument():
    plan, found = compiled(with_(SQUARED), "squared()", "prune")
    assert plan is not None, found.text()
    assert plan.structure.steps[0].precut == "M"
