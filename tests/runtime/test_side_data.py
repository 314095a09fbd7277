"""Policies that read what a deployment declares, over a root on disk, against a search that makes the same numbers from
the items themselves: no trie, no arrays of nodes."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from app.config import parse
from app.policies.reference import score_step
from app.policies.reference_final import Listed, expand, final_list
from app.policies.reference_select import select_step
from app.runtime.explain import explain
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from app.runtime.state import TRANSITIONS
from app.runtime.takedowns import Takedowns
from tests import support
from tests.live_support import live_server
from tests.runtime.test_policy_search import HISTORY, SIZES, Oracle

TABLES = """
[attributes]
fresh = {of = "year", as = "share", least = 2010}
newest = {of = "year", as = "max", default = 1950}
oldest = {of = "year", as = "min", default = 1950}
age = {of = "year", as = "mean", default = 1950}
hits = {of = "ratings", as = "sum"}
any_fresh = {of = "year", as = "any", least = 2010}
category = {of = "genre", as = "same", from = 2}
cold = {of = "ratings", as = "any", most = 3}

[priors]
popularity = {of = "ratings"}
next = {of = "ratings", per = "edge"}

[lists]
ads = {of = "ad"}
dark = {of = "genre", is = ["crime", "war"]}
"""
GENRES = ("comedy", "crime", "drama", "war")
HEAD = "widebeam: 1\nwidths: [4, 10, 16]\n"
POLICIES = {
    "debias": "steps: {all: {rank: score - 0.5 * prior.popularity}}\n",
    "debias_edges": "steps: {all: {score: parent + logp - 0.5 * prior.next}}\n",
    "fresh": "steps: {all: {rank: score + 2 * attr.fresh}}\n",
    "years": "steps: {all: {rank: score + 0.05 * (attr.newest - attr.age) - 0.1 * (attr.age - attr.oldest)}}\n",
    "hits": "steps: {all: {rank: score + log(1 + attr.hits)}}\n",
    "only_fresh": "steps: {all: {mask: trie and attr.any_fresh}}\n",
    "no_ads": "steps: {all: {mask: trie and not seen and not blocked.ads}}\nfinal: {mask: not blocked.ads}\n",
    "genres": "steps: {last: {quota: ['cap(attr.category, max=3)']}}\n",
    "dramas": "steps: {3: {quota: ['cap(attr.category == \"drama\", max=2)']}}\n",
    "bonus": "steps: {2: {rank: 'score + where(attr.category == \"crime\", 3, 0)'}}\n",
    "cold": "steps: {last: {quota: ['floor(attr.cold, min=6)']}}\n",
    "campaign": "steps: {all: {quota: ['floor(boosted.dark, min=3)']}}\n",
    "promoted": "steps: {all: {rank: 'score + where(boosted.dark, 1.5, 0)'}}\n",
    "all_codes": "steps: {all: {mask: none, rank: 'score - 0.5 * prior.popularity + where(boosted.dark, 1, 0)'}}\n",
    "out_there": "steps: {all: {mask: none, rank: score + attr.fresh}}\n",
    "best_two": "final: {expand: 'sid(max_items=2, by=item.quality)'}\n",
    "coldest": "final: {expand: 'sid(max_items=1, by=item.ratings)', mask: item.cold}\n",
    "listed": "final:\n  expand: sid(max_items=3)\n  score: score + 3 * item.fresh - where(boosted.dark, 0.5, 0)\n"
    '  quota:\n    - cap(item.category, max=4)\n    - floor(item.category == "war", min=2)\n',
}  # fmt: skip


def items(count: int = 70, prefixes: int = 40, seed: int = 5) -> list[dict[str, object]]:
    """70 items on 40 SIDs, most attributes missing here and there."""
    sids, random = support.random_sids(SIZES, prefixes, seed - 5).tolist(), np.random.default_rng(seed)
    out: list[dict[str, object]] = []
    for at in range(count):
        attrs: dict[str, object] = {"ratings": int(random.integers(0, 9)), "ad": int(random.random() < 0.3)}
        if random.random() < 0.9:
            attrs["year"] = int(random.integers(1990, 2020))
        if random.random() < 0.9:
            attrs["genre"] = str(random.choice(GENRES))
        if random.random() < 0.7:
            attrs["quality"] = int(random.integers(0, 3))
        out.append(
            {"id": f"i{at}", "sid": sids[at if at < prefixes else int(random.integers(0, prefixes))], "attrs": attrs}
        )
    return out


CATALOGUE = items()
TOTAL = sum(int(item["attrs"]["ratings"]) for item in CATALOGUE)


def snapshot_of(tmp_path, tables: str = TABLES, policies=POLICIES, catalogue=CATALOGUE):
    texts = {name: HEAD + text for name, text in policies.items()}
    support.write_root(tmp_path, SIZES, catalogue, texts, extra=tables, limits="rows = 4096\nbatch = 32\ncontext = 64")
    deployment = parse((tmp_path / "deployment.toml").read_text())
    loaded = load_root(tmp_path, deployment, make_log(io.BytesIO()))
    return deployment, loaded


def columns(below: list[dict], above: list[dict]) -> dict[str, object]:
    """What is declared of a prefix with these items below it, `above` being those of its parent."""
    attrs = [item["attrs"] for item in below]
    years, genres = [one.get("year", 1950) for one in attrs], {one.get("genre") for one in attrs}
    weight, whole = (sum(item["attrs"]["ratings"] for item in some) for some in (below, above))
    floor = 1 / (10 * len(CATALOGUE))
    fresh = [one.get("year", 0) >= 2010 for one in attrs]
    [only] = genres if len(genres) == 1 else [None]
    empty = not below
    return {
        "attr.fresh": math.nan if empty else sum(fresh) / len(below),
        "attr.newest": math.nan if empty else max(years),
        "attr.oldest": math.nan if empty else min(years),
        "attr.age": math.nan if empty else sum(years) / len(years),
        "attr.hits": math.nan if empty else weight,
        "attr.any_fresh": any(fresh),
        "attr.category": GENRES.index(only) if only else -1,
        "attr.cold": any(one["ratings"] <= 3 for one in attrs),
        "prior.popularity": math.log(max(weight / TOTAL, floor)),
        "prior.next": math.log(max(weight / whole if whole else 0, floor)),
        "blocked.ads": not empty and all(one["ad"] for one in attrs),
        "boosted.dark": any(one.get("genre") in ("crime", "war") for one in attrs),
    }


class SideOracle(Oracle):
    """The sequential search, given columns made from the items, and `final` over every item of an SID."""

    def grid(self, t: int, prefixes, parent, carry):
        grid = super().grid(t, prefixes, parent, carry)
        of: dict[tuple[int, ...], list[dict]] = {}
        for item in CATALOGUE:
            for depth in range(len(SIZES) + 1):
                of.setdefault(tuple(item["sid"][:depth]), []).append(item)
        codes = range(SIZES[t - 1])
        made = [
            [columns(of.get((*row, code), []), of.get(tuple(row), [])) for code in codes] for row in prefixes.tolist()
        ]
        extra = {key: np.array([[one[key] for one in row] for row in made]) for key in made[0][0]}
        extra = {key: value.astype(np.float32) if value.dtype == float else value for key, value in extra.items()}
        seen = [
            [bool(below := of.get((*row, code), [])) and all(one["id"] in HISTORY for one in below) for code in codes]
            for row in prefixes.tolist()
        ]
        return replace(grid, seen=np.array(seen), extra=extra, labels={"attr.category": GENRES})

    def search(self):
        prefixes, parent = np.zeros((1, 0), np.int64), np.zeros(1, np.float32)
        for t, phases in enumerate(self.job.plan.resolved["steps"], 1):
            grid = self.grid(t, prefixes, parent, None)
            score = score_step(phases, grid, self.job.plan.operators).score
            chosen = select_step(phases, grid, self.job.plan.operators)
            prefixes = np.array([[*prefixes[r], c] for r, c in chosen.survivors], np.int64).reshape(-1, t)
            parent = np.array([score[at] for at in chosen.survivors], np.float32)
        return self.listed(prefixes, parent)

    def listed(self, prefixes, parent) -> list[tuple[str, float]]:
        of = [[n for n, item in enumerate(CATALOGUE) if item["sid"] == row] for row in prefixes.tolist()]
        plan, by = self.job.plan, None
        if plan.by:
            by = {n: item["attrs"].get(plan.by[5:], math.nan) for n, item in enumerate(CATALOGUE)}
        pairs = expand(of, plan.per_sid, [CATALOGUE.index(one) for one in self.excluded()], by)
        rows, chosen = [at for at, _ in pairs], [CATALOGUE[n] for _, n in pairs]
        numbers = np.array([n for _, n in pairs], np.int64)
        seen = np.zeros(len(pairs), bool)
        extra, labels = self.columns_of_items(chosen), {"item.category": GENRES, "item.genre": GENRES}
        items_ = Listed(parent[rows], numbers, prefixes[rows].astype(np.int32), seen, extra, labels)
        ranked = final_list(plan.resolved["final"], items_, plan.limit)
        return [(chosen[at]["id"], score) for at, score in ranked][: self.job.request.k]

    def columns_of_items(self, chosen: list[dict]) -> dict[str, np.ndarray]:
        made = [columns([item], [item]) for item in chosen]
        return {
            "item.fresh": np.array([one["attr.fresh"] for one in made], np.float32),
            "item.cold": np.array([one["attr.cold"] for one in made], bool),
            "item.category": np.array([one["attr.category"] for one in made], np.int64),
            "blocked.ads": np.array([one["blocked.ads"] for one in made], bool),
            "boosted.dark": np.array([one["boosted.dark"] for one in made], bool),
        }

    def excluded(self) -> list[dict]:
        return [item for item in CATALOGUE if item["id"] in self.job.request.exclude]


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_policies_that_read_declared_columns_answer_as_the_sequential_search(tmp_path, transition):
    deployment, loaded = snapshot_of(tmp_path)
    snapshot = loaded.snapshot
    assert snapshot is not None and loaded.in_force.problems() == {}, (loaded.reasons, loaded.in_force.problems())
    jobs = [support.job_of(snapshot, deployment, HISTORY, policy=name, k=12) for name in POLICIES]
    for job, ranked in zip(jobs, support.run_batch(jobs, transition), strict=True):
        want = SideOracle(snapshot.vocab, job).search()
        got = snapshot.vocab.ids(ranked.items)
        assert want or job.request.policy == "out_there", job.request.policy
        assert got == [id_ for id_, _ in want], job.request.policy
        np.testing.assert_allclose(ranked.scores, [score for _, score in want], atol=1e-4, err_msg=job.request.policy)


@pytest.mark.parametrize(("count", "prefixes", "seed"), [(50, 9, 6), (200, 30, 8)])
def test_over_other_catalogues_they_do_so_too(tmp_path, monkeypatch, count, prefixes, seed):
    made = items(count, prefixes, seed)
    monkeypatch.setattr(sys.modules[__name__], "CATALOGUE", made)
    monkeypatch.setattr(sys.modules[__name__], "TOTAL", sum(int(item["attrs"]["ratings"]) for item in made))
    present = {item["attrs"].get("genre") for item in made}
    assert present >= set(GENRES)
    deployment, loaded = snapshot_of(tmp_path, catalogue=made)
    jobs = [support.job_of(loaded.snapshot, deployment, HISTORY, policy=name, k=12) for name in POLICIES]
    for job, ranked in zip(jobs, support.run_batch(jobs), strict=True):
        want = SideOracle(loaded.snapshot.vocab, job).search()
        assert loaded.snapshot.vocab.ids(ranked.items) == [id_ for id_, _ in want], job.request.policy


# ---- what is refused -----------------------------------------------------------------------------------------------


def problems(tmp_path, **policies: str) -> str:
    _, loaded = snapshot_of(tmp_path, policies=policies)
    return "\n".join(loaded.in_force.problems().values())


def test_names_that_are_not_declared_are_refused_with_what_is_meant(tmp_path):
    text = problems(tmp_path, a="steps: {all: {rank: score + attr.fresch}}\n", b="final: {mask: item.colt}\n")
    assert "T002" in text and "did you mean `fresh`?" in text
    assert "item has no `colt`" in text and "did you mean `cold`?" in text


def test_an_attribute_is_read_from_its_first_step_on(tmp_path):
    text = problems(tmp_path, a="steps: {all: {quota: ['cap(attr.category, max=3)']}}\n")
    assert "K007" in text and "`attr.category` is not defined at step 1" in text and "from step 2" in text


def test_masks_read_nothing_but_any(tmp_path):
    text = problems(
        tmp_path,
        a="steps: {all: {mask: trie and attr.hits > 3}}\n",
        b="steps: {all: {mask: trie and not attr.any_fresh}}\n",
    )
    assert "a.yaml" in text and "K016" in text
    assert "b.yaml" not in text


def test_a_boost_is_weighed_by_what_the_catalogue_has(tmp_path):
    _, loaded = snapshot_of(tmp_path, policies={"a": "steps: {all: {rank: score + 2 * attr.newest}}\n"})
    [finding] = loaded.in_force.policies.policies["a"].findings
    years = [item["attrs"].get("year", 1950) for item in CATALOGUE]
    reach = 2 * (max(years) - min(by_sid(max).values()))
    assert finding.rule.code == "W005" and f"{reach:g} nats" in finding.message


def by_sid(join) -> dict[tuple[int, ...], int]:
    """The years of each SID's items, joined."""
    found: dict[tuple[int, ...], list[int]] = {}
    for item in CATALOGUE:
        found.setdefault(tuple(item["sid"]), []).append(item["attrs"].get("year", 1950))
    return {sid: join(years) for sid, years in found.items()}


@pytest.mark.parametrize(
    ("table", "code", "place"),
    [
        ('[attributes]\nx = {of = "yeer", as = "max"}\n', "no_such_attribute", "deployment.toml: attributes.x"),
        ('[attributes]\nx = {of = "genre", as = "mean"}\n', "attribute_type", "deployment.toml: attributes.x"),
        ('[lists]\nx = {of = "ad", is = "yes"}\n', "attribute_type", "deployment.toml: lists.x"),
    ],
)
def test_what_the_catalogue_cannot_give_keeps_a_root_from_serving(tmp_path, table, code, place):
    _, loaded = snapshot_of(tmp_path, table, policies={})
    assert loaded.snapshot is None
    [reason] = loaded.reasons
    assert (reason.code, reason.location) == (code, place)


# ---- take-downs and exclusions -------------------------------------------------------------------------------------


def test_items_that_are_taken_down_still_count_in_what_is_declared(tmp_path):
    """Aggregates are of the vocab version: a prefix that leads to something fresh says so although that is gone."""
    sids = [[0, 0, 0], [0, 0, 1], [1, 1, 1]]
    years = [2015, 1995, 2016]
    catalogue = [{"id": f"i{at}", "sid": sids[at], "attrs": {"year": years[at], "ratings": 1}} for at in range(3)]
    table = '[attributes]\nany_fresh = {of = "year", as = "any", least = 2010}\n'
    policies = {"only_fresh": POLICIES["only_fresh"]}
    deployment, loaded = snapshot_of(tmp_path, table, policies, catalogue)
    down = loaded.snapshot.having(takedowns=Takedowns("t1", "t1", ids=("i0",)))
    column, vocab = down.side.columns["attr.any_fresh"].nodes, down.vocab
    assert column[vocab.step([0], [0])[0]]
    job = support.job_of(down, deployment, (), policy="only_fresh")
    assert vocab.ids(support.run_batch([job])[0].items) == ["i2"]  # i0 is gone, and i1 is not fresh


def test_an_advertisement_that_shares_its_sid_needs_the_mask_of_the_list_too(tmp_path):
    catalogue = [{"id": f"i{at}", "sid": [0, 0, 0], "attrs": {"ad": int(at == 0)}} for at in range(2)]
    policies = {
        "beam": "steps: {all: {mask: trie and not blocked.ads}}\n",
        "both": "steps: {all: {mask: trie and not blocked.ads}}\nfinal: {expand: 'sid(max_items=2)', "
        "mask: not blocked.ads}\n",
    }
    deployment, loaded = snapshot_of(tmp_path, '[lists]\nads = {of = "ad"}\n', policies, catalogue)
    jobs = [support.job_of(loaded.snapshot, deployment, (), policy=name) for name in policies]
    assert [loaded.snapshot.vocab.ids(one.items) for one in support.run_batch(jobs)] == [["i0"], ["i1"]]


def test_excluded_items_leave_their_place_to_the_next_by_the_same_number(tmp_path):
    catalogue = [{"id": f"i{at}", "sid": [0, 0, 0], "attrs": {"quality": at % 3}} for at in range(6)]
    catalogue.append({"id": "i6", "sid": [0, 0, 0]})
    policies = {"by": "final: {expand: 'sid(max_items=4, by=item.quality)', limit: 9}\n"}
    policies["all"] = policies["by"].replace("max_items=4", "max_items=9")
    deployment, loaded = snapshot_of(tmp_path, "", policies, catalogue)
    jobs = [
        support.job_of(loaded.snapshot, deployment, (), policy="by"),
        support.job_of(loaded.snapshot, deployment, (), policy="by", exclude=("i2", "i1")),
        support.job_of(loaded.snapshot, deployment, (), policy="all"),
    ]
    got = [loaded.snapshot.vocab.ids(one.items) for one in support.run_batch(jobs)]
    assert got == [["i2", "i5", "i1", "i4"], ["i5", "i4", "i0", "i3"], ["i2", "i5", "i1", "i4", "i0", "i3", "i6"]]


# ---- while a server runs -------------------------------------------------------------------------------------------


async def test_what_is_declared_changes_while_a_server_runs_and_what_cannot_be_made_is_refused(tmp_path):
    policies = {"only_fresh": HEAD + POLICIES["only_fresh"]}
    root = support.write_root(tmp_path / "root", SIZES, CATALOGUE, policies, extra="# tables\n")
    file = root / "deployment.toml"
    async with live_server(root) as server:
        before = await server.status()
        assert before["policies"]["only_fresh"]["errors"][0]["code"] == "T002"
        support.replace_text(file, file.read_text().replace("# tables", TABLES))
        status = await server.settles(lambda status: status["policies"]["only_fresh"]["state"] == "live")
        assert status["active"]["contract"] != before["active"]["contract"]
        fresh = {item["id"] for item in CATALOGUE if item["attrs"].get("year", 0) >= 2010}
        answer = await server.recommend("i1", policy="only_fresh")
        assert answer["items"]
        first_of_sid = {tuple(item["sid"]): item["id"] for item in reversed(CATALOGUE)}
        sids = {tuple(item["sid"]) for item in CATALOGUE if item["id"] in fresh}
        assert {item["id"] for item in answer["items"]} <= {first_of_sid[sid] for sid in sids}

        trie = server.live._runtime.active.trie
        config = support.onerec_config(SIZES)
        support.write_weights(root, config, support.onerec_weights(config, 0), version="v2")
        await server.settles(lambda status: status["active"]["weights"]["version"] == "v2")
        assert server.live._runtime.active.trie is trie  # nothing of the vocab is made or copied anew
        assert (await server.recommend("i1", policy="only_fresh"))["items"] == answer["items"]

        bare = [{**item, "attrs": {"year": 2000, "ad": 0, "genre": "war"}} for item in CATALOGUE]  # no ratings
        support.write_vocab(root, SIZES, bare, version="v2")
        status = await server.settles(
            lambda status: any(one["state"] == "rejected" for one in status["artifacts"] if one["kind"] == "vocab")
        )
        [reason] = [one["reason"] for one in status["artifacts"] if (one["kind"], one["version"]) == ("vocab", "v2")]
        assert reason["code"] == "no_such_attribute" and "`ratings`" in reason["message"]
        assert status["active"]["vocab"]["version"] == "v1"

        support.replace_text(file, file.read_text().replace('of = "year", as = "max"', 'of = "yaer", as = "max"'))
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert "did you mean `year`?" in status["deployment"]["reason"]["message"]
        assert (await server.recommend("i1", policy="only_fresh"))["items"] == answer["items"]


# ---- explanations ----------------------------------------------------------------------------------------------------


def test_an_explanation_says_what_a_declared_column_took_away(tmp_path):
    policies = {name: POLICIES[name] for name in ("only_fresh", "best_two")}
    deployment, loaded = snapshot_of(tmp_path, policies=policies)
    snapshot, lane = loaded.snapshot, TRANSITIONS["ancestry"]

    def fates(policy: str, *ids: str):
        job = support.job_of(snapshot, deployment, HISTORY, policy=policy, k=40, explain=ids)
        [answer] = support.run_batch([job])
        told = explain(job, lane(snapshot.engine.new_arena(deployment.limits), snapshot.contract.states), answer)
        assert told.mismatch is None
        return told, snapshot.vocab.ids(answer.items)

    stale = next(item for item in CATALOGUE if not columns(below(item, 2), [])["attr.any_fresh"])
    told, _ = fates("only_fresh", stale["id"])
    assert (told.items[0].result, told.items[0].step, told.items[0].phase) == ("masked", 2, "mask")
    assert sum(step.removed.get("mask", 0) for step in told.steps) > 0

    _, listed = fates("best_two")
    shared = next(item for item in CATALOGUE if item["id"] in listed and len(below(item, 3)) > 2)
    told, _ = fates("best_two", *(item["id"] for item in below(shared, 3)))
    for item, one in zip(below(shared, 3), told.items, strict=True):
        assert (one.result, one.phase) == (("listed", None) if item["id"] in listed else ("final", "expand"))


def below(item: dict, depth: int) -> list[dict]:
    """The items that share the first codes of one."""
    return [one for one in CATALOGUE if one["sid"][:depth] == item["sid"][:depth]]
