"""transformers' own beam search finds the same items with the same scores (models-and-data notes: generate, 5.x).

generate: length_penalty=0.0 and early_stopping=False give sequence log-probabilities; log-softmax over the whole
vocabulary is "full", renormalize_logits=True is "valid". Prompts are padded on the left. Beams that generate fills up
with when the catalogue has fewer items than beams score about -1e9. num_beams=1 goes greedy and gives no scores, so
the beam's score is taken by teacher forcing.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from app.engine.registry import family
from app.engine.weights import load
from tests.oracles import checkpoints
from tests.oracles.checkpoints import BOS, Beams, Case

EPS = 1e-4
CPU = torch.device("cpu")

SIZES = [(1, 8, 12), (5, 8, 12), (64, 16, 16), (5, 6, 7, 8)]
WIDTHS = [1, 2, 16, 64]


class Trie:
    """prefix_allowed_tokens_fn of a catalogue; [pad] where generate asks about a filler beam."""

    def __init__(self, case: Case, prompt: int) -> None:
        self.prompt, self.next = prompt, {}
        for item in case.items:
            path = [case.tokens[t][code] for t, code in enumerate(item)]
            for t, token in enumerate(path):
                self.next.setdefault(tuple(path[:t]), set()).add(token)

    def __call__(self, _batch: int, ids: torch.Tensor) -> list[int]:
        return sorted(self.next.get(tuple(ids[self.prompt :].tolist()), {0}))


def generate(model, case: Case, prompts: list[tuple[int, ...]], width: int, normalize: str) -> list[Beams]:
    steps, longest = len(case.sizes), max(map(len, prompts)) + 1
    ids = torch.tensor([[0] * (longest - len(p) - 1) + [*p, BOS] for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p) - 1) + [1] * (len(p) + 1) for p in prompts])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids,
        attention_mask=mask,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=steps,
        do_sample=False,
        length_penalty=0.0,
        early_stopping=False if width > 1 else None,
        renormalize_logits=normalize == "valid",
        prefix_allowed_tokens_fn=Trie(case, longest),
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    written = out.sequences[:, longest:].view(len(prompts), width, steps)
    if width == 1:
        chosen = [score.log_softmax(-1) if normalize == "full" else score for score in out.scores]
        if normalize == "full":
            return teacher_forced(model, case, prompts, written[:, 0])
        scores = sum(score.gather(1, written[:, 0, t : t + 1]) for t, score in enumerate(chosen))
    else:
        scores = out.sequences_scores.view(len(prompts), width)
    code = [{token: code for code, token in enumerate(ids) if token >= 0} for ids in case.tokens]
    return [
        [
            (tuple(code[t][int(token)] for t, token in enumerate(sid)), float(score))
            for sid, score in zip(written[r], scores[r], strict=True)
            if score > -1e8
        ]
        for r in range(len(prompts))
    ]


def teacher_forced(model, case: Case, prompts, written) -> list[Beams]:
    beams = []
    for prompt, tokens in zip(prompts, written.tolist(), strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([[*prompt, BOS, *tokens]])).logits[0].log_softmax(-1)
        score = sum(float(logp[len(prompt) + t, token]) for t, token in enumerate(tokens))
        beams.append([(tuple(case.tokens[t].index(token) for t, token in enumerate(tokens)), score)])
    return beams


def assert_equal_up_to_near_ties(ours: Beams, theirs: Beams, eps: float = EPS) -> None:
    """Equal scores place by place; equal items but for those that lie within eps of each other or of the cut."""
    assert len(ours) == len(theirs)
    np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], atol=eps, rtol=0)
    cut = theirs[-1][1] + eps
    reference = dict(theirs)
    for sid, score in ours:
        if sid in reference:
            assert abs(reference[sid] - score) <= eps
        else:
            assert score <= cut, f"{sid} at {score} is not among transformers' beams, whose last is {theirs[-1]}"
    assert len({sid for sid, _ in ours}) == len(ours)


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_generate_finds_the_same_items(kind, sizes, tmp_path):
    case = checkpoints.make_case("dense", sizes, 300, contiguous=sizes[0] != 5, seed=sum(sizes))
    model = checkpoints.make_model(kind, case, seed=len(sizes), tie_word_embeddings=sizes[0] == 64)
    checkpoints.save(model, case, tmp_path)
    prompts = [(9, 4, 11, 6, 7, 8), (5,), tuple(range(4, 30)), (6, 7, 8)]
    limits = checkpoints.make_limits(case, max(WIDTHS), len(prompts))
    engine = load(tmp_path, family(checkpoints.FAMILIES[kind]), case.sid, limits, device=CPU)
    arena = engine.new_arena(limits)
    for width, normalize in itertools.product(WIDTHS, ["full", "valid"]):
        ours = checkpoints.search(engine, case, prompts, [width] * len(prompts), normalize, arena)
        theirs = generate(model, case, prompts, width, normalize)
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal_up_to_near_ties(mine, other)


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
@pytest.mark.parametrize("normalize", ["full", "valid"])
def test_fewer_items_than_beams_give_all_items_once(kind, normalize, tmp_path):
    case = checkpoints.make_case("thin", (5, 4, 6), 11, contiguous=False, seed=3)
    model = checkpoints.make_model(kind, case, seed=9)
    checkpoints.save(model, case, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "this case reads several files"
    prompts = [(3, 4), (8, 7, 6, 5, 4)]
    limits = checkpoints.make_limits(case, 32, 2)
    engine = load(tmp_path, family(checkpoints.FAMILIES[kind]), case.sid, limits, device=CPU)
    ours = checkpoints.search(engine, case, prompts, [32, 32], normalize, engine.new_arena(limits))
    theirs = generate(model, case, prompts, 32, normalize)
    for mine, other in zip(ours, theirs, strict=True):
        assert {sid for sid, _ in mine} == set(map(tuple, case.items.tolist()))
        assert_equal_up_to_near_ties(mine, other[: len(case.items)])


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 8}),
        ("qwen3", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ("qwen2", {"head_dim": 12, "rms_norm_eps": 1e-3}),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1, "attention_bias": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts_per_tok": 7}),
    ],
)
def test_every_configuration_value_that_matters_is_read(kind, config, tmp_path):
    case = checkpoints.make_case("values", (6, 7, 8), 200, contiguous=False, seed=5)
    model = checkpoints.make_model(kind, case, seed=2, **config)
    checkpoints.save(model, case, tmp_path)
    prompts = [(9, 4, 11, 6, 7, 8), (5,)]
    limits = checkpoints.make_limits(case, 16, 2)
    engine = load(tmp_path, family(checkpoints.FAMILIES[kind]), case.sid, limits, device=CPU)
    ours = checkpoints.search(engine, case, prompts, [16, 16], "full", engine.new_arena(limits))
    for mine, other in zip(ours, generate(model, case, prompts, 16, "full"), strict=True):
        assert_equal_up_to_near_ties(mine, other)
