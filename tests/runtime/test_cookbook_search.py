"""Every recipe of the cookbook, end to end on a small model: against a search step by step with the model's own logits
for each prefix, and, where beams hold everything, against a sum over each item's codes that searches nothing."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config import parse
from app.core import HeadSpec
from app.policies.compile import compile_policy
from app.policies.reference import score_step
from app.policies.reference_select import select_step
from app.policies.source import Source
from app.runtime.columns import catalogue_of
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from tests import support
from tests.runtime.test_policy_search import HISTORY, SIZES
from tests.runtime.test_side_data import CATALOGUE, GENRES, SideOracle

COOKBOOK = Path(__file__).parents[2] / "docs" / "policies" / "cookbook"
TABLES = """
[attributes]
fresh = {of = "year", as = "share", least = 2010}
any_fresh = {of = "year", as = "any", least = 2010}
category = {of = "genre", as = "same"}
cold = {of = "ratings", as = "any", most = 3}
[priors]
popularity = {of = "ratings"}
[lists]
old = {of = "year", most = 1993}
[request.user]
age_days = {default = 365, low = 0, high = 36500}
[request.ctx]
device = ["phone", "tv"]
"""
HEADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cf": lambda z: torch.log_softmax(2 * torch.sin(3 * z), dim=1),
    "ctr": lambda z: torch.sigmoid(2 * torch.cos(5 * z)),
    "value": lambda z: 4 * torch.sin(7 * z),
}
"""Extra outputs of the model, as functions of a row's logits."""
SMALLER = {
    "max=64": "max=2", "max=32": "max=3", "max=8)": "max=2)", "max=200": "max=4", "max=20": "max=3", "max=10": "max=2",
    "min=16": "min=14", "min=5": "min=3", "groups=8": "groups=2", "groups=4": "groups=2",
    "within(6)": "within(1.5)", "above(-25)": "above(-4)", "within_parent(5)": "within_parent(0.6)",
    "top_p(0.95)": "top_p(0.6)", "min_p(0.02)": "min_p(0.5)", "min_p(0.001)": "min_p(0.1)", "eta(0.001)": "eta(0.4)",
    "epsilon(0.0001)": "epsilon(0.1)", "typical(0.9)": "typical(0.6)", "share=0.05": "share=0.4", ">= 10": ">= 4",
    "0.3 * sibling": "0.9 * sibling", "limit: 100": "limit: 14", "limit: 50": "limit: 14", "pool=200": "pool=14",
    "0.2 * item.fresh": "3 * item.fresh", "0.5 * attr.fresh": "2 * attr.fresh", "value: 0.1, range": "value: 1, range",
    "value: 0.2, range": "value: 2, range", "value: 0.5, range": "value: 2, range", "0.3 * head": "1 * head",
}  # fmt: skip
"""Numbers of the recipes that would do nothing among 40 SIDs, with ones that do."""
NARROW, WIDE = "widths: [4, 8, 18]", "widths: [4, 20, 64]"
SAME_AS_PLAIN = {"v02_progressive", "v03_load_levels", "v22_catalogue"}
"""Recipes whose widths alone differ; the others must change the list."""


def on_list(item: dict) -> bool:
    """Whether an item is on the list `old` of the deployment."""
    return bool(item["attrs"].get("year", 9999) <= 1993)


def text_of(path: Path, widths: str) -> str:
    """A recipe whose numbers fit 40 SIDs."""
    text = re.sub(r"load:\n.*?(?=\n\S|\Z)", "", re.sub(r"widths: .*\n", "", path.read_text()), flags=re.DOTALL)
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text.replace("widebeam: 1\n", f"widebeam: 1\n{widths}\n")


class WithHeads:
    """An engine whose model says more than logits."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, t, rows, arena):
        """One step with its heads."""
        out = self._engine.step(t, rows, arena)
        return out._replace(heads={name: make(out.logits.float()) for name, make in HEADS.items()})


class CookbookOracle(SideOracle):
    """The sequential search, with heads, a carried number, and the deployment's own names."""

    def grid(self, t, prefixes, parent, carry):
        """One step's candidates."""
        grid = super().grid(t, prefixes, parent, None)
        extra = dict(grid.extra)
        extra |= {f"head.{name}": make(torch.from_numpy(grid.logits)).numpy() for name, make in HEADS.items()}
        extra |= {
            "blocked.old": self.listed_below(prefixes, t, all),
            "boosted.old": self.listed_below(prefixes, t, any),
        }
        shape = grid.logits.shape
        extra |= {"user.age_days": np.full(shape, 3, np.float32), 'ctx.device == "tv"': np.zeros(shape, bool)}
        params = dict(zip(self.job.plan.structure.params, self.job.plan.params, strict=True))
        return replace(grid, extra=extra, carry=carry, params=params)

    def listed_below(self, prefixes, t: int, join: Callable[[list[bool]], bool]) -> np.ndarray:
        """Whether all items below, or any, are on the list."""
        below: dict[tuple[int, ...], list[bool]] = {}
        for one in CATALOGUE:
            below.setdefault(tuple(one["sid"][:t]), []).append(on_list(one))
        codes = range(SIZES[t - 1])
        made = [
            [bool(found := below.get((*row, code), [])) and join(found) for code in codes] for row in prefixes.tolist()
        ]
        return np.array(made)

    def search(self):
        """The list: (id, score), best first."""
        prefixes, parent, carry = np.zeros((1, 0), np.int64), np.zeros(1, np.float32), None
        for t, phases in enumerate(self.job.plan.resolved["steps"], 1):
            grid = self.grid(t, prefixes, parent, carry)
            score = score_step(phases, grid, self.job.plan.operators).score
            chosen = select_step(phases, grid, self.job.plan.operators)
            prefixes = np.array([[*prefixes[r], c] for r, c in chosen.survivors], np.int64).reshape(-1, t)
            parent = np.array([score[at] for at in chosen.survivors], np.float32)
            carry = np.array(chosen.carry, np.float32) if phases["select"] != "top()" else None
        return self.listed(prefixes, parent)

    def columns_of_items(self, chosen) -> dict[str, np.ndarray]:
        """What `final` may read."""
        own = super().columns_of_items(chosen)
        old = np.array([on_list(one) for one in chosen], bool)
        genre = [GENRES.index(one["attrs"]["genre"]) if "genre" in one["attrs"] else -1 for one in chosen]
        ratings = np.array([one["attrs"]["ratings"] for one in chosen], np.float32)
        return own | {"item.ratings": ratings, "item.genre": np.array(genre), "blocked.old": old, "boosted.old": old}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root on disk, loaded: its deployment, its snapshot with heads, and what its catalogue declares."""
    path = tmp_path_factory.mktemp("root")
    limits = "rows = 4096\nbatch = 64\ncontext = 64"
    support.write_root(path, SIZES, CATALOGUE, {}, extra=TABLES, limits=limits)
    deployment = parse((path / "deployment.toml").read_text())
    loaded = load_root(path, deployment, make_log(io.BytesIO()))
    assert loaded.snapshot is not None, loaded.reasons
    heads = tuple(HeadSpec(name, "code") for name in HEADS)
    contract = replace(loaded.snapshot.contract, heads=heads)
    snapshot = replace(loaded.snapshot, contract=contract, engine=WithHeads(loaded.snapshot.engine))
    return deployment, snapshot, catalogue_of(snapshot.vocab, snapshot.side)


def answers(root, widths: str) -> dict[str, tuple[Any, Any]]:
    """(job, list) of every recipe, all in one batch."""
    deployment, snapshot, catalogue = root
    texts = {path.stem: text_of(path, widths) for path in sorted(COOKBOOK.glob("*.yaml"))}
    plans = {}
    for name, text in texts.items():
        plans[name], found = compile_policy(
            name, {name: Source(f"{name}.yaml", text.encode())}, snapshot.contract, catalogue
        )
        assert plans[name] is not None, found.text()
    snapshot = snapshot.having(policies=support.Policies(plans, default="v22_catalogue"))
    jobs = [
        support.job_of(snapshot, deployment, HISTORY, policy=name, k=40, request_id=name, user={"age_days": 3})
        for name in texts
    ]
    return {name: (job, one) for name, job, one in zip(texts, jobs, support.run_batch(jobs), strict=True)}


@pytest.fixture(scope="module")
def found(root):
    """The answers under both widths."""
    return {widths: answers(root, widths) for widths in (NARROW, WIDE)}


@pytest.mark.parametrize("widths", [NARROW, WIDE])
def test_every_recipe_answers_as_the_search_by_definition(found, widths):
    lists = {}
    for name, (job, ranked) in found[widths].items():
        want = CookbookOracle(job.snapshot.vocab, job).search()
        got = job.snapshot.vocab.ids(ranked.items)
        assert want, name
        np.testing.assert_allclose(ranked.scores, [score for _, score in want], atol=1e-4, err_msg=name)
        assert got == [id_ for id_, _ in want], name
        lists[name] = got, [round(float(score), 3) for score in ranked.scores]
    if widths == NARROW:
        assert {name for name, one in lists.items() if one == lists["v22_catalogue"]} == SAME_AS_PLAIN


# ---- beams that hold everything ------------------------------------------------------------------------------------

Term = Callable[[Any, int], float]
"""What a code adds to a path, from the step's candidates below one prefix."""


def likelihood(grid, code: int, heat: float = 1, among: np.ndarray | None = None) -> float:
    """log-softmax of a row's logits over heat, over all codes of the step or some of them."""
    z = grid.logits[0].astype(np.float64) / heat
    over = z if among is None else z[among]
    return float(z[code] - np.log(np.exp(over).sum()))


def over_children(grid, code: int) -> float:
    """Over the codes that lead to an item."""
    return likelihood(grid, code, among=grid.trie[0])


TERMS: dict[str, Term] = {
    "v13_temperature": lambda grid, code: likelihood(grid, code, heat=0.8),
    "v14_step_weight": lambda grid, code: likelihood(grid, code) * (0.8 if grid.step == 1 else 1),
    "v15_forced_codes_are_free": over_children,
    "v16_assistant": lambda grid, code: 0.8 * likelihood(grid, code) + 0.2 * float(grid.extra["head.cf"][0, code]),
    "v37_stochastic": over_children,
}
PLAIN_SUMS = (
    "v02_progressive", "v17_debias_popularity", "v18_fresh_boost", "v19_objectives", "v20_look_ahead", "v22_catalogue",
    "v25_seen_last", "v26_campaign", "v29_siblings", "v33_cold_start", "v38_noisy_ranks", "v39_exploration",
)  # fmt: skip
"""Recipes that order or reserve only: where everybody survives, the list is that of the plain sums."""
ALLOWED: dict[str, Callable[[list[dict]], bool]] = {
    "v01_plain": lambda below: not all(one["id"] in HISTORY for one in below),
    "v23_part_of_the_catalogue": lambda below: any(one["attrs"].get("year", 0) >= 2010 for one in below),
    "v24_exclude_seen": lambda below: not all(one["id"] in HISTORY for one in below) and not on_list(below[0]),
}


@pytest.fixture(scope="module")
def paths(found) -> dict[tuple[int, ...], list[Any]]:
    """The three grids on the way to each SID of the catalogue, one row each."""
    job, _ = found[WIDE]["v22_catalogue"]
    oracle, zero = CookbookOracle(job.snapshot.vocab, job), np.zeros(1, np.float32)
    return {
        sid: [oracle.grid(t, np.array([sid[: t - 1]], np.int64).reshape(1, t - 1), zero, None) for t in (1, 2, 3)]
        for sid in sorted({tuple(one["sid"]) for one in CATALOGUE})
    }


def exhaustive(paths, term: Term, allowed: Callable[[list[dict]], bool]) -> list[tuple[str, float]]:
    """Every SID of the catalogue with the sum of its codes' terms, best first."""
    out = []
    for sid, grids in paths.items():
        below = [one for one in CATALOGUE if tuple(one["sid"]) == sid]
        if allowed(below):
            out.append((below[0]["id"], sum(term(grid, code) for grid, code in zip(grids, sid, strict=True))))
    return sorted(out, key=lambda one: -one[1])


def test_beams_that_hold_everything_give_what_exhaustive_search_gives(found, paths):
    for name in (*TERMS, *PLAIN_SUMS, *ALLOWED):
        job, ranked = found[WIDE][name]
        want = exhaustive(paths, TERMS.get(name, likelihood), ALLOWED.get(name, lambda _: True))
        np.testing.assert_allclose(ranked.scores, [score for _, score in want], atol=1e-4, err_msg=name)
        assert job.snapshot.vocab.ids(ranked.items) == [id_ for id_, _ in want], name


def test_one_beam_with_the_best_completion_as_its_value_finds_the_global_optimum(root, paths):
    """V20: with an admissible value, the exact maximum over the completions, a beam of one is enough."""
    deployment, snapshot, catalogue = root
    vocab = snapshot.vocab
    best = exhaustive(paths, likelihood, lambda _: True)
    total = {tuple(next(one["sid"] for one in CATALOGUE if one["id"] == id_)): score for id_, score in best}

    class Omniscient(WithHeads):
        """Its value of a prefix is what is left to the best item below it."""

        def step(self, t, rows, arena):
            """One row at each step: the beam's own prefix is what it chose so far."""
            self.prefix = () if t == 1 else (*self.prefix, int(rows.codes[0]))
            out = self._engine.step(t, rows, arena)
            logp = torch.log_softmax(out.logits.float(), dim=1)[0]
            self.sum = 0.0 if t == 1 else self.sum + float(self.logp[int(rows.codes[0])])
            self.logp = logp
            value = torch.full_like(out.logits, -100.0)
            for code in range(SIZES[t - 1]):
                below = [score for sid, score in total.items() if sid[:t] == (*self.prefix, code)]
                value[0, code] = max(below) - self.sum - float(logp[code]) if below else -100.0
            return out._replace(heads={"value": value})

    text = "widebeam: 1\nwidths: [1, 1, 1]\nsteps:\n  all:\n    rank: score + {} * head.value\n"
    lists = []
    for weight in (0, 1):
        source = Source("one.yaml", text.format(weight).encode())
        plan, found = compile_policy("one", {"one": source}, snapshot.contract, catalogue)
        assert plan is not None, found.text()
        own = replace(snapshot, engine=Omniscient(snapshot.engine)).having(
            policies=support.Policies({"one": plan}, "one")
        )
        [ranked] = support.run_batch([support.job_of(own, deployment, HISTORY, policy="one", k=1)])
        lists.append(vocab.ids(ranked.items))
    assert lists[1] == [best[0][0]] != lists[0]
