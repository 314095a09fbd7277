"""Model token ids to codes, through [sid] of the deployment: each step's block of tokens, or sid_tokens.json."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.vocab.formats.source import Place, Source, pieces

Ints = npt.NDArray[np.int64]


class TokenMap:
    """Per step, the token ids of the codes in ascending order and the codes that they stand for."""

    def __init__(self, source: Source) -> None:
        """Raises Rejected where the deployment does not say which tokens are codes."""
        self._source = source
        self._steps = [_sorted(tokens) for tokens in _tables(source)]

    def codes(self, tokens: npt.NDArray[Any], place: Place) -> Ints:
        """Codes [m, L] of token ids [m, L]. Raises Rejected("bad_token") with the place."""
        codes = np.full(tokens.shape, -1, np.int64)
        for step, (known, code) in enumerate(self._steps):
            at = np.minimum(np.searchsorted(known, tokens[:, step]), len(known) - 1)
            codes[:, step] = np.where(known[at] == tokens[:, step], code[at], -1)
        wrong = np.flatnonzero((codes < 0).any(axis=1))
        if len(wrong):
            row = int(wrong[0])
            step = int(np.argmin(codes[row] >= 0))
            known = self._steps[step][0]
            message = f"token {tokens[row, step]} is no code of step {step + 1}"
            span = f"; its tokens are {known[0]}..{known[-1]}" if len(known) else ""
            raise self._source.refuse("bad_token", message + span, place(row))
        return codes


def _tables(source: Source) -> list[Ints]:
    sid = source.sid
    if source.tokens is not None:
        try:
            lists = msgspec.json.decode(b"".join(pieces(source.tokens)), type=list[list[int]])
            tables = [np.array(tokens, np.int64) for tokens in lists]
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            raise source.refuse("sid_tokens", f"{source.tokens.name}: {error}") from error
        if [len(table) for table in tables] != list(sid.sizes):
            message = (
                f"{source.tokens.name} lists {[len(table) for table in tables]} tokens for sizes {list(sid.sizes)}"
            )
            raise source.refuse("sid_tokens", message)
        return tables
    if sid.token_base is None:
        raise source.refuse(
            "sid_tokens",
            "this format holds token ids: [sid] of deployment.toml needs `token_base`, or give sid_tokens.json",
        )
    return [base + np.arange(size) for base, size in zip(sid.token_base, sid.sizes, strict=True)]


def _sorted(tokens: Ints) -> tuple[Ints, Ints]:
    code = np.flatnonzero(tokens >= 0)
    order = code[np.argsort(tokens[code], kind="stable")]
    return (tokens[order], order) if len(order) else (np.array([-1]), np.array([-1]))
