"""Every code that a policy file can get, in one table. Each has a page `docs/policies/codes/<code>.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Rule(NamedTuple):
    """A stable code and what it stands for. S: text and form, T: names and types, P: placement, X: inheritance,
    K: against the contract, C: against the oracle, E: traffic and experiments, W: warnings."""

    code: str
    severity: Severity
    title: str


def _table(*rules: tuple[str, Severity, str]) -> Mapping[str, Rule]:
    return {code: Rule(code, severity, title) for code, severity, title in rules}


RULES = _table(
    ("S001", "error", "the file is not UTF-8 text of an allowed size"),
    ("S002", "error", "the file is not valid YAML"),
    ("S003", "error", "a key is given twice"),
    ("S004", "error", "YAML anchors, aliases and merge keys are not used"),
    ("S005", "error", "YAML tags are not used"),
    ("S006", "error", "a file holds one document and no directives"),
    ("S007", "error", "unknown key"),
    ("S008", "error", "the value has another form than this key takes"),
    ("S009", "error", "a required key is missing"),
    ("S010", "error", "a key without a value"),
    ("S011", "error", "the value is not one that this key takes"),
    ("S012", "error", "a limit of the language is exceeded"),
    ("S013", "error", "a parameter lies outside its range"),
    ("S014", "error", "the expression cannot be read"),
    ("S015", "error", "the expression uses something that the language does not have"),
    ("S016", "error", "the file cannot be a policy file"),
    ("S017", "error", "unknown version of the language"),
    ("S018", "error", "an expression of several lines needs a `|` block"),
    ("T001", "error", "unknown name"),
    ("T002", "error", "the deployment does not declare the name"),
    ("T003", "error", "the name does not exist in this phase"),
    ("T004", "error", "a number is needed, a condition is given"),
    ("T005", "error", "a condition is needed, a number is given"),
    ("T006", "error", "wrong number of arguments"),
    ("T007", "error", "unknown function"),
    ("T008", "error", "division by zero"),
    ("T009", "error", "the exponent is not a constant"),
    ("T010", "error", "the number is too large"),
    ("T011", "error", "text outside a comparison with `ctx`"),
    ("T012", "error", "an operator's argument is missing, unknown or given twice"),
    ("T013", "error", "an operator's argument is outside its range"),
    ("P001", "error", "unknown operator"),
    ("P002", "error", "the operator belongs to another phase"),
    ("P003", "error", "not available in this version"),
    ("P004", "error", "an operator of another package that cannot be used"),
    ("X001", "error", "`extends` goes round in a circle"),
    ("X002", "error", "unknown parent"),
    ("X003", "error", "`extends` is too deep"),
    ("K002", "error", "the number of widths is not the number of steps"),
    ("K003", "error", "a width is above the contract's limit"),
    ("K004", "note", "a width is above what the step can hold"),
    ("K005", "error", "groups do not divide a width"),
    ("K006", "warning", "a cap keeps the step from filling"),
    ("K007", "error", "not defined at this step"),
    ("K008", "error", "floors that cannot be met"),
    ("K009", "error", "caps that cross"),
    ("K011", "error", "`stochastic` with a mask needs `normalize: valid`"),
    ("K012", "error", "`rank` is given together with `stochastic`"),
    ("K013", "error", "a step has too many candidates to number"),
    ("E001", "error", "weights that are not positive or do not sum to 100"),
    ("K014", "error", "operators that do not go together"),
    ("K015", "error", "`normalize: full` with changed logits"),
    ("K016", "error", "a mask by an attribute that is not made by `any`"),
    ("E002", "error", "unknown or abstract policy"),
    ("E003", "error", "slots that another experiment has"),
    ("E004", "error", "a parameter value that the policy does not take"),
    ("E005", "error", "a salt that another experiment has"),
    ("E006", "error", "a parameter, or the policy, belongs to another layer"),
    ("E007", "error", "a salt that is used for two purposes"),
    ("E008", "error", "a change to a running experiment without a new salt"),
    ("E009", "warning", "the coverage goes down"),
    ("E010", "error", "the moments of a ramp are not ascending"),
    ("E011", "error", "there is no control arm"),
    ("E012", "error", "experiments of one layer hash different units"),
    ("W001", "warning", "the mask allows nothing"),
    ("W002", "warning", "an operator without effect"),
    ("W003", "warning", "an override repeats what is inherited"),
    ("W004", "warning", "a parameter is never used"),
    ("W005", "warning", "a boost far beyond likelihood"),
    ("W006", "warning", "a step key that no step of the deployment has"),
    ("W007", "warning", "`typical` without sampling"),
    ("W101", "warning", "the arms of an experiment need different structures"),
    ("W102", "warning", "an experiment older than 90 days"),
    ("W103", "warning", "people may change arms while the experiment runs"),
    ("W104", "warning", "`where` reads a field that the deployment does not declare"),
    ("C101", "error", "the compiled plan and the oracle differ"),
)
