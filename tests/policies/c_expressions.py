"""The C of `app/policies/generate.py` computed with NumPy in float32: what a kernel should give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.generic]
_TOKEN = re.compile(r"\s*(0x[0-9a-f]+|[0-9]+\.?[0-9]*f?|[A-Za-z_][A-Za-z_0-9]*|\|\||&&|[<>=!]=|[-<>!?:(),])")
ONE = np.float32(1)
_MASK = np.uint64(0xFFFFFFFF)
STREAMS = {"RANK_GUMBEL": ("gumbel", 0), "RANK_UNIFORM": ("uniform", 1)}


def _divide(a: Values, b: Values) -> Values:
    return np.where(b == 0, np.float32(np.nan), a / b)


def _conditioned(drawn: Values, top: Values, parent: Values) -> Values:
    """Kool et al. 1903.06059, appendix B.3, in double precision."""
    limit, x = np.float64(parent), np.float64(drawn)
    u = limit - x + np.log1p(-np.exp(x - top))
    return np.where(x > -np.inf, limit - np.maximum(u, 0) - np.log1p(np.exp(-np.abs(u))), -np.inf).astype(np.float32)


FUNCTIONS: Mapping[str, Callable[..., Values]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "minus": np.negative,
    "lesser": np.minimum, "larger": np.maximum, "size_of": np.abs, "root": np.sqrt, "power": np.power,
    "exp_of": np.exp, "prob_of": np.exp,
    "log_of": lambda a: np.where(a > 0, np.log(a), np.float32(np.nan)), "sigmoid": lambda a: ONE / (ONE + np.exp(-a)),
    "conditioned": _conditioned,
    "log_64": lambda a: np.log(np.float64(a)).astype(np.float32),
    "__int_as_float": lambda a: np.uint32(a).view(np.float32),
}  # fmt: skip


class _Reader:
    """A recursive descent over one expression."""

    def __init__(self, text: str, names: Mapping[str, Values], values: list[Values], columns: list[Values]) -> None:
        self.tokens, self.at = _TOKEN.findall(text), 0
        assert "".join(self.tokens) == re.sub(r"\s", "", text), text
        self.names, self.values, self.columns = names, values, columns

    def take(self, token: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def choice(self) -> Values:
        condition = self.joined("||")
        if not self.take("?"):
            return condition
        first = self.choice()
        assert self.take(":")
        return np.where(condition, first, self.choice())

    def joined(self, op: str) -> Values:
        below = (lambda: self.joined("&&")) if op == "||" else self.compared
        out = below()
        while self.take(op):
            out = np.logical_or(out, below()) if op == "||" else np.logical_and(out, below())
        return out

    def compared(self) -> Values:
        left = self.one()
        operations = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
                      "!=": np.not_equal}  # fmt: skip
        for op, operation in operations.items():
            if self.take(op):
                return operation(left, self.one())
        return left

    def one(self) -> Values:  # noqa: PLR0911  one case a form
        if self.take("!"):
            return np.logical_not(self.one())
        if self.take("("):
            out = self.choice()
            assert self.take(")")
            return out
        token = self.tokens[self.at]
        self.at += 1
        if token in ("true", "false"):
            return np.bool_(token == "true")
        if token[0].isdigit():
            return np.uint32(int(token, 16)) if token[:2] == "0x" else np.float32(token.rstrip("f"))
        if token not in FUNCTIONS and token not in ("value", "column"):
            return self.names[token]
        assert self.take("(")
        given = [self.choice()]
        while self.take(","):
            given.append(self.choice())
        assert self.take(")")
        if token == "value":
            return self.values[int(given[0])]
        return self.columns[int(given[0])] if token == "column" else FUNCTIONS[token](*given)


def compute(text: str, names: Mapping[str, Values], values: list[Values], columns: list[Values]) -> Values:
    """An expression over named arrays, the table's columns [n, 1] and the candidates' [n, F]."""
    reader = _Reader(text, names, values, columns)
    with np.errstate(all="ignore"):
        out = reader.choice()
    assert reader.at == len(reader.tokens), text
    return out


def definitions(text: str) -> dict[str, str]:
    """What `#define` lines define."""
    return dict(line.split(" ", 2)[1:] for line in text.splitlines() if line.startswith("#define"))


def noise(lines: Mapping[str, str], by: npt.NDArray[np.int64], code: npt.NDArray[np.int64]) -> dict[str, Values]:
    """The names that kernels draw: by [n, 3] of `Generated.noise`, code [n, F]."""
    seed, prefix, step = (one[:, None].view(np.uint64) for one in np.ascontiguousarray(by.T))
    out: dict[str, Values] = {}
    for flag, (name, stream) in STREAMS.items():
        if flag not in lines:
            continue
        c0, c1, c2, c3 = code.astype(np.uint64), step + np.uint64(stream << 16), prefix & _MASK, prefix >> np.uint64(32)
        k0, k1 = seed & _MASK, seed >> np.uint64(32)
        for _ in range(10):  # Philox4x32-10
            a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & _MASK, (a >> np.uint64(32)) ^ c3 ^ k1, a & _MASK
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _MASK, (k1 + np.uint64(0xBB67AE85)) & _MASK
        u = ((c0 >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
        out[name] = (-np.log(-np.log(u)) if name == "gumbel" else u).astype(np.float32)
    return out


def rank_of(
    lines: Mapping[str, str], names: Mapping[str, Values], values: list[Values], columns: list[Values],
    allowed: npt.NDArray[np.bool_],
) -> Values:  # fmt: skip
    """RANK, where it is made of what the allowed candidates of a row drew, too."""
    if "RANK_DRAWN" not in lines:
        return compute(lines.get("RANK", "score"), names, values, columns)
    drawn = np.where(allowed, compute(lines["RANK_DRAWN"], names, values, columns), np.float32(-np.inf))
    return compute(lines["RANK"], {"drawn": drawn, "top": drawn.max(1, keepdims=True)}, values, columns)


def stays(
    lines: Mapping[str, str], names: Mapping[str, Values], values: list[Values], legal: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Legal candidates that RANK_FLOOR leaves: what reaches the floor, and the first of a row's best; and RANK_MOST:
    the best of them, the first of equal ones."""
    logp = np.where(legal, names["logp"], np.float32(-np.inf))
    if "RANK_MOST" in lines:
        place = np.argsort(np.argsort(-logp, axis=1, kind="stable"), axis=1)
        legal = legal & (place < compute(lines["RANK_MOST"], {}, values, []))
    if "RANK_FLOOR" not in lines:
        return legal
    floor = compute(lines["RANK_FLOOR"], {"best": logp.max(1, keepdims=True)}, values, [])
    first = np.arange(logp.shape[1]) == logp.argmax(1)[:, None]
    return legal & ((logp >= floor) | first)
