"""Parts of the cutover bench: which requests overlap an update, ratios, and answers that do not fit their versions."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from app.config import parse
from app.runtime.desired import asked
from app.runtime.thread import EngineThread
from app.vocab.artifact import load_vocab
from app.vocab.manifest import verify, version_key
from bench import _cutover_processes as processes
from bench._cutover_naive import OnTheEngine
from bench._cutover_plot import plot
from bench._cutover_processes import Trouble, answers_a_second, saturation
from bench._cutover_report import QUANTILES, Ordered, quantile, ratios, write_report
from bench._cutover_root import KEPT, TOY, bodies, clean, drop_old, make_root, publish
from bench._cutover_samples import AFTER_S, Samples
from bench.cutover import Updates, _complete


def client(rows):
    """rows: (intended, latency ms, status, weights, score); the last item's score is twice the best one's."""
    columns = {
        "intended": [row[0] for row in rows],
        "latency_ms": [row[1] for row in rows],
        "late_ms": [0.1 for _ in rows],
        "status": [row[2] for row in rows],
        "body": [0 for _ in rows],
        "weights": [row[3] for row in rows],
        "vocab": ["v1" for _ in rows],
        "score": [row[4] for row in rows],
        "last": [2 * row[4] for row in rows],
        "mixed": [0 for _ in rows],
        "batch_ms": [1.0 for _ in rows],
    }
    return {
        "sent": len(rows),
        "answered": sum(row[2] == 200 for row in rows),
        "failed": {},
        "columns": columns,
        "named": [NAMED],
    }


NAMED = {"snapshot": "s", "weights": "v1", "vocab": "v1", "policy": "base", "policy_id": "p", "contract": "c"}


def part(rows, *, mode="live", updates=((10.0, 11.0, 12.0),), trouble=()):
    made = [
        {
            "kind": "weights",
            "weights": "v2-b",
            "published": a,
            "active": b,
            "gone": c,
            "hold_ms": 0.5,
            "prepare_ms": 900.0,
        }
        for a, b, c in updates
    ]
    return {
        "mode": mode, "setting": vars(TOY) if hasattr(TOY, "__dict__") else {}, "machine": {
            "cpu": "x", "cores": 2, "load_before": 0.0, "versions": {"torch": "2"}, "commit": "c",
        }, "marks": [0.0, 9.0, 14.0, 23.0], "rate_per_s": 1.0, "saturation_per_s": 2.0, "note": "", "updates": made,
        "clients": [client(rows)], "first": [{**one, "published": -2.0, "gone": -1.0} for one in made[:1]], "asked": 1,
        "trouble": list(trouble), "kernels": "torch", "graphs": [],
    }  # fmt: skip


def test_what_is_on_its_way_during_an_update_overlaps_it():
    times = [(9.5, 400.0), (9.5, 600.0), (10.5, 1.0), (12.0 + AFTER_S, 1.0), (12.3 + AFTER_S, 1.0)]
    samples = Samples.of(part([(at, ms, 200, "v1", 0.0) for at, ms in times]))
    assert samples.overlaps(samples.windows).tolist() == [False, True, True, True, False]
    assert samples.stretch.tolist() == [2] * 5
    none = Samples.of(part([(1.0, 1.0, 200, "v1", 0.0)], updates=()))
    assert none.overlaps(none.windows).tolist() == [False]


def test_refused_requests_are_counted_and_have_no_latency():
    samples = Samples.of(part([(1.0, 5.0, 503, "", 0.0), (2.0, 6.0, 200, "v1", 0.0)]))
    assert samples.latency.tolist() == [6.0]


def test_quantiles_are_measured_values_and_ratios_have_intervals():
    assert quantile([np.arange(1.0, 101.0)], 0.99) == 99.0
    assert quantile([np.array([3.0]), np.array([1.0])], 0.5) == 1.0
    random = np.random.default_rng(1)
    slow = [2 * random.lognormal(size=200) for _ in range(40)]
    quick = [random.lognormal(size=200) for _ in range(40)]
    middle, low, high = ratios(slow, quick, resamples=200)["p99"]
    assert low < middle < high
    assert low < 2 < high
    assert low > 1.5
    assert high < 2.7


def test_a_draw_of_blocks_has_the_quantiles_of_their_values_together():
    random = np.random.default_rng(3)
    blocks = [random.lognormal(size=n) for n in (7, 1, 300, 40, 2)]
    for seed in range(20):
        drawn = np.random.default_rng(seed).integers(0, len(blocks), len(blocks))
        wanted = [quantile([blocks[n] for n in drawn], q) for q in QUANTILES.values()]
        assert Ordered(blocks).drawn(np.random.default_rng(seed)).tolist() == wanted


def test_the_report_pools_parts_and_modes(tmp_path):
    rows = [(n / 10, 5.0 if n % 10 else 9.0, 200, "v1", -1.0) for n in range(230)]
    slow = [(at, 30 * ms if 10 < at < 12 else ms, *rest) for at, ms, *rest in rows]
    text = write_report([part(rows), part(rows), part(slow, mode="naive")], tmp_path / "r")
    assert "| during / steady, p99 | 1.00 (1.00..1.00) | 30.00" in text
    assert "| parts, updates | 2, 2 of 2 | 1, 1 of 1 |" in text
    assert "| during / between, p99 | 1.00 (1.00..1.00) | " in text
    assert "Cut short" not in text
    assert "**live: p99 during updates / steady: met: 1.00 (1.00..1.00); the aim is 1.1, or 1.00, " in text
    assert "**naive: p99 during updates / steady: missed: 30.00 " in text
    uneven = [(at, 2 * ms if at > 14 else ms, *rest) for at, ms, *rest in rows]
    assert "not known: steady stretches may be 2.00 apart (A/A)" in write_report([part(uneven)], tmp_path / "u")
    summary = json.loads((tmp_path / "r.json").read_text())["summary"]
    assert summary["live"]["requests"]["sent"] == 460
    assert summary["live"]["seconds"] == {"steady": 36.0, "updates": 10.0}
    assert "live: 2 cutovers in 10 s and 36 s steady, in 2 parts; naive: 1 cutovers in 5 s and 18 s" in text
    assert "in 1 part, all of commit c." in text
    picture = (tmp_path / "r.svg").read_text()
    assert picture.count("<polyline") == 4  # tail and rate, live and naive
    assert picture == plot({"live": part(rows), "naive": part(slow, mode="naive")})


def test_parts_of_other_commits_are_refused(tmp_path):
    rows = [(n / 10, 5.0, 200, "v1", -1.0) for n in range(230)]
    other = part(rows)
    other["machine"] = {**other["machine"], "commit": "d+"}
    with pytest.raises(SystemExit, match=r"different commits are not pooled: c, d\+"):
        write_report([part(rows), other], tmp_path / "r")
    assert not (tmp_path / "r.md").exists()
    unknown = {**part(rows), "machine": {**other["machine"], "commit": ""}}
    assert "all of commit unknown." in write_report([unknown], tmp_path / "r")


def test_a_part_that_was_cut_short_says_so_and_parts_of_other_settings_are_refused(tmp_path):
    rows = [(n / 10, 5.0, 200, "v1", -1.0) for n in range(-30, 230)]
    text = write_report([part(rows, trouble=["update 7: refused"])], tmp_path / "r")
    assert "**Cut short: update 7: refused**" in text
    assert "| first updates p50, p99, p99.9 ms | 5.00, 5.00, 5.00 |" in text
    cut = write_report([part([row for row in rows if row[0] < 12], trouble=["the server ended"])], tmp_path / "cut")
    assert "| A/A, p99 |  |" in cut
    assert "**live: p99 during updates / steady: not known: a stretch is missing**" in cut
    with pytest.raises(SystemExit, match="different settings"):
        write_report([part(rows), {**part(rows), "setting": {"width": 1}}], tmp_path / "r")


class FakeServer:
    """Serves whatever is asked for, until it refuses."""

    def __init__(self, root, refuses_at=99):
        self.root, self.refuses_at, self.seen = root, refuses_at, []

    def wait(self, event, seconds, **names):
        assert event == "snapshot_active"
        assert asked(self.root / "release.json", "release.json") == names
        for kind, version in names.items():
            verify(self.root / kind / version, kind)
        if len(self.seen) == self.refuses_at:
            raise Trouble("refused")
        self.seen.append(names)
        return 0.0, {}


def test_versions_are_there_before_they_are_asked_for_and_gone_only_when_nobody_wants_them(tmp_path):
    root = make_root(tmp_path, TOY)
    clean(tmp_path)
    server = FakeServer(root)
    made, trouble = Updates(server, tmp_path, gap=0.0).publish(["weights", *["vocab"] * 8, "both"], until=np.inf)
    assert not trouble
    assert [one["kind"] for one in made] == ["weights", *["vocab"] * 8, "both"]
    assert server.seen[0] == {"weights": "v2-b", "vocab": "v1"}
    assert server.seen[8] == {"weights": "v2-b", "vocab": "v10-c"}
    assert server.seen[9] == {"weights": "v11-c", "vocab": "v11-a"}
    assert len(list((root / "vocab").iterdir())) == KEPT
    assert {path.name for path in (root / "weights").iterdir()} == {"v1", "v2-b", "v11-c"}
    drop_old(tmp_path, {"v7-a"})
    clean(tmp_path)
    assert [path.name for path in (root / "vocab").iterdir()] == ["v1"]


def test_a_version_that_is_dropped_changes_no_file_of_those_that_stay(tmp_path):
    root = make_root(tmp_path, TOY)
    clean(tmp_path)
    for number in range(2, 2 + KEPT):  # v4 has the content of v1: links to the same files
        publish(tmp_path, "vocab", (number - 1) % 3, f"v{number}-x")
    before = {path: path.stat().st_ctime_ns for path in (root / "vocab").glob("v*-x/*")}
    drop_old(tmp_path, {"v5-x"})
    assert not (root / "vocab" / "v1").exists()
    assert {path: path.stat().st_ctime_ns for path in (root / "vocab").glob("v*/*")} == before
    clean(tmp_path)
    assert not (tmp_path / "trash").exists()


def test_what_goes_wrong_ends_the_updates_and_not_the_part(tmp_path):
    clean_root = make_root(tmp_path, TOY)
    clean(tmp_path)
    made, trouble = Updates(FakeServer(clean_root, refuses_at=2), tmp_path, gap=0.0).publish(["both"] * 5, until=np.inf)
    assert len(made) == 2
    assert trouble == ["update 3 (both): refused"]
    assert Updates(FakeServer(clean_root), tmp_path, gap=0.0).publish(["both"], until=0.0) == ([], [])


def test_clients_wait_for_answers_as_long_as_they_are_told_and_write_down_the_rest(tmp_path):
    (tmp_path / "bodies.jsonl").write_bytes(b'{"k": 1}')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        clients = processes.Clients(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, 1, rate=50.0, seed=1)
        asking, _ = silent.accept()
        with asking:
            assert asking.recv(1).startswith(b"P")
            [found], wrong = clients.collect(patience=0.2)
    assert wrong == []
    assert found["sent"] > found["answered"] == 0


def test_what_the_log_says_of_an_update_is_kept_with_it():
    lines = [
        (10.2, {"event": "artifact", "kind": "weights", "version": "v2-b", "state": "discovered"}),
        (10.3, {"event": "artifact", "kind": "vocab", "version": "v1", "state": "ready"}),
        (10.9, {"event": "artifact", "kind": "policy", "version": "v2-b", "state": "live"}),
        (11.0, {"event": "artifact", "kind": "weights", "version": "v2-b", "state": "active"}),
        (11.5, {"event": "artifact", "kind": "weights", "version": "v1", "state": "retired"}),
        (11.0, {"event": "cutover", "weights": "v2-b", "vocab": "v1", "hold_ms": 3.0}),
        (12.0, {"event": "cutover", "weights": "v3-c", "vocab": "v1", "hold_ms": 9.0}),
        (14.0, {"event": "artifact", "kind": "weights", "version": "v2-b", "state": "retired"}),
    ]
    server = SimpleNamespace(of=lambda event: [one for one in lines if one[1]["event"] == event])
    one = {"kind": "weights", "weights": "v2-b", "vocab": "v1", "published": 10.0, "active": 11.0}
    two = {"kind": "weights", "weights": "v3-c", "vocab": "v1", "published": 13.0, "active": 13.5}
    _complete(server, [one, two])
    assert (one["hold_ms"], one["prepare_ms"], one["gone"]) == (3.0, None, 11.5)
    assert one["states"] == [(0.2, "weights", "discovered"), (0.3, "vocab", "ready"), (1.0, "weights", "active")]
    assert (two["hold_ms"], two["gone"], two["states"]) == (9.0, 14.0, [])


def test_saturation_is_found_in_few_short_rates(monkeypatch, tmp_path):
    offered = []

    class FakeClients:
        def __init__(self, url, work, count, rate, seed, seconds):
            offered.append(rate)
            self.answered, self.took = int(rate * seconds), max(seconds, rate * seconds / 700)

        def collect(self):
            columns = {"intended": [10.0, 10.0 + self.took - 0.1], "latency_ms": [100.0, 100.0]}
            return [{"answered": self.answered, "columns": columns}], []

    monkeypatch.setattr(processes, "Clients", FakeClients)
    assert saturation("", tmp_path, 4, 2.0) == pytest.approx(700, rel=0.01)
    assert offered == [16, 64, 256, 1024, pytest.approx(910, rel=0.01)]
    assert answers_a_second([{"answered": 0, "columns": {}}], 1.0) == 0.0


def test_a_root_has_three_contents_of_each_kind_and_versions_that_are_links(tmp_path):
    root = make_root(tmp_path, TOY)
    deployment = parse((root / "deployment.toml").read_text())
    for kind, content, version in (("weights", 1, "v2-b"), ("vocab", 2, "v10-c")):
        publish(tmp_path, kind, content, version)
        verify(root / kind / version, kind)
    assert sorted(["v10-c", "v2-b", "v1"], key=version_key) == ["v1", "v2-b", "v10-c"]
    vocab = load_vocab(root / "vocab" / "v10-c", deployment.sid.sizes)
    asked = [one["context"]["history"] for one in map(json.loads, bodies(TOY))]
    assert min(vocab.find([item for one in asked for item in one])) >= 0
    with pytest.raises(SystemExit, match="another setting"):
        make_root(tmp_path, type(TOY)(gigabytes=0.001))


def test_the_naive_mode_works_where_batches_do():
    thread = EngineThread(None)
    where = asyncio.run(OnTheEngine(SimpleNamespace(_thread=thread)).run(threading.current_thread))
    thread.close()
    assert where.name == "widebeam-engine"
