import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.config import Limits, SidConfig
from app.core import Embeddings, History, TokenIds
from app.engine.registry import family
from app.errors import Fault, InvalidRequest, Rejected
from tests.engine import tiny
from tests.engine.tiny import BASES, SIZES

PROMPTS = [(3, 4, 5, 6, 7), (9,), tuple(range(3, 23)), (9, 8, 7, 6, 5)]
WIDTHS = [4, 1, 6, 3]
TIGHT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "qwen3_moe"])
def engine(request, tmp_path_factory):
    kind = request.param
    directory = tiny.write(tmp_path_factory.mktemp(kind), kind, tie_word_embeddings=kind == "qwen2")
    return tiny.engine(directory, kind)


def decode(engine, prompts, paths, arena, *, place=None, **how):
    """Teacher-forced decode of paths[r] [beams, L - 1] for each request: the outputs of steps 1..L.

    place  physical order of the rows of steps >= 2 (default: as they come); outputs are in the order of the paths
    """
    widths, codes = [len(p) for p in paths], np.concatenate(paths)
    place = np.arange(len(codes)) if place is None else place
    outputs = [engine.encode(tiny.contexts(engine, prompts), arena)]
    for t in range(2, engine.steps + 1):
        own = torch.from_numpy(np.tile(np.arange(len(codes)), (t - 1, 1)).T.copy())
        rows = tiny.rows(widths, codes[place, t - 2].tolist(), own, **how)
        output = engine.step(t, rows, arena)
        back = torch.from_numpy(np.argsort(place))
        outputs.append(output._replace(
            logits=output.logits[back], log_norm=None if output.log_norm is None else output.log_norm[back]
        ))  # fmt: skip
    return outputs


def random_paths(seed=0, widths=WIDTHS):
    rng = np.random.default_rng(seed)
    return [np.stack([rng.integers(0, size, width) for size in SIZES[:-1]], 1) for width in widths]


def test_a_step_predicts_what_a_longer_prompt_predicts(engine, tmp_path):
    """Step t over a prefix = the context stage over the prompt with that prefix behind it, by another code path."""
    arena, other = engine.new_arena(tiny.LIMITS), engine.new_arena(tiny.LIMITS)
    paths = random_paths()
    outputs = decode(engine, PROMPTS, paths, arena)
    n = 0
    for prompt, beams in zip(PROMPTS, paths, strict=True):
        for path in beams:
            tokens = [base + code for base, code in zip(BASES, path, strict=False)]
            for t in (2, 3):
                whole = (*prompt, 2, *tokens[: t - 1])[-24:]
                if len(whole) < len(prompt) + t:
                    continue  # does not fit the limits
                context = {"tokens": tiny.contexts(engine, [whole[:-1]])["tokens"]}
                context["tokens"].values[-1] = whole[-1]  # instead of the prefix that `prepare` has put there
                expected = engine.encode(context, other)
                torch.testing.assert_close(outputs[t - 1].log_norm[n], expected.log_norm[0], **TIGHT)
            n += 1


def test_slots_by_ancestry_equal_compacted_slots(engine):
    """Beams that share ancestors: slot (2, n) read through the index = the same slots moved to the rows' own places."""
    arena, moved = engine.new_arena(tiny.LIMITS), engine.new_arena(tiny.LIMITS)
    paths, parents = random_paths(3), torch.tensor([3, 3, 0, 3, 4, 9, 9, 5, 5, 8, 7, 11, 11, 13])
    codes = torch.randint(0, SIZES[1], (14,)).tolist()
    decode(engine, PROMPTS, paths, arena)
    for name, tensor in arena.items():
        moved[name].copy_(tensor)
        if name[:2] in {"k.", "v."}:
            moved[name][1, :14] = tensor[1, parents]
    ancestry = torch.stack([torch.zeros(14, dtype=torch.int64), parents], 1)
    by_index = engine.step(3, tiny.rows(WIDTHS, codes, ancestry), arena)
    identity = torch.arange(14).unsqueeze(1).expand(14, 2)
    by_place = engine.step(3, tiny.rows(WIDTHS, codes, identity, compact=True), moved)
    torch.testing.assert_close(by_index.logits, by_place.logits, **TIGHT)
    torch.testing.assert_close(by_index.log_norm, by_place.log_norm, **TIGHT)


def test_batch_mates_do_not_change_a_request(engine):
    arena, paths = engine.new_arena(tiny.LIMITS), random_paths()
    together = decode(engine, PROMPTS, paths, arena)
    first = 0
    for r, (prompt, beams) in enumerate(zip(PROMPTS, paths, strict=True)):
        alone = decode(engine, [prompt], [beams], engine.new_arena(tiny.LIMITS))
        own = slice(first, first + len(beams))
        torch.testing.assert_close(together[0].logits[r], alone[0].logits[0], **TIGHT)
        for many, one in zip(together[1:], alone[1:], strict=True):
            torch.testing.assert_close(many.logits[own], one.logits, **TIGHT)
            torch.testing.assert_close(many.log_norm[own], one.log_norm, **TIGHT)
        first += len(beams)


def test_garbage_in_the_arena_and_in_tombstones_reaches_no_live_row(engine):
    arena, paths = engine.new_arena(tiny.LIMITS), random_paths()
    clean = decode(engine, PROMPTS, paths, arena)
    dirty = engine.new_arena(tiny.LIMITS)
    for tensor in dirty.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 2**31 - 1)
    outputs = decode(engine, PROMPTS, paths, dirty)
    for output, expected in zip(outputs, clean, strict=True):
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0)
    ancestry = torch.arange(14).unsqueeze(1).repeat(1, 2)
    ancestry[[1, 7, 13]] = torch.tensor([2**30, -5])
    for name in ("k.0", "v.1"):
        dirty[name][1, [1, 7, 13]] = torch.inf
    codes = np.concatenate(paths)[:, 1]
    codes[[1, 7, 13]] = -1
    live = [n for n in range(14) if n not in {1, 7, 13}]
    again = engine.step(3, tiny.rows(WIDTHS, codes.tolist(), ancestry), dirty)
    # rows that share an expert are one product, whose size decides the order of its sums
    apart = 1e-6 if any(engine._family.config.experts) else 0
    torch.testing.assert_close(again.logits[live], clean[2].logits[live], rtol=apart, atol=apart)


def test_rows_in_another_physical_order_give_the_same_logits(engine):
    paths, rng = random_paths(), np.random.default_rng(4)
    starts = np.cumsum([0, *WIDTHS])
    place = np.concatenate([first + rng.permutation(width) for first, width in zip(starts, WIDTHS, strict=False)])
    straight = decode(engine, PROMPTS, paths, engine.new_arena(tiny.LIMITS))
    shuffled = decode(engine, PROMPTS, paths, engine.new_arena(tiny.LIMITS), place=place)
    for one, other in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(one.logits, other.logits, **TIGHT)
        torch.testing.assert_close(one.log_norm, other.log_norm, **TIGHT)


def test_the_norm_over_the_vocabulary_comes_only_where_it_is_asked_for(engine):
    arena = engine.new_arena(tiny.LIMITS)
    with_norm = decode(engine, PROMPTS, random_paths(), arena)
    without = decode(engine, PROMPTS, random_paths(), arena, full=False)
    assert without[0].log_norm is not None, "the context stage serves every policy of the batch"
    assert [output.log_norm for output in without[1:]] == [None, None]
    for one, other in zip(with_norm, without, strict=True):
        torch.testing.assert_close(one.logits, other.logits)  # another product, so another rounding
        assert one.log_norm.dtype == torch.float32


def test_an_empty_request_of_a_batch_leaves_the_others_alone(engine):
    """A request whose rows have all left: width 0."""
    arena, paths = engine.new_arena(tiny.LIMITS), random_paths()
    whole = decode(engine, PROMPTS, paths, arena)
    paths[2] = paths[2][:0]
    rest = decode(engine, PROMPTS, paths, arena)
    keep = [0, 1, 2, 3, 4, 11, 12, 13]
    torch.testing.assert_close(rest[2].logits, whole[2].logits[keep], **TIGHT)


class Sizes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_context_is_never_gathered_per_row(tmp_path):
    kind, limits = "qwen3", Limits(widths=(512,) * 3, rows=1024, batch=2, context=96)
    engine = tiny.engine(tiny.write(tmp_path, kind), kind, limits=limits)
    arena, prompts, widths = engine.new_arena(limits), [tuple(range(3, 23)) * 4] * 2, [500, 500]
    engine.encode(tiny.contexts(engine, prompts), arena)
    n, length, heads, dim = sum(widths), 81, 4, 8
    rows = tiny.rows(widths, [0] * n, torch.arange(n).unsqueeze(1).repeat(1, 2), full=False)
    with Sizes() as sizes:
        engine.step(3, rows, arena)
    assert sizes.calls > 20
    assert sizes.largest < n * length * heads * dim // 8


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bit_engines_stay_close_and_give_float32_logits_on_a_cpu(precision, tmp_path):
    tiny.write(tmp_path)
    exact, rounded = tiny.engine(tmp_path), tiny.engine(tmp_path, precision=precision)
    one = decode(exact, PROMPTS, random_paths(), exact.new_arena(tiny.LIMITS))
    other = decode(rounded, PROMPTS, random_paths(), rounded.new_arena(tiny.LIMITS))
    for a, b in zip(one, other, strict=True):
        assert b.logits.dtype == torch.float32
        torch.testing.assert_close(a.logits, b.logits, atol=0.15, rtol=0.1)
        torch.testing.assert_close(a.log_norm, b.log_norm, atol=0.1, rtol=0.02)


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_a_history_becomes_the_sid_tokens_of_its_newest_items_and_the_prefix(engine):
    codes = np.arange(30, dtype=np.int32).reshape(10, 3) % 5
    tokens = engine.prepare(History(codes))["tokens"]
    newest = codes[-7:] + np.array(BASES)  # 7 items of 3 tokens and 1 prefix token fit 24 positions
    assert tokens.tolist() == [*newest.reshape(-1).tolist(), 2]
    assert tokens.dtype == np.int32
    assert engine.prepare(History(codes[:1]))["tokens"].tolist() == [*(codes[0] + np.array(BASES)).tolist(), 2]


def test_tokens_are_taken_as_they_are_and_the_prefix_follows(engine):
    assert engine.prepare(TokenIds((5, 6)))["tokens"].tolist() == [5, 6, 2]
    assert engine.prepare(TokenIds(()))["tokens"].tolist() == [2], "a prefix alone is a prompt"
    assert len(engine.prepare(TokenIds((39,) * 24))["tokens"]) == engine.input_specs()[0].positions == 25


@pytest.mark.parametrize(
    ("ids", "path"),
    [
        ((3,) * 25, "$.context.tokens"),
        ((3, 40), "$.context.tokens[1]"),
        ((3, 4, -1, 99), "$.context.tokens[2]"),
        ((2**70,), "$.context.tokens[0]"),
    ],
)
def test_a_bad_prompt_is_the_clients_fault_with_its_place(engine, ids, path):
    with pytest.raises(InvalidRequest) as caught:
        engine.prepare(TokenIds(ids))
    assert caught.value.path == path


def test_other_contexts_and_empty_prompts_are_refused(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path), sid=SidConfig(sizes=SIZES, token_base=BASES))
    for context in (Embeddings({}), TokenIds(()), History(np.empty((0, 3), np.int32))):
        with pytest.raises(InvalidRequest) as caught:
            engine.prepare(context)
        assert caught.value.path == "$.context"


def test_codes_without_a_token_are_told_and_never_written(tmp_path):
    tiny.write(tmp_path)
    tokens = [[10, -1, 12, 11, 14], [15, 16, 17, 18, 19, 20], [-1, 22, 23, 24, 25, 26, -1]]
    (tmp_path / "sid_tokens.json").write_text(json.dumps(tokens))
    engine = tiny.engine(tmp_path, sid=SidConfig(sizes=SIZES, tokens="file", prefix=(2,)))
    assert engine.missing_tokens() == ((1,), (), (0, 6))
    outputs = decode(engine, PROMPTS, random_paths(), engine.new_arena(tiny.LIMITS))
    assert [torch.isneginf(output.logits).any(0).nonzero().view(-1).tolist() for output in outputs] == [[1], [], [0, 6]]
    assert all(torch.isfinite(output.log_norm).all() for output in outputs)
    plain = tiny.engine(tmp_path)
    expected = decode(plain, PROMPTS, random_paths(), plain.new_arena(tiny.LIMITS))[0]
    torch.testing.assert_close(outputs[0].logits[:, [0, 2, 3, 4]], expected.logits[:, [0, 2, 1, 4]], **TIGHT)
    with pytest.raises(Fault, match="a code without a token"):
        engine.prepare(History(np.array([[1, 0, 1]], np.int32)))


def test_a_deployment_that_does_not_fit_the_model_is_refused(tmp_path):
    tiny.write(tmp_path)
    faults = [
        ({"sid": SidConfig(sizes=SIZES, token_base=BASES, prefix=(40,))}, "deployment.toml: sid.prefix"),
        ({"limits": Limits(widths=(1,) * 3, context=3)}, "deployment.toml: limits.context"),
        ({"limits": Limits(widths=(1,) * 3, context=126)}, "config.json: max_position_embeddings"),
        ({"sid": SidConfig(sizes=(5, 6, 20), token_base=BASES)}, "deployment.toml: sid.token_base"),
    ]
    for change, location in faults:
        with pytest.raises(Rejected) as caught:
            tiny.engine(tmp_path, **change)
        assert caught.value.location == location
    with pytest.raises(Rejected) as caught:
        tiny.engine(tmp_path, "qwen2")
    assert caught.value.location == "config.json: model_type"


def test_the_weight_specs_are_the_tensors_of_the_artifact(tmp_path):
    for kind in ("qwen2", "qwen3"):
        engine = tiny.engine(tiny.write(tmp_path / kind, kind), kind)
        specs = {spec.name: spec.shape for spec in engine.weight_specs()}
        assert specs == {name: tuple(tensor.shape) for name, tensor in tiny.tensors(tiny.config(kind)).items()}
    assert family("qwen3").name == "qwen3"
