"""Weights and vocab that were tried together and do not go together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from app.runtime.retries import Retries

NO_DEFAULT, POLICY_LOST = "no_default_policy", "policy_lost"
BY_POLICIES: Final = frozenset({NO_DEFAULT, POLICY_LOST})
"""Codes of sets that are refused because of what the policies say, and may do once those are edited."""
Pair = tuple[str, str]
"""The digests of weights and vocab."""


class Apart:
    """Such pairs, as long as both are there. retries: told of what may be tried again"""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._codes: dict[Pair, str] = {}

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def pairs(self) -> Collection[Pair]:
        """All of them."""
        return self._codes.keys()

    def add(self, pair: Pair, code: str) -> None:
        """A pair was refused. code: why"""
        self._codes[pair] = code
        self._retries.refused(pair, code)

    def again(self, what: object) -> None:
        """It is time to try something again, perhaps one of these."""
        self._codes = {pair: code for pair, code in self._codes.items() if pair != what}

    def policies_changed(self) -> None:
        """What did not go with the policies may go with them now."""
        self._codes = {pair: code for pair, code in self._codes.items() if code not in BY_POLICIES}

    def clear(self) -> None:
        """Under another contract all of them may go together."""
        self.keep(())

    def keep(self, digests: Collection[str]) -> None:
        """Forget pairs of which one is neither on the disk nor in memory any more."""
        for pair in tuple(self._codes):
            if not set(pair) <= set(digests):
                del self._codes[pair]
                self._retries.forget(pair)
