"""Compiles only what changed: results by the texts that they were made of, for one folder after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from app.core import Contract
from app.policies.check_contract import Catalogue
from app.policies.compile import compile_policy
from app.policies.diagnostics import Diagnostic
from app.policies.plan import Plan
from app.policies.resolve import Library, ReadFile
from app.policies.source import Source, Sources

K = TypeVar("K")
V = TypeVar("V")
_Key = tuple[tuple[tuple[str, Source], ...], str, Catalogue | None]
_Result = tuple[Plan | None, tuple[Diagnostic, ...]]


class _Recent(Generic[K, V]):
    """Values by key; those that two turns did not ask for are forgotten."""

    def __init__(self) -> None:
        self._now: dict[K, V] = {}
        self._before: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else make()
        return self._now[key]

    def turn(self) -> None:
        self._before, self._now = self._now, {}


class Cache:
    """Documents and plans of the folders seen last. Not for several threads at once."""

    def __init__(self) -> None:
        self._documents: _Recent[tuple[str, Source], ReadFile] = _Recent()
        self._results: _Recent[_Key, _Result] = _Recent()

    def turn(self) -> None:
        """A new folder comes: what neither it nor the last one uses is forgotten at the next turn."""
        self._documents.turn()
        self._results.turn()

    def library(self, sources: Sources) -> Library:
        """The files of a folder; those that were read before are not read again."""
        library = Library(sources)
        for name, source in sources.items():
            library.give(name, self._documents.get((name, source), partial(library.read, name)))
        return library

    def compile(self, name: str, library: Library, contract: Contract, catalogue: Catalogue | None) -> _Result:
        """As `compile_policy`. What went wrong because of files that are not there is never remembered."""

        def make() -> _Result:
            plan, found = compile_policy(name, library, contract, catalogue)
            return plan, tuple(found)

        chain = library.chain(name)
        if chain is None:
            return make()
        return self._results.get((tuple((one, library.sources[one]) for one in chain), contract.id, catalogue), make)
