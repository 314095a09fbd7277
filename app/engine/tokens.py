"""Which token of a language model is which code of a SID: the three ways of `[sid]` (docs/models.md).

Ids without contiguous blocks are the normal case: training scripts add only the codes in use, sorted as text. A code
without a token cannot be written by the model; its logit is -inf.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.config import SidConfig, read_small
from app.config import read_json as parsed
from app.errors import Rejected, counted, unreadable

Ids = npt.NDArray[np.int64]

SID_FILE = "sid_tokens.json"


def sid_tokens(sid: SidConfig, directory: Path, vocabulary: int) -> tuple[Ids, ...]:
    """The model's token id of every code, [C_t] int64 a step; -1 where a code has no token.

    directory   the weights version: tokenizer files, sid_tokens.json
    vocabulary  ids are 0..vocabulary - 1
    Two codes of one step never share a token; steps may share theirs (one codebook for all levels).
    Raises Rejected with the file and the token, code or field.
    """
    if sid.token_base is not None:
        steps = [np.arange(base, base + size) for base, size in zip(sid.token_base, sid.sizes, strict=True)]
        place = "deployment.toml: sid.token_base"
    elif sid.tokens == "file":
        steps, place = _from_file(sid.sizes, directory / SID_FILE), SID_FILE
    elif sid.tokens is not None:
        steps = _from_pattern(sid.tokens, sid.sizes, directory)
        place = "deployment.toml: sid.tokens"
    else:
        raise Rejected(
            "tokens_not_named",
            "a token model needs `token_base` or `tokens` under [sid]",
            location="deployment.toml: sid",
        )
    for t, ids in enumerate(steps, 1):
        _check(ids, t, vocabulary, place)
    return tuple(steps)


def _check(ids: Ids, t: int, vocabulary: int, place: str) -> None:
    outside = np.flatnonzero((ids >= vocabulary) | (ids < -1))
    if outside.size:
        code = int(outside[0])
        message = f"step {t}, code {code}: token {ids[code]} is outside of the model's {vocabulary} tokens"
        raise Rejected("token_out_of_range", message, location=place)
    named = ids[ids >= 0]
    if not named.size:
        raise Rejected("no_tokens", f"no code of step {t} has a token", location=place)
    values, counts = np.unique(named, return_counts=True)
    if (counts > 1).any():
        token = values[counts > 1][0]
        codes = " and ".join(str(code) for code in np.flatnonzero(ids == token)[:2])
        raise Rejected("duplicate_token", f"step {t}: codes {codes} share token {token}", location=place)


def _from_file(sizes: tuple[int, ...], file: Path) -> list[Ids]:
    lists = read_json(file)
    if not isinstance(lists, list) or len(lists) != len(sizes):
        raise Rejected("bad_tokens", f"a list of {len(sizes)} lists is expected, one a step", location=file.name)
    for t, (ids, size) in enumerate(zip(lists, sizes, strict=True), 1):
        if not isinstance(ids, list) or len(ids) != size:
            found = counted(len(ids), "entry", "entries") if isinstance(ids, list) else "no list"
            raise Rejected("bad_tokens", f"step {t}: {counted(size, 'id')} expected, {found} found", location=file.name)
        for code, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not -1 <= token < 2**31:
                raise Rejected("bad_tokens", f"step {t}, code {code}: {token!r} is no token id", location=file.name)
    return [np.array(ids, dtype=np.int64) for ids in lists]


def _from_pattern(pattern: str, sizes: tuple[int, ...], directory: Path) -> list[Ids]:
    fields = re.findall(r"\{([^{}]*)\}", pattern)
    if "code" not in fields or not set(fields) <= {"code", "level"}:
        raise Rejected(
            "bad_pattern",
            f"`{pattern}` must name {{code}}, may name {{level}} (a, b, c...) and nothing else in braces",
            location="deployment.toml: sid.tokens",
        )
    names = [
        [pattern.replace("{level}", level).replace("{code}", str(code)) for code in range(size)]
        for level, size in zip(string.ascii_lowercase, sizes, strict=False)
    ]
    wanted = {name for step in names for name in step}
    found: dict[str, tuple[int, str]] = {}
    tables = list(_tokenizer_tables(directory))
    for file, table in tables:
        for name in wanted & table.keys():
            token = table[name]
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise Rejected("bad_tokens", f"`{name}` has no token id but {token!r}", location=file)
            known, where = found.setdefault(name, (token, file))
            if known != token:
                message = f"`{name}` is token {token} here and {known} in {where}"
                raise Rejected("duplicate_token", message, location=file)
    for t, step in enumerate(names, 1):
        if not any(name in found for name in step):
            files = ", ".join(dict.fromkeys(file for file, _ in tables)) or "no tokenizer file"
            message = f"step {t}: none of `{step[0]}` to `{step[-1]}` is a token ({files} read)"
            raise Rejected("no_tokens", message, location="deployment.toml: sid.tokens")
    return [np.array([found.get(name, (-1, ""))[0] for name in step], dtype=np.int64) for step in names]


def _tokenizer_tables(directory: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(file, token text -> id) of every tokenizer file that is there; what has another form gives nothing."""
    tokenizer = _optional(directory / "tokenizer.json")
    if isinstance(tokenizer, dict):
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, dict):
            yield "tokenizer.json", vocab
        elif isinstance(vocab, list):  # unigram models: [text, score] by id
            yield "tokenizer.json", {pair[0]: token for token, pair in enumerate(vocab) if isinstance(pair, list)}
        added = tokenizer.get("added_tokens")
        if isinstance(added, list):
            entries = [entry for entry in added if isinstance(entry, dict) and isinstance(entry.get("content"), str)]
            yield "tokenizer.json", {entry["content"]: entry.get("id") for entry in entries}
    config = _optional(directory / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if isinstance(decoder, dict):
        texts = {key: entry.get("content") for key, entry in decoder.items() if isinstance(entry, dict)}
        yield (
            "tokenizer_config.json",
            {text: int(key) for key, text in texts.items() if isinstance(text, str) and key.isdecimal()},
        )
    for name in ("added_tokens.json", "vocab.json"):
        table = _optional(directory / name)
        if isinstance(table, dict):
            yield name, table


def _optional(file: Path) -> object:
    return read_json(file) if file.exists() else None


def read_json(file: Path) -> object:
    """A JSON file of a weights version. Raises Rejected("unreadable" | "path_escape" | "bad_json") with the file."""
    try:
        value: object = parsed(read_small(file, -1, file.parent))
    except OSError as error:
        raise unreadable(error, "unreadable", file.name) from error
    except (ValueError, RecursionError) as error:
        raise Rejected("bad_json", f"is no JSON ({error})", location=file.name) from error
    return value
