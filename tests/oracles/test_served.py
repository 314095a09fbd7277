"""transformers' own beam search against the whole served runtime: a deployment root on disk, weights published by the
command, a catalogue, policies as files, and requests of every kind, width and policy in one batch.

What `generate` is asked, and when two answers are equal, is said in `test_transformers`.
"""

from __future__ import annotations

import asyncio
import io

import pytest
from typer.testing import CliRunner

from app.cli import weights
from app.cli.compose import Overrides, compose
from app.core import HistoryIds, Outcome, Request, TokenIds
from tests import support
from tests.oracles import checkpoints
from tests.oracles.checkpoints import BOS, Case
from tests.oracles.test_transformers import SIZES, assert_equal_up_to_near_ties, generate

NORMALIZE = ("full", "valid")
WIDTHS = (1, 2, 16, 64)
POLICY = "widebeam: 1\nsteps:\n  all:\n    normalize: {normalize}\nwidths: {widths}\n"


def write_root(root, kind: str, case: Case, model, widths, **exported):
    """A deployment root: the checkpoint published by `widebeam weights publish`, items "i0", "i1", .. of the case."""
    root.mkdir()
    most = [max(widths)] * len(case.sizes)
    (root / "deployment.toml").write_text(
        f'family = "{checkpoints.FAMILIES[kind]}"\ndevice = "cpu"\n[sid]\nsizes = {list(case.sizes)}\n'
        f'tokens = "file"\nprefix = [{BOS}]\n'
        f"[limits]\nwidths = {most}\nrows = 8192\nbatch = 64\ncontext = 40\n[server]\npolicy_override = true\n"
    )
    (root / "policies").mkdir()
    for normalize in NORMALIZE:
        for width in widths:
            text = POLICY.format(normalize=normalize, widths=[width] * len(case.sizes))
            (root / "policies" / f"{normalize}_{width}.yaml").write_text(text)
    (root / "policies" / "base.yaml").write_text("widebeam: 1\n")
    source = checkpoints.save(model, case, root / "exported", **exported)
    published = CliRunner().invoke(weights.app, ["publish", str(source), "--root", str(root)])
    assert published.exit_code == 0, published.output
    support.write_vocab(root, case.sizes, [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(case.items.tolist())])
    return root


def serve(root, asked: list[tuple[HistoryIds | TokenIds, str]]) -> list[Outcome]:
    """The runtime's answers to (context, policy) pairs that all come at once."""

    async def run() -> list[Outcome]:
        log = io.BytesIO()
        service = compose(root, Overrides(), log)
        runtime = service.build()
        await runtime.start(service.load)
        try:
            assert not runtime.reasons(), runtime.reasons()
            assert b"rejected" not in log.getvalue(), log.getvalue().decode()
            tickets = [
                runtime.admit(Request(f"r{n}", context, k=100, policy=policy))
                for n, (context, policy) in enumerate(asked)
            ]
            return [await ticket.outcome() for ticket in tickets]
        finally:
            runtime.close()

    return asyncio.run(run())


def compare(root, case: Case, model, contexts, widths) -> list[Outcome]:
    """Every context under every policy, in one batch of the server, against `generate`; all outcomes."""
    names = [f"{normalize}_{width}" for normalize in NORMALIZE for width in widths]
    outcomes = serve(root, [(context, name) for name in names for context in contexts])
    assert {outcome.batch_requests for outcome in outcomes} == {len(names) * len(contexts)}, "one batch for all"
    prompts = [prompt(case, context) for context in contexts]
    ids = {tuple(sid): f"i{n}" for n, sid in enumerate(case.items.tolist())}
    for at, name in enumerate(names):
        normalize, width = name.split("_")
        theirs = generate(model, case, prompts, int(width), normalize)
        for outcome, other in zip(outcomes[at * len(contexts) :], theirs, strict=False):
            ours = [(item.sid, item.score) for item in outcome.items]
            assert [item.id for item in outcome.items] == [ids[sid] for sid, _ in ours]
            assert_equal_up_to_near_ties(ours, other)
    return outcomes


def prompt(case: Case, context: HistoryIds | TokenIds) -> tuple[int, ...]:
    """The tokens that a context stands for, without the deployment's prefix."""
    if isinstance(context, TokenIds):
        return context.ids
    rows = [case.items[int(item[1:])] for item in context.ids]
    return tuple(case.tokens[t][code] for row in rows for t, code in enumerate(row))


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_server_finds_what_generate_finds(kind, sizes, tmp_path):
    case = checkpoints.make_case("served", sizes, 300, contiguous=sizes[0] != 5, seed=sum(sizes))
    model = checkpoints.make_model(kind, case, seed=len(sizes), tie_word_embeddings=sizes[0] == 64)
    contexts = [
        HistoryIds(("i3", "i1", "i70", "i3")),
        TokenIds((9, 4, 11, 6, 7, 8)),
        HistoryIds(("i0",)),
        TokenIds((5,)),
        HistoryIds(tuple(f"i{n}" for n in range(10, 18))),
        TokenIds(tuple(range(4, 30))),
    ]
    root = write_root(tmp_path / "root", kind, case, model, WIDTHS)
    outcomes = compare(root, case, model, contexts, WIDTHS)
    assert all(outcome.status == "underfilled" for outcome in outcomes), "100 asked, at most 64 beams"


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
def test_fewer_items_than_beams_give_all_items_once(kind, tmp_path):
    case = checkpoints.make_case("thin", (5, 4, 6), 11, contiguous=False, seed=3)
    model = checkpoints.make_model(kind, case, seed=9)
    root = write_root(tmp_path / "root", kind, case, model, (32,), max_shard_size="20KB")
    assert len(list((root / "weights" / "v1").glob("*.safetensors"))) > 1, "this case reads several files"
    outcomes = compare(root, case, model, [HistoryIds(("i2", "i5")), TokenIds((8, 7, 6, 5, 4))], (32,))
    for outcome in outcomes:
        assert sorted(item.id for item in outcome.items) == sorted(f"i{n}" for n in range(len(case.items)))
