from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.config import Deployment, Limits, Server, SidConfig
from app.core import TokenIds
from app.errors import Rejected
from app.ops import gdn
from tests import support
from tests.engine import hybrid, tiny
from tests.engine.families.test_qwen import TIGHT, WIDTHS, decode, random_paths
from tests.engine.tiny import BASES, SIZES

PROMPTS = [(3, 4, 5, 6, 7), (9,), tuple(range(3, 23)), (9, 8)]
KINDS = list(hybrid.CLASSES)


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    directory = hybrid.write(tmp_path_factory.mktemp(request.param), request.param)
    return hybrid.engine(directory)


def test_a_step_predicts_what_a_longer_prompt_predicts(engine):
    """Replay and the rows' windows = the chunked rule and the convolution over a prompt with the prefix behind it."""
    arena, other = engine.new_arena(tiny.LIMITS), engine.new_arena(tiny.LIMITS)
    paths, checked = random_paths(), 0
    outputs = decode(engine, PROMPTS, paths, arena)
    n = 0
    for prompt, beams in zip(PROMPTS, paths, strict=True):
        for path in beams:
            tokens = [base + code for base, code in zip(BASES, path, strict=False)]
            for t in (2, 3):
                whole = (*prompt, 2, *tokens[: t - 1])
                context = {"tokens": tiny.contexts(engine, [whole[:-1]])["tokens"]}
                context["tokens"].values[-1] = whole[-1]  # instead of the prefix that `prepare` has put there
                expected = engine.encode(context, other)
                torch.testing.assert_close(outputs[t - 1].log_norm[n], expected.log_norm[0], **TIGHT)
                checked += 1
            n += 1
    assert checked == 28


def test_slots_by_ancestry_equal_compacted_slots(engine):
    arena, moved = engine.new_arena(tiny.LIMITS), engine.new_arena(tiny.LIMITS)
    paths, parents = random_paths(3), torch.tensor([3, 3, 0, 3, 4, 9, 9, 5, 5, 8, 7, 11, 11, 13])
    codes = torch.randint(0, SIZES[1], (14,)).tolist()
    decode(engine, PROMPTS, paths, arena)
    rowwise = {spec.name for spec in engine.state_specs() if spec.scope == "row"}
    for name, tensor in arena.items():
        moved[name].copy_(tensor)
        if name in rowwise:
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
    for spec in engine.state_specs():
        if spec.scope == "row":
            dirty[f"{spec.name}"][1, [1, 7, 13]] = torch.inf
    codes = np.concatenate(paths)[:, 1]
    codes[[1, 7, 13]] = -1
    live = [n for n in range(14) if n not in {1, 7, 13}]
    again = engine.step(3, tiny.rows(WIDTHS, codes.tolist(), ancestry), dirty)
    torch.testing.assert_close(again.logits[live], clean[2].logits[live], rtol=0, atol=0)


def test_rows_in_another_physical_order_give_the_same_logits(engine):
    paths, rng = random_paths(), np.random.default_rng(4)
    starts = np.cumsum([0, *WIDTHS])
    place = np.concatenate([first + rng.permutation(width) for first, width in zip(starts, WIDTHS, strict=False)])
    straight = decode(engine, PROMPTS, paths, engine.new_arena(tiny.LIMITS))
    shuffled = decode(engine, PROMPTS, paths, engine.new_arena(tiny.LIMITS), place=place)
    for one, other in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(one.logits, other.logits, **TIGHT)


def test_an_empty_request_of_a_batch_leaves_the_others_alone(engine):
    arena, paths = engine.new_arena(tiny.LIMITS), random_paths()
    whole = decode(engine, PROMPTS, paths, arena)
    paths[2] = paths[2][:0]
    rest = decode(engine, PROMPTS, paths, arena)
    keep = [0, 1, 2, 3, 4, 11, 12, 13]
    torch.testing.assert_close(rest[2].logits, whole[2].logits[keep], **TIGHT)


def test_a_slot_is_written_once_by_its_own_step(engine):
    arena, paths = engine.new_arena(tiny.LIMITS), random_paths()
    rowwise = [spec.name for spec in engine.state_specs() if spec.scope == "row"]
    engine.encode(tiny.contexts(engine, PROMPTS), arena)
    for name in rowwise:
        arena[name].fill_(7.0)
    before = {name: tensor.clone() for name, tensor in arena.items()}
    codes, own = np.concatenate(paths), torch.arange(14)
    for t in (2, 3):
        ancestry = torch.zeros(14, t - 1) + own.unsqueeze(1)
        engine.step(t, tiny.rows(WIDTHS, codes[:, t - 2].tolist(), ancestry), arena)
        for name, tensor in arena.items():
            changed = tensor != before[name]
            if t == 2 and name in rowwise:
                assert changed[1, :14].any() and not changed[0].any() and not changed[1, 14:].any()
            else:
                assert not changed.any(), f"step {t} changed {name}"
            before[name] = tensor.clone()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bit_engines_stay_close(precision, tmp_path):
    hybrid.write(tmp_path)
    exact, rounded = hybrid.engine(tmp_path), hybrid.engine(tmp_path, precision=precision)
    one = decode(exact, PROMPTS, random_paths(), exact.new_arena(tiny.LIMITS))
    other = decode(rounded, PROMPTS, random_paths(), rounded.new_arena(tiny.LIMITS))
    dtypes = {spec.name: spec.dtype for spec in rounded.state_specs()}
    assert dtypes["s_ctx.0"] == dtypes["alpha.0"] == torch.float32
    assert dtypes["delta.0"] == torch.float16
    assert dtypes["delta_k.0"] == getattr(torch, precision)
    assert dtypes["delta_norm.0"] == torch.float32
    for a, b in zip(one, other, strict=True):
        assert b.logits.dtype == torch.float32
        error = (a.logits - b.logits).abs().mean() / a.logits.std()
        assert error < (0.15 if precision == "bfloat16" else 0.02), "weights this large amplify what 16 bits round"


# ---- no state of a beam ---------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that one new tensor had, and the operators' number."""

    def __init__(self):
        super().__init__()
        self.elements, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return out


BIG = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention"] * 2,
}


@pytest.mark.parametrize("compact", [False, True], ids=["ancestry", "compaction"])
@pytest.mark.parametrize("heads", [(4, 4), (2, 8)])
def test_no_beam_ever_has_a_state(compact, heads, tmp_path):
    hk, hv = heads
    hybrid.write(tmp_path, linear_num_key_heads=hk, linear_num_value_heads=hv, **BIG)
    limits = Limits(widths=(512,) * 3, rows=1024, batch=3, context=24)
    engine, widths = hybrid.engine(tmp_path, limits=limits), [400, 400, 200]
    arena, n = engine.new_arena(limits), sum(widths)
    engine.encode(tiny.contexts(engine, PROMPTS[:3]), arena)
    ancestry = torch.arange(n).unsqueeze(1)
    with Largest() as most:
        engine.step(2, tiny.rows(widths, [0] * n, ancestry, compact=compact, full=False), arena)
        engine.step(3, tiny.rows(widths, [0] * n, ancestry.repeat(1, 2), compact=compact, full=False), arena)
    assert most.calls > 40
    assert most.elements <= 4 * n * hv * 32, "vectors of a row, never a matrix"
    assert most.elements < n * hv * 32 * 32 // 4


def test_the_number_of_operators_does_not_grow_with_rows(tmp_path):
    hybrid.write(tmp_path)
    limits = Limits(widths=(512,) * 3, rows=1024, batch=2, context=24)
    engine = hybrid.engine(tmp_path, limits=limits)
    arena, calls = engine.new_arena(limits), []
    engine.encode(tiny.contexts(engine, PROMPTS[:2]), arena)
    for width in (5, 500):
        n = 2 * width
        rows = tiny.rows([width] * 2, [0] * n, torch.arange(n).unsqueeze(1).repeat(1, 2))
        with Largest() as mode:
            engine.step(3, rows, arena)
        calls.append(mode.calls)
    assert calls[0] == calls[1]


# ---- through the step loop ------------------------------------------------------------------------------------------

LONG, LONG_BASES = (4, 4, 4, 4), (10, 14, 18, 22)
EPS = 3e-4


def served(directory: Path, seed: int = 0, items: int = 60, **changes):
    """A deployment of a random hybrid with four steps, its catalogue, and its snapshot."""
    hybrid.write(directory, seed=seed, layer_types=["linear_attention"] * 2, num_hidden_layers=2, **changes)
    sid = SidConfig(sizes=LONG, token_base=LONG_BASES, prefix=(2,))
    limits = Limits(widths=(64,) * 4, rows=1024, batch=4, context=24, k=100)
    deployment = Deployment(family="qwen3_5", sid=sid, device="cpu", limits=limits, server=Server(policy_override=True))
    engine = hybrid.engine(directory, sid, limits)
    vocab = support.catalogue(support.random_sids(LONG, items, seed), LONG)
    return deployment, vocab, support.snapshot_of(engine, vocab, deployment)


def ask(deployment, snapshot, prompts, transition="ancestry"):
    """One batch of prompts: each request's items as {SID: score}, best first."""
    context = [TokenIds(prompt) for prompt in prompts]
    jobs = [support.job_of(snapshot, deployment, context=one, k=100) for one in context]
    ranked = support.run_batch(jobs, transition)
    return [dict(zip(map(tuple, one.sids.tolist()), one.scores.tolist(), strict=True)) for one in ranked]


def test_both_transitions_give_the_same_answers(tmp_path):
    deployment, _, snapshot = served(tmp_path)
    prompts = [(9, 4, 11), (5,), (6, 7, 8, 9, 10, 11)]
    append, moved = (ask(deployment, snapshot, prompts, how) for how in ("ancestry", "compaction"))
    for one, other in zip(append, moved, strict=True):
        assert list(one) == list(other)
        np.testing.assert_array_equal(list(one.values()), list(other.values()))
        assert len(one) == 60


def test_a_history_is_served_as_its_tokens(tmp_path):
    deployment, vocab, snapshot = served(tmp_path)
    tokens = [base + int(code) for item in (3, 7) for base, code in zip(LONG_BASES, vocab.codes[item], strict=True)]
    by_item = support.run_batch([support.job_of(snapshot, deployment, ("i3", "i7"), k=100)])[0]
    assert [tuple(sid) for sid in by_item.sids.tolist()] == list(ask(deployment, snapshot, [tuple(tokens)])[0])


def disagreement(directory: Path, seed: int) -> float:
    """The thinned-catalogue relation: an item's score depends neither on what else the catalogue lists nor on
    batch-mates. The largest difference of a score between the whole catalogue and thinned ones, with other mates."""
    deployment, vocab, snapshot = served(directory, seed)
    prompt = (9, 4, 11, 6)
    whole = ask(deployment, snapshot, [prompt, (5, 6, 7)])[0]
    worst = 0.0
    for item in range(0, len(vocab), 20):
        first = vocab.codes[:, 0] == vocab.codes[item, 0]
        others = [np.flatnonzero(vocab.codes[:, 0] == c)[0] for c in np.unique(vocab.codes[~first, 0])]
        kept = np.sort(np.concatenate((np.flatnonzero(first), others)).astype(int))
        thin = support.snapshot_of(snapshot.engine, support.catalogue(vocab.codes[kept], LONG), deployment)
        thinned = ask(deployment, thin, [prompt, (8, 12, 13, 5, item % 7 + 3)])[0]
        worst = max(worst, *(abs(score - whole[sid]) for sid, score in thinned.items()))
    return worst


def identity(ancestry):
    return torch.arange(len(ancestry)).unsqueeze(1).expand(-1, ancestry.shape[1])


def twice(ancestry):
    """Every row takes the slots of the row that its parent's place now holds."""
    return ancestry[ancestry[:, -1:].long().clamp(0, len(ancestry) - 1).squeeze(1)]


def not_reordered(monkeypatch):
    right = gdn.replay
    monkeypatch.setattr(gdn, "replay", lambda *x, ancestry, **how: right(*x, ancestry=identity(ancestry), **how))


def reordered_twice(monkeypatch):
    right = gdn.replay
    monkeypatch.setattr(gdn, "replay", lambda *x, ancestry, **how: right(*x, ancestry=twice(ancestry), **how))


def leaking_state(monkeypatch):
    """Every request decodes from the state of another request of its batch."""
    right = gdn.replay
    monkeypatch.setattr(gdn, "replay", lambda *x, **how: right(*x[:5], x[5].roll(1, 0), *x[6:], **how))


def leaking_prompt(monkeypatch):
    """The prompts of a batch are one sequence to the recurrence."""
    right = gdn.chunked_delta_rule

    def leak(*x):
        o, state = right(*x)
        return o, state + state.roll(1, 0)

    monkeypatch.setattr(gdn, "chunked_delta_rule", leak)


def windows_of_other_beams(monkeypatch):
    right = gdn.window_convolution
    monkeypatch.setattr(
        gdn, "window_convolution", lambda *x, ancestry, **how: right(*x, ancestry=ancestry.roll(1, 0), **how)
    )


def windows_not_reordered(monkeypatch):
    right = gdn.window_convolution
    monkeypatch.setattr(
        gdn, "window_convolution", lambda *x, ancestry, **how: right(*x, ancestry=identity(ancestry), **how)
    )


FAULTS = [
    not_reordered, reordered_twice, leaking_state, leaking_prompt, windows_of_other_beams, windows_not_reordered,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_an_items_score_depends_neither_on_the_catalogue_nor_on_batch_mates(seed, tmp_path):
    assert disagreement(tmp_path, seed) < 2e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_state_is_caught(fault, seed, tmp_path, monkeypatch):
    fault(monkeypatch)
    assert disagreement(tmp_path, seed) > 1e-2


# ---- what is read and refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_specs_are_the_tensors_of_the_text_model(kind, tmp_path):
    engine = hybrid.engine(hybrid.write(tmp_path, kind))
    specs = {spec.name: spec.shape for spec in engine.weight_specs()}
    assert specs == {name: tuple(tensor.shape) for name, tensor in hybrid.tensors(hybrid.config(kind)).items()}


def test_what_is_not_read_is_told(tmp_path):
    engine = hybrid.engine(hybrid.write(tmp_path, "qwen3_5"))
    assert engine.unread == ("model.visual.pos_embed.weight", "mtp.norm.weight")


def test_fused_projections_are_taken_apart_at_load(tmp_path):
    """The same model, stored as Qwen3.5 has it and as Qwen3-Next has it."""
    plain = hybrid.tensors(hybrid.config())
    fused = hybrid.tensors(hybrid.config("qwen3_next"))
    for name in fused:
        if "in_proj" not in name:
            fused[name] = plain[name]
            continue
        stem = name.rpartition("in_proj")[0]
        q, k, v = plain[f"{stem}in_proj_qkv.weight"].split([16, 16, 24])
        parts = [q, k, v, plain[f"{stem}in_proj_z.weight"]]
        if name.endswith("ba.weight"):
            parts = [plain[f"{stem}in_proj_{x}.weight"] for x in "ba"]
        fused[name] = torch.cat([part.view(2, -1, 16) for part in parts], 1).reshape(-1, 16)
    hybrid.write(tmp_path / "plain")
    hybrid.write(tmp_path / "fused", "qwen3_next")
    hybrid.save_file(fused, tmp_path / "fused" / "model.safetensors")
    one, other = (hybrid.engine(tmp_path / name) for name in ("plain", "fused"))
    outputs = [decode(e, PROMPTS, random_paths(), e.new_arena(tiny.LIMITS)) for e in (one, other)]
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_the_state_is_named_and_sized_as_the_paper_has_it(tmp_path):
    engine = hybrid.engine(hybrid.write(tmp_path))
    specs = {spec.name: (spec.shape, spec.scope) for spec in engine.state_specs()}
    assert specs["s_ctx.0"] == ((4, 8, 6), "request")
    assert specs["conv_tail.0"] == ((3, 56), "request")
    assert specs["prompt_k.1"] == ((25, 2, 8), "request")
    record = {"alpha.2": (4,), "delta.2": (4, 6), "delta_k.2": (2, 8), "delta_norm.2": (2,), "conv_input.2": (56,)}
    assert {name: specs[name] for name in record} == {name: (shape, "row") for name, shape in record.items()}
    assert not [name for name, (_, scope) in specs.items() if scope == "row" and name.startswith("s_ctx")]


REFUSED = [
    ("qwen3_5_text", {"hidden_size": ...}, "hidden_size", "missing required field `hidden_size`"),
    ("qwen3_5_text", {"rms_norm_eps": 2.0}, "rms_norm_eps", "Expected `float` < 1"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act", "only `silu`"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate", "output gate"),
    ("qwen3_5_text", {"quantization_config": {"bits": 4}}, "quantization_config", "not served"),
    ("qwen3_5_text", {"architectures": ["Qwen3_5ForSequenceClassification"]}, "architectures", "Qwen3_5ForCausalLM"),
    ("qwen3_5_text", {"num_key_value_heads": 3}, "num_key_value_heads", "4 query heads are not a multiple of 3"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_key_heads", "4 value heads are not a multiple of 3"),
    ("qwen3_5_text", {"max_position_embeddings": 26}, "max_position_embeddings", "take 27"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "layer_types", "1 entry for 3 layers"),
    ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types", "`sliding_attention` is not served"),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type", "`yarn`"),
    ("qwen3_5_text", {"rope_parameters": {"beta": 1}}, "rope_parameters.beta", "not known"),
    ("qwen3_5_text", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor", "are 0 dims"),
    ("qwen3_5_text", {"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta", "no positive number"),
    ("qwen3_5_text", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor", "0.5 beside it"),
    ("qwen3_5_text", {"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta", "no positive number"),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": [[]]}}, "rope_parameters.rope_type", "`[[]]`"),
    ("qwen3_5_text", {"num_hidden_layers": 4097}, "num_hidden_layers", "Expected `int` <= 4096"),
    ("qwen3_5_text", {"head_dim": 2**30}, "head_dim", "Expected `int` <= 65536"),
    ("qwen3_5", {"hidden_size": "16"}, "text_config.hidden_size", "Expected `int`"),
    ("qwen3_5", {"layer_types": []}, "text_config.layer_types", "0 entries"),
    ("qwen3_5", {"model_type": "qwen3_5_moe_text"}, "text_config.model_type", "only `qwen3_5_text`"),
    ("qwen3_next", {"num_experts": 8}, "num_experts_per_tok", "10 of 8 experts"),
    ("qwen3_next", {"num_experts": "8"}, "num_experts", "Expected `int"),
    ("qwen3_next", {"num_experts": ..., "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size", "0;"),
    ("qwen3_5_text", {"num_experts": 8}, "num_experts", "`qwen3_5_text` with routed experts is not served"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "field", "message"), REFUSED)
def test_a_configuration_that_is_not_served_is_refused_with_its_field(kind, change, field, message, tmp_path):
    hybrid.write(tmp_path, kind)
    (tmp_path / "config.json").write_text(hybrid.json.dumps(hybrid.config(kind, **change)))
    with pytest.raises(Rejected) as caught:
        hybrid.engine(tmp_path)
    assert caught.value.location == f"config.json: {field}"
    assert message in str(caught.value)


def test_another_model_is_refused(tmp_path):
    hybrid.write(tmp_path)
    (tmp_path / "config.json").write_text(hybrid.json.dumps(hybrid.config() | {"model_type": "qwen3_5_moe"}))
    with pytest.raises(Rejected, match="takes `qwen3_5_text`, `qwen3_5`, `qwen3_next`"):
        hybrid.engine(tmp_path)


def test_experts_in_no_layer_are_no_experts(tmp_path):
    whole = {"num_experts": 8, "decoder_sparse_step": 4, "mlp_only_layers": [0, 1, 2]}
    hybrid.engine(hybrid.write(tmp_path, "qwen3_next", **whole))


def test_a_tied_head_is_the_embedding(tmp_path):
    engine = hybrid.engine(hybrid.write(tmp_path, tie_word_embeddings=True))
    assert "lm_head.weight" not in {spec.name for spec in engine.weight_specs()}
