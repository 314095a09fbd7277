"""Compiles only what changed: results by the texts that they were made of, for one folder after another."""

from __future__ import annotations

import threading
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
        for known in (self._now, self._before):  # another thread may turn, or make the same, meanwhile
            if key in known:
                found = known[key]
                break
        else:
            found = make()
        self._now[key] = found
        return found

    def turn(self) -> None:
        self._before, self._now = self._now, {}


class _Basis:
    """What plans are compiled for. results: by the texts of a policy and its ancestors · proven: structure ids ·
    turned: a new folder has come since it was asked for last"""

    def __init__(self, contract_id: str, catalogue: Catalogue | None) -> None:
        self.contract_id, self.catalogue = contract_id, catalogue
        self.results: _Recent[tuple[tuple[str, Source], ...], _Result] = _Recent()
        self.proven: set[str] = set()
        self.turned = False

    def turn(self) -> None:
        """Forget what the last two folders that it was asked for did not use."""
        self.turned = False
        self.results.turn()
        if len(self.proven) > MOST_PROVEN:
            self.proven.clear()

    def fits(self, contract_id: str, catalogue: Catalogue | None) -> bool:
        same = self.catalogue is catalogue or self.catalogue == catalogue  # a catalogue is large: identity first
        return same and self.contract_id == contract_id


BASES = 4
"""Contracts and catalogues that are remembered, those asked for last: of what serves, of what is being prepared, and of
what is kept for a rollback, which is to be instant."""


MOST_PROVEN = 4096
"""Structures that are known to need no proof; an endless row of edits starts over."""


class Cache:
    """Documents and plans of the folders seen last, with the operators that policies may use. For any thread: two that
    compile the same at once both do the work."""

    def __init__(self, operators: Operators = BUILT_IN) -> None:
        self._operators = operators
        self._documents: _Recent[tuple[str, Source], ReadFile] = _Recent()
        self._bases: list[_Basis] = []
        self._lock = threading.Lock()  # of the list; nobody compiles under it

    def turn(self) -> None:
        """A new folder comes: what neither it nor the last one uses is forgotten at the next turn. A basis that nobody
        asks for meanwhile keeps what it has, however many folders come: a rollback to it compiles what they changed."""
        self._documents.turn()
        with self._lock:
            for basis in self._bases:
                basis.turned = True

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
        """As `compile_policy`. What went wrong because of files that are not there is never remembered."""
        basis = self._basis(contract.id, catalogue)

        def make() -> _Result:
            plan, found = compile_policy(name, library, contract, catalogue, proven=basis.proven, between=between)
            return plan, tuple(found)

        chain = library.chain(name)
        if chain is None:
            return make()
        return basis.results.get(tuple((one, library.sources[one]) for one in chain), make)

    def _basis(self, contract_id: str, catalogue: Catalogue | None) -> _Basis:
        with self._lock:
            found = next((one for one in reversed(self._bases) if one.fits(contract_id, catalogue)), None)
            basis = found or _Basis(contract_id, catalogue)
            self._bases = [*(one for one in self._bases if one is not basis), basis][-BASES:]
            if basis.turned:
                basis.turn()
        return basis
