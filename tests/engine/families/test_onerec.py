"""The served `onerec` family against its own definition, `OneRecReference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from app.config import Limits, SidConfig
from app.core import Context, Embeddings, History, Ragged, Rows, TokenIds
from app.engine.families.base import ModelFiles
from app.engine.families.onerec import OneRec
from app.engine.families.onerec_config import OneRecConfig, parse
from app.engine.families.onerec_reference import OneRecReference, PaddedContexts, pad_history
from app.errors import InvalidRequest, Rejected
from tests import support

TOLERANCE = 1e-5
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BASE = {
    "family": "onerec",
    "sizes": [5, 8, 3],
    "d_model": 24,
    "layers": 3,
    "heads": 4,
    "head_dim": 6,
    "cross_groups": 4,
    "self_groups": 4,
    "ffn": 40,
    "history": {"short": 4, "long": 3, "pool": 2, "prefix": 2},
}
FEATURES = {"static": 7, "short": 5, "long": 3, "short_positions": 6, "long_positions": 4}
EXPERTS = {"routed": 5, "top": 2, "hidden": 10, "shared": 2, "dense": 2, "scores": "sigmoid", "factor": 2.5}
LIMITS = Limits(widths=(64, 64, 64), rows=256, batch=6, context=64)
SHAPES = [
    {},
    {"kv_sets": 3, "cross_groups": 2},
    {"kv_sets": 2, "kv_split": 2, "self_groups": 1},
    {"cross_groups": 1, "self_groups": 2, "context_layers": 2},
    {"kv_split": 2, "features": FEATURES, "history": None},
    {"features": FEATURES, "context_layers": 1, "kv_sets": 2},
    {"sizes": [4], "history": {"short": 3}},
    {"experts": {"routed": 7, "top": 3, "hidden": 10, "dense": 1}},
    {"experts": {"routed": 3, "top": 1, "hidden": 24, "shared": 1, "normalise": False}, "context_layers": 1},
    {"experts": {**EXPERTS, "bias": True}},
    {"sizes": [3, 2, 4, 2], "history": {"short": 2, "long": 5, "prefix": 3}},
]


def config_of(**changes: object) -> OneRecConfig:
    return parse({**BASE, **changes})


def pair(config: OneRecConfig, limits: Limits = LIMITS, seed: int = 0) -> tuple[OneRecReference, OneRec]:
    """The same random weights in the definition and in the served family, made as the engine makes it."""
    reference = OneRecReference(config).eval()
    reference.reset_parameters(torch.Generator().manual_seed(seed))
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    weights = reference.state_dict()
    files = ModelFiles(msgspec.to_builtins(config), Path(), {name: tuple(w.shape) for name, w in weights.items()})
    served = OneRec.build(files, SidConfig(sizes=config.sizes), limits, torch.float32)
    for name, binding in served.bindings().items():
        whole = support.bound(binding, weights)
        owner, _, leaf = name.rpartition(".")
        setattr(served.get_submodule(owner), leaf, torch.nn.Parameter(whole, requires_grad=False))
    return reference, served.eval()


def arena_of(served: OneRec, limits: Limits = LIMITS) -> dict[str, torch.Tensor]:
    """Fresh state, poisoned: what is read without having been written shows up as NaN."""
    arena = {}
    for spec in served.state_specs():
        lead = (limits.batch,) if spec.scope == "request" else (served.steps - 1, limits.rows)
        poison = torch.nan if spec.dtype.is_floating_point else 10**6
        arena[spec.name] = torch.full((*lead, *spec.shape), poison, dtype=spec.dtype)
    return arena


def ragged(served: OneRec, contexts: Sequence[Context]) -> dict[str, Ragged]:
    prepared = [served.prepare(context) for context in contexts]
    out = {}
    for spec in served.input_specs():
        arrays = [inputs[spec.name] for inputs in prepared]
        assert all(a.shape[1:] == spec.shape and a.shape[0] <= spec.positions for a in arrays)
        start = np.cumsum([0, *(len(a) for a in arrays)])
        values = torch.from_numpy(np.concatenate(arrays))
        assert values.dtype == spec.dtype
        out[spec.name] = Ragged(values, torch.from_numpy(start.astype(np.int32)))
    return out


def rows_of(codes: Sequence[int], counts: Sequence[int], ancestry: np.ndarray, compact: bool = False) -> Rows:
    start = np.cumsum([0, *counts])
    return Rows(
        codes=torch.tensor(codes, dtype=torch.int32),
        request=torch.from_numpy(np.repeat(np.arange(len(counts)), counts).astype(np.int32)),
        row_start=torch.from_numpy(start.astype(np.int32)),
        ancestry=torch.from_numpy(np.ascontiguousarray(ancestry).astype(np.int32)),
        compact=compact,
        full=False,
    )


def random_context(config: OneRecConfig, rng: np.random.Generator, items: int) -> Context:
    if config.history is None or (config.features is not None and items % 2):
        f = config.features
        assert f is not None
        shapes = {"static": (1, f.static), "short": (min(items, 6), f.short), "long": (min(items, 3), f.long)}
        return Embeddings({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    return History(np.stack([rng.integers(0, size, items) for size in config.sizes], 1).astype(np.int32))


def reference_context(config: OneRecConfig, context: Context) -> PaddedContexts:
    """The definition's inputs for one request, laid out on their own: nothing of `prepare` is used."""
    if isinstance(context, History):
        assert config.history is not None
        return pad_history([torch.from_numpy(context.codes).long()], config.history)
    assert isinstance(context, Embeddings)
    t = {name: torch.from_numpy(value) for name, value in context.tensors.items()}
    there = [torch.ones(1, len(t[name]), dtype=torch.bool) for name in ("short", "long")]
    return PaddedContexts(None, None, t["static"], t["short"].flip(0)[None], t["long"].flip(0)[None], *there)


def decode_all(
    served: OneRec, contexts: Sequence[Context], sids: Sequence[np.ndarray], rng: np.random.Generator | None
) -> list[torch.Tensor]:
    """Teacher-forced logits [N, C_t] of every step; sids[r] [rows, L]. With `rng` rows are shuffled inside their
    request at every step, so that slots are not in row order; without it the ancestry is the identity."""
    arena = arena_of(served)
    counts = [len(s) for s in sids]
    with torch.no_grad():
        assert served.encode(ragged(served, contexts), arena) is None
        base = np.concatenate(sids)
        bounds = np.cumsum([0, *counts])
        out, slots = [], np.zeros((len(base), 0), np.int64)  # slots[i, j]: where SID i's step j + 1 was written
        for t in range(1, served.steps + 1):
            permutations = [
                lo + (rng.permutation(hi - lo) if rng else np.arange(hi - lo)) for lo, hi in pairwise(bounds)
            ]
            row = np.concatenate(permutations)  # row n holds SID row[n]
            codes = base[row, t - 2] if t > 1 else np.zeros(len(row), np.int64)
            answer = served.step(t, rows_of(codes.tolist(), counts, slots[row], compact=rng is None), arena)
            assert answer.log_norm is None
            place = np.argsort(row)
            out.append(answer.logits[torch.from_numpy(place)])
            slots = np.concatenate([slots, place[:, None]], 1)
    return out


def sids_of(config: OneRecConfig, rng: np.random.Generator, count: int) -> np.ndarray:
    return np.stack([rng.integers(0, size, count) for size in config.sizes], 1)


@pytest.mark.parametrize("change", SHAPES, ids=lambda c: "-".join(c) or "base")
@pytest.mark.parametrize("shuffled", [False, True], ids=["compact", "ancestry"])
def test_every_step_of_a_ragged_batch_equals_the_definition(change, shuffled) -> None:
    config = config_of(**change)
    reference, served = pair(config)
    rng = np.random.default_rng(3)
    contexts = [random_context(config, rng, items) for items in (0, 1, 3, 4, 9, 40)]
    sids = [sids_of(config, rng, count) for count in (1, 5, 2, 0, 7, 3)]
    steps = decode_all(served, contexts, sids, rng if shuffled else None)
    start = 0
    for context, own in zip(contexts, sids, strict=True):
        with torch.no_grad():
            expected = reference(reference_context(config, context), torch.from_numpy(own[None, :, :-1]))
        for t, logits in enumerate(steps):
            part = logits[start : start + len(own)]
            assert torch.isfinite(part).all()
            torch.testing.assert_close(part, expected[t][0], rtol=0, atol=TOLERANCE)
        start += len(own)


def test_the_served_names_and_shapes_are_those_of_the_definition() -> None:
    for change in SHAPES:
        config = config_of(**change)
        reference, served = pair(config)
        expected = {name: tuple(w.shape) for name, w in reference.state_dict().items()}
        assert {spec.name: spec.shape for spec in served.weight_specs()} == expected
        assert served.bindings().keys() == dict(served.named_parameters()).keys()


def test_padding_of_the_definition_changes_nothing() -> None:
    config = config_of(context_layers=1)
    reference, _ = pair(config)
    rng = np.random.default_rng(5)
    histories = [torch.from_numpy(sids_of(config, rng, items)) for items in (0, 2, 5, 30)]
    sids = torch.from_numpy(np.stack([sids_of(config, rng, 3) for _ in histories]))[:, :, :2]
    with torch.no_grad():
        together = reference(pad_history(histories, config.history), sids)
        for index, history in enumerate(histories):
            alone = reference(pad_history([history], config.history), sids[index : index + 1])
            for one, many in zip(alone, together, strict=True):
                torch.testing.assert_close(one[0], many[index], rtol=0, atol=TOLERANCE)


def test_a_request_is_not_touched_by_its_batch_mates() -> None:
    config = config_of(kv_sets=3, context_layers=1)
    _, served = pair(config)
    rng = np.random.default_rng(1)
    contexts = [random_context(config, rng, items) for items in (5, 0, 8)]
    sids = [sids_of(config, rng, count) for count in (3, 2, 4)]
    together = decode_all(served, contexts, sids, rng)
    start = 0
    for context, own in zip(contexts, sids, strict=True):
        for one, many in zip(decode_all(served, [context], [own], None), together, strict=True):
            torch.testing.assert_close(one, many[start : start + len(own)], rtol=0, atol=TOLERANCE)
        start += len(own)


def test_tombstones_do_not_touch_other_rows() -> None:
    config = config_of()
    _, served = pair(config)
    rng = np.random.default_rng(2)
    context, own = random_context(config, rng, 6), sids_of(config, rng, 4)
    good = decode_all(served, [context], [own], None)
    arena = arena_of(served)
    with torch.no_grad():
        served.encode(ragged(served, [context]), arena)
        served.step(1, rows_of([0], [1], np.zeros((1, 0))), arena)
        codes = [*own[:, 0].tolist(), 0]
        wild = np.array([[0], [0], [0], [0], [-1]])
        second = served.step(2, rows_of(codes, [5], wild), arena)
    torch.testing.assert_close(second.logits[:4], good[1], rtol=0, atol=TOLERANCE)


def products_of(served: OneRec) -> list[torch.Tensor]:
    """From here on, the products of each block's self-attention, made once more by themselves."""
    noted = []
    for block in served.blocks:
        weight, given = block.self.qkv.weight, block.self.heads

        def heads(
            normed: torch.Tensor, *into: torch.Tensor, weight: torch.Tensor, given: Callable[..., Heads]
        ) -> Heads:
            noted.append(torch.nn.functional.linear(normed, weight))
            return given(normed, *into)

        block.self.heads = partial(heads, weight=weight, given=given)
    return noted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_slot_of_its_row_bit_for_bit_and_the_last_step_has_none(dtype: torch.dtype) -> None:
    config = config_of()
    _, served = pair(config)
    served.to(dtype)
    assert [spec.name for spec in served.state_specs() if spec.scope == "row"] == ["qkv.0", "qkv.1", "qkv.2"]
    assert {spec[1:] for spec in served.state_specs() if spec.scope == "row"} == {((12, 6), dtype, "row", 4)}
    context = random_context(config, np.random.default_rng(2), 6)
    arena = arena_of(served)
    noted = products_of(served)
    with torch.no_grad():
        served.encode(ragged(served, [context]), arena)
        for t, n in ((1, 1), (2, 5), (3, 4)):
            before = {name: state.clone() for name, state in arena.items()}
            served.step(t, rows_of([0] * n, [n], np.zeros((n, t - 1))), arena)
            own, noted[:] = noted[:], []
            for index, product in enumerate(own):
                slots, old = arena[f"qkv.{index}"], before[f"qkv.{index}"]
                if t < 3:
                    assert torch.equal(slots[t - 1, :n].flatten(1), product)
                    old[t - 1, :n] = slots[t - 1, :n]
                torch.testing.assert_close(slots, old, rtol=0, atol=0, equal_nan=True)  # and nothing else is written


def test_queries_are_of_no_use_to_a_later_step() -> None:
    config = config_of()
    _, served = pair(config)
    context = random_context(config, np.random.default_rng(2), 6)
    found = []
    for spoiled in (False, True):
        arena = arena_of(served)
        with torch.no_grad():
            served.encode(ragged(served, [context]), arena)
            for t, n in ((1, 1), (2, 5), (3, 4)):
                logits = served.step(t, rows_of([0] * n, [n], np.zeros((n, t - 1))), arena).logits
                for spec in served.state_specs():
                    if spoiled and spec.first:
                        arena[spec.name][:, :, : spec.first] = torch.nan
        found.append(logits)
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)


def test_grouped_heads_keep_keys_and_values_alone() -> None:
    _, served = pair(config_of(self_groups=2))
    rowwise = [spec for spec in served.state_specs() if spec.scope == "row"]
    assert [spec.name for spec in rowwise] == ["k.0", "v.0", "k.1", "v.1", "k.2", "v.2"]
    assert {(spec.shape, spec.first) for spec in rowwise} == {((2, 6), 0)}


# ---- search ----------------------------------------------------------------------------------------------------------


def all_leaves(reference: OneRecReference, context: PaddedContexts) -> list[tuple[float, tuple[int, ...]]]:
    """Every SID with its log-probability, best first, by brute force."""
    sids = np.array(list(product(*(range(size) for size in reference.config.sizes))))
    with torch.no_grad():
        steps = reference(context, torch.from_numpy(sids[None, :, :-1]))
    total = np.zeros(len(sids))
    for t, logits in enumerate(steps):
        total += torch.log_softmax(logits[0].double(), -1).numpy()[np.arange(len(sids)), sids[:, t]]
    return sorted(((float(s), tuple(c)) for s, c in zip(total, sids.tolist(), strict=True)), reverse=True)


def beam_search(served: OneRec, context: Context, width: int) -> list[tuple[float, tuple[int, ...]]]:
    """A beam search over the seam with append-only slots, in plain loops."""
    arena = arena_of(served, LIMITS)
    beams: list[tuple[float, tuple[int, ...], list[int]]] = [(0.0, (), [])]
    with torch.no_grad():
        served.encode(ragged(served, [context]), arena)
        for t in range(1, served.steps + 1):
            codes = [sid[-1] if sid else 0 for _, sid, _ in beams]
            ancestry = np.array([slots for _, _, slots in beams]).reshape(len(beams), t - 1)
            logits = served.step(t, rows_of(codes, [len(beams)], ancestry), arena).logits
            scores = torch.log_softmax(logits.double(), -1).tolist()
            grown = [
                (score + step, (*sid, code), [*slots, row])
                for row, ((score, sid, slots), steps) in enumerate(zip(beams, scores, strict=True))
                for code, step in enumerate(steps)
            ]
            beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return [(score, sid) for score, sid, _ in beams]


@pytest.mark.parametrize("change", [{"sizes": [8, 8, 8]}, {"sizes": [1, 7, 5], "kv_sets": 3, "self_groups": 2}])
@pytest.mark.parametrize("items", [0, 3, 20])
def test_a_beam_over_all_prefixes_is_exhaustive_search(change, items) -> None:
    config = config_of(**change)
    reference, served = pair(config, seed=items)
    context = random_context(config, np.random.default_rng(items), items)
    expected = all_leaves(reference, reference_context(config, context))
    found = beam_search(served, context, 64)
    np.testing.assert_allclose([s for s, _ in found], [s for s, _ in expected[: len(found)]], atol=1e-4)
    gaps = np.diff([s for s, _ in expected[: len(found) + 1]])
    if (gaps < -1e-4).all():
        assert [sid for _, sid in found] == [sid for _, sid in expected[: len(found)]]
    assert {sid for _, sid in found[:10]} == {sid for _, sid in expected[:10]}


# ---- what a request may bring ----------------------------------------------------------------------------------------


def test_a_long_history_keeps_its_newest_items() -> None:
    config = config_of()
    _, served = pair(config)
    codes = sids_of(config, np.random.default_rng(0), 50).astype(np.int32)
    whole, newest = (served.prepare(History(c)) for c in (codes, codes[-10:]))
    for name in ("history.short", "history.long"):
        np.testing.assert_array_equal(whole[name], newest[name])
    assert whole["history.short"].shape == (4, 3)
    assert whole["history.long"].shape == (3, 2, 3)


def test_limits_context_cuts_the_oldest_positions() -> None:
    config = config_of()
    limits = msgspec.structs.replace(LIMITS, context=6)
    _, served = pair(config, limits)
    inputs = served.prepare(History(np.zeros((50, 3), np.int32)))
    assert len(inputs["history.short"]) == 4
    assert len(inputs["history.long"]) == 1
    assert served.state_specs()[1].shape[0] == 6


@pytest.mark.parametrize(
    ("tensors", "path", "words"),
    [
        ({"short": (2, 5)}, "$.context.embeddings", "`static` is missing"),
        (
            {"static": (1, 7), "short": (2, 5), "long": (1, 3), "extra": (1, 1)},
            "$.context.embeddings.extra",
            "no input",
        ),
        ({"static": (1, 7), "short": (2, 4), "long": (1, 3)}, "$.context.embeddings.short", "[2, 4]"),
        ({"static": (1, 7), "short": (7, 5), "long": (1, 3)}, "$.context.embeddings.short", "at most 6"),
        ({"static": (2, 7), "short": (2, 5), "long": (1, 3)}, "$.context.embeddings.static", "exactly 1"),
        ({"static": (7,), "short": (2, 5), "long": (1, 3)}, "$.context.embeddings.static", "[7]"),
    ],
)
def test_bad_embeddings_are_refused_with_their_path(tensors, path, words) -> None:
    _, served = pair(config_of(features=FEATURES))
    with pytest.raises(InvalidRequest) as caught:
        served.prepare(Embeddings({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}))
    assert caught.value.path == path
    assert words in caught.value.message


def test_numbers_that_are_not_finite_are_refused_with_their_place() -> None:
    _, served = pair(config_of(features=FEATURES))
    tensors = {"static": np.zeros((1, 7), np.float32), "short": np.zeros((3, 5), np.float32)}
    tensors["short"][2, 1] = np.nan
    with pytest.raises(InvalidRequest, match=r"\[2, 1\]") as caught:
        served.prepare(Embeddings({**tensors, "long": np.zeros((0, 3), np.float32)}))
    assert caught.value.path == "$.context.embeddings.short"


def test_contexts_that_the_model_does_not_take_are_refused() -> None:
    _, by_history = pair(config_of())
    _, by_features = pair(config_of(history=None, features=FEATURES))
    refused = [
        (by_history, TokenIds((1, 2)), "$.context.tokens"),
        (by_history, Embeddings({}), "$.context.embeddings"),
        (by_features, History(np.zeros((1, 3), np.int32)), "$.context.history"),
    ]
    for served, context, path in refused:
        with pytest.raises(InvalidRequest) as caught:
            served.prepare(context)
        assert caught.value.path == path


# ---- what a config.json may say --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cross_groups": 3}, "cross_groups"),
        ({"self_groups": 3}, "self_groups"),
        ({"kv_sets": 4}, "kv_sets"),
        ({"kv_split": 3}, "kv_split"),
        ({"history": None}, "history"),
        ({"history": {"short": 4, "pool": 2}}, "history.pool"),
        ({"history": {"short": 4, "prefix": 1}}, "history.prefix"),
        ({"history": {"short": 4, "prefix": 4}}, "history.prefix"),
        ({"sizes": [5000, 5000], "history": {"short": 4, "prefix": 2}}, "history.prefix"),
        ({"features": {"short": 4}}, "features.short_positions"),
        ({"features": {}}, "features"),
        ({"family": "qwen3"}, "family"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures[0]"),
        ({"depth": 4}, ""),
        ({"experts": 4}, "experts"),
        ({"experts": {**EXPERTS, "top": 6}}, "experts.top"),
        ({"experts": {**EXPERTS, "dense": 3}}, "experts.dense"),
        ({"experts": {**EXPERTS, "scores": "softmax", "bias": True}}, "experts.bias"),
        ({"experts": {**EXPERTS, "routed": 5000}}, "experts.routed"),
        ({"d_model": "wide"}, "d_model"),
        ({"layers": 4097}, "layers"),
        ({"context_layers": 4097}, "context_layers"),
    ],
)
def test_a_config_that_contradicts_itself_is_rejected_with_the_field(change, field) -> None:
    with pytest.raises(Rejected) as caught:
        config_of(**change)
    assert caught.value.location == (f"config.json: {field}" if field else "config.json")


@pytest.mark.parametrize(
    ("sid", "limits", "location"),
    [
        (SidConfig(sizes=(5, 8)), LIMITS, "config.json: sizes"),
        (SidConfig(sizes=(5, 8, 3), token_base=(0, 5, 13)), LIMITS, "deployment.toml: sid.token_base"),
        (SidConfig(sizes=(5, 8, 3)), Limits(widths=(8, 8, 8), context=1), "deployment.toml: limits.context"),
    ],
)
def test_a_deployment_that_does_not_fit_is_rejected_with_its_place(sid, limits, location) -> None:
    with pytest.raises(Rejected) as caught:
        OneRec.build(ModelFiles(BASE, Path(), {}), sid, limits, torch.float32)
    assert caught.value.location == location
