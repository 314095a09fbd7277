from __future__ import annotations

from app.policies.builtin import BUILT_IN
from app.policies.names import FINAL_PHASES, FUNCTIONS, NAMES, SPACES, STEP_PHASES


def test_each_operator_stands_in_a_phase_that_takes_operators():
    forms = {
        **{one.name: one.form for one in FINAL_PHASES.values()},
        **{one.name: one.form for one in STEP_PHASES.values()},
    }
    for operator in BUILT_IN:
        assert forms[operator.phase] in ("operation", "operations"), operator.name


def test_an_operator_that_is_compiled_stands_in_a_phase_that_is():
    phases = {**FINAL_PHASES, **STEP_PHASES}
    for operator in BUILT_IN:
        assert not operator.available or phases[operator.phase].available, operator.name


def test_ranges_are_ranges_and_defaults_lie_in_them():
    for operator in BUILT_IN:
        for arg in operator.args:
            if arg.form in ("int", "number"):
                assert arg.low < arg.high or arg.name == "history"  # only 0 so far
                assert arg.default is None or arg.low <= float(arg.default) <= arg.high


def test_names_operators_and_functions_do_not_collide():
    names = {name for table in NAMES.values() for name in table}
    spaces = {name for table in SPACES.values() for name in table}
    assert not names & spaces
    assert not names & set(FUNCTIONS)
