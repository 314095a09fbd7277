"""Every word of the language has help. What the language knows is taken from its tables and from what its readers ask
for, so that a new word without help fails."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from app.policies import cases, experiment_file, words
from app.policies.names import FINAL_PHASES, FUNCTIONS, LEVELS, NAMES, NORMALIZE, SPACES, STEP_PHASES, STEP_WORDS
from app.policies.words import meanings

READERS = ("read", "traffic", "experiment_file", "cases")


def keys_that_are_read():
    """The names in every `fields(node, where, (..))` of the readers of files."""
    found = set()
    for name in READERS:
        module = import_module(f"app.policies.{name}")
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fields"):
                continue
            known = node.args[2]
            if isinstance(known, ast.Tuple):
                found |= {one.value for one in known.elts}
            elif isinstance(known, ast.Name) and known.id.startswith("_"):
                found |= set(getattr(module, known.id))
    return found


def grammar():
    known = {
        *STEP_PHASES,
        *FINAL_PHASES,
        *STEP_WORDS,
        *LEVELS,
        *NORMALIZE,
        *FUNCTIONS,
        "and",
        "or",
        "not",
        "in",
        "none",
    }
    known |= {name for names in NAMES.values() for name in names}
    known |= {space for spaces in SPACES.values() for space in spaces}
    known |= {"token", "prefix", "parent", "allow", "error", *experiment_file._STATES, *experiment_file._METRICS}
    return sorted(known | {*cases._STATUS} | keys_that_are_read())


def test_the_readers_ask_for_what_they_are_known_to_ask_for():
    assert {"widths", "params", "arms", "holdout", "surfaces", "survivors", "coverage", "range"} <= keys_that_are_read()


@pytest.mark.parametrize("word", grammar())
def test_every_word_of_the_language_has_help(word):
    found = meanings(word)
    assert found
    assert all(line.strip() and "None" not in line for line in found)
    assert word in words.words()


def test_nothing_has_help_that_the_language_does_not_know():
    assert words.words() - set(grammar()) == set()
    assert meanings("nobody") == []
