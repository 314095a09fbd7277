"""Compiles only what changed: results by the texts that they were made of, for one folder after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from app.core import Contract
from app.policies.builtin import BUILT_IN
from app.policies.check_contract import Catalogue
from app.policies.compile import compile_policy
from app.policies.diagnostics import Diagnostic
from app.policies.operators import Operators
from app.policies.plan import Plan
from app.policies.resolve import Library, ReadFile
from app.policies.source import Source, Sources

K = TypeVar("K")
V = TypeVar("V")
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


class _Basis:
    """What plans are compiled for. results: by the texts of a policy and its ancestors · proven: structure ids"""

    def __init__(self, contract_id: str, catalogue: Catalogue | None) -> None:
        self.contract_id, self.catalogue = contract_id, catalogue
        self.results: _Recent[tuple[tuple[str, Source], ...], _Result] = _Recent()
        self.proven: set[str] = set()

    def fits(self, contract_id: str, catalogue: Catalogue | None) -> bool:
        same = self.catalogue is catalogue or self.catalogue == catalogue  # a catalogue is large: identity first
        return same and self.contract_id == contract_id


BASES = 2
"""Contracts and catalogues that are remembered: the live one and the one that is being prepared."""


MOST_PROVEN = 4096
"""Structures that are known to need no proof; an endless row of edits starts over."""


class Cache:
    """Documents and plans of the folders seen last, with the operators that policies may use. Not for several threads
    at once."""

    def __init__(self, operators: Operators = BUILT_IN) -> None:
        self._operators = operators
        self._documents: _Recent[tuple[str, Source], ReadFile] = _Recent()
        self._bases: list[_Basis] = []

    def turn(self) -> None:
        """A new folder comes: what neither it nor the last one uses is forgotten at the next turn."""
        self._documents.turn()
        for basis in self._bases:
            basis.results.turn()
            if len(basis.proven) > MOST_PROVEN:
                basis.proven.clear()

    def library(self, sources: Sources) -> Library:
        """The files of a folder; those that were read before are not read again."""
        library = Library(sources, self._operators)
        for name, source in sources.items():
            library.give(name, self._documents.get((name, source), partial(library.read, name)))
        return library

    def compile(
        self,
        name: str,
        library: Library,
        contract: Contract,
        catalogue: Catalogue | None,
        between: Callable[[], None] = lambda: None,
    ) -> _Result:
        """As `compile_policy`. What went wrong because of files that are not there is never remembered. between: called
        before what is compiled anew"""
        basis = self._basis(contract.id, catalogue)

        def make() -> _Result:
            between()
            plan, found = compile_policy(name, library, contract, catalogue, proven=basis.proven)
            return plan, tuple(found)

        chain = library.chain(name)
        if chain is None:
            return make()
        return basis.results.get(tuple((one, library.sources[one]) for one in chain), make)

    def _basis(self, contract_id: str, catalogue: Catalogue | None) -> _Basis:
        for basis in self._bases:
            if basis.fits(contract_id, catalogue):
                return basis
        self._bases = [*self._bases[1 - BASES :], _Basis(contract_id, catalogue)]
        return self._bases[-1]
