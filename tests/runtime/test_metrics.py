from prometheus_client.parser import text_string_to_metric_families

from app.runtime.metrics import MAX_POLICIES, Metrics


def samples(metrics):
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for s in family.samples
    }


def test_two_servers_in_one_process_count_apart():
    first, second = Metrics(), Metrics()
    first.request_done("ok", "base", 0.01)
    assert first.counters()["executed"] == 1
    assert second.counters()["executed"] == 0


def test_counters_of_the_status_sum_outcomes():
    metrics = Metrics()
    for outcome in ("ok", "underfilled", "no_candidates", "cancelled", "refused", "failed", "expired", "invalid"):
        metrics.request_done(outcome, None, 0.01)
    assert metrics.counters() == {"executed": 3, "cancelled": 1, "refused": 1, "failed": 2}


def test_policies_become_labels_up_to_a_bound():
    metrics = Metrics()
    for n in range(MAX_POLICIES + 50):
        metrics.request_done("ok", f"p{n}", 0.01)
    found = samples(metrics)
    policies = [dict(labels)["policy"] for name, labels in found if name == "widebeam_requests_total"]
    assert len(policies) == MAX_POLICIES + 1
    assert found["widebeam_requests_total", (("outcome", "ok"), ("policy", "other"))] == 50


def test_a_role_has_one_series_whatever_was_loaded_before():
    metrics = Metrics()
    for n in range(5):
        metrics.snapshot("active", {"weights": f"w{n}", "vocab": "v"})
    found = [dict(labels) for name, labels in samples(metrics) if name == "widebeam_snapshot_info"]
    assert found == [{"role": "active", "weights": "w4", "vocab": "v"}]


def test_compiles_on_the_request_path_are_visible_at_0():
    assert samples(Metrics())["widebeam_compiles_total", (("where", "request"),)] == 0
