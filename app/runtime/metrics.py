"""Every metric of the server, in one object that is made once and handed down.

Who counts: `api` requests, request seconds, refusals and the loop's lag; the runtime everything else. Labels are
bounded: texts that a client or a path can choose never become one, and policies are counted only by the names that
answers carry, at most `MAX_POLICIES` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from app.core import Level
from app.policies.names import LEVELS
from app.runtime.load import Reading

SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 1, 2, 5, 10)
LAG: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS: Final = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MAX_POLICIES: Final = 256

EXECUTED: Final = ("ok", "underfilled", "no_candidates")
"""Outcomes of requests that were answered; beside them `invalid`, `refused`, `expired`, `cancelled`, `failed`."""


class Metrics:
    """The metrics as attributes, in a registry of their own. Safe to use from any thread.

    `seconds`-metrics are in seconds; counters only go up. Label values that are known from the start exist from the
    start, so a rate over them is defined before the first event.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._policies: set[str] = set()
        self._compilations = _Compilations()
        self.registry.register(self._compilations)
        self._requests()
        self._steps()
        self._versions()
        self._experiments()
        self._updates()

    def _requests(self) -> None:
        registry = self.registry
        self.requests_total = Counter(
            "widebeam_requests_total", "Requests by outcome and by the policy that answered", ["outcome", "policy"],
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "widebeam_request_seconds", "From the body read to the answer encoded", buckets=SECONDS, registry=registry
        )
        self.shed_total = Counter(
            "widebeam_shed_total", "Requests refused at admission, by error code", ["reason"], registry=registry
        )
        self.cancelled_total = Counter(
            "widebeam_cancelled_total", "Requests whose client left, by stage", ["stage"], registry=registry
        )
        self.deadline_missed_total = Counter(
            "widebeam_deadline_missed_total", "Requests that expired, by stage", ["stage"], registry=registry
        )
        self.event_loop_lag_seconds = Histogram(
            "widebeam_event_loop_lag_seconds", "How late the event loop wakes up", buckets=LAG, registry=registry
        )
        self.front_ends_lost_total = Counter(
            "widebeam_front_ends_lost_total", "Front ends that ended by themselves, and were started again",
            registry=registry,
        )  # fmt: skip

    def _steps(self) -> None:
        registry = self.registry
        self.queue_seconds = Histogram(
            "widebeam_queue_seconds", "Waiting for a batch", buckets=SECONDS, registry=registry
        )
        self.step_seconds = Histogram(
            "widebeam_step_seconds",
            "One step of a batch: decode, select, transition; `context`: the encoder, on a GPU with step 1's decode",
            ["step"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.batch_size = Histogram("widebeam_batch_size", "Requests of a batch", buckets=REQUESTS, registry=registry)
        self.batch_rows = Histogram(
            "widebeam_batch_rows", "Rows of a batch's widest step", buckets=ROWS, registry=registry
        )
        self.queue_depth = Gauge("widebeam_queue_depth", "Requests waiting for a batch", registry=registry)
        self.load_level = Gauge(
            "widebeam_load_level", "1 for the load level that requests are admitted at", ["level"], registry=registry
        )
        self.load_backlog = Gauge(
            "widebeam_load_backlog",
            "Full batches that wait, as the mean that the load level follows",
            registry=registry,
        )
        self.load_requests_total = Counter(
            "widebeam_load_requests_total", "Requests of policies with load levels, by the level of their admission",
            ["level"], registry=registry,
        )  # fmt: skip
        for level in LEVELS:
            self.load_requests_total.labels(level)
        self.in_flight = Gauge("widebeam_in_flight", "Requests in a batch", registry=registry)
        self.engine_eager_steps_total = Counter(
            "widebeam_engine_eager_steps_total", "Decode steps on a GPU that no CUDA graph was there for",
            registry=registry,
        )  # fmt: skip
        self.bad_scores_total = Counter(
            "widebeam_bad_scores_total", "NaN or +inf in logits, expressions of policies, final lists", ["stage"],
            registry=registry,
        )  # fmt: skip
        self.compiles_total = Counter(
            "widebeam_compiles_total",
            "Modules of kernels compiled and CUDA graphs captured; `request`: by a thread that serves a batch or "
            "explains an answer, must stay 0; `background`: by any other",
            ["where"], registry=registry,
        )  # fmt: skip
        for where in ("request", "background"):
            self.compiles_total.labels(where)

        self.explained_total = Counter(
            "widebeam_explained_total",
            "Answers that were explained; `mismatch`: the run that explains gave other items than the answer",
            ["result"], registry=registry,
        )  # fmt: skip
        for result in ("equal", "mismatch", "failed"):
            self.explained_total.labels(result)

    def _versions(self) -> None:
        self.snapshot_info = Info(
            "widebeam_snapshot", "Versions by role: one series a role, whatever was loaded before", ["role"],
            registry=self.registry,
        )  # fmt: skip

    def _updates(self) -> None:
        registry = self.registry
        self.policy_reload_ok = Gauge(
            "widebeam_policy_reload_ok", "1 where everything in the policy folder is in force", registry=registry
        )
        self.policy_generation = Gauge(
            "widebeam_policy_generation", "How often the policies in force have changed", registry=registry
        )
        self.policy_stale_seconds = Gauge(
            "widebeam_policy_stale_seconds", "How long a policy has served an older text than its file's", ["policy"],
            registry=registry,
        )  # fmt: skip
        self.policy_live_info = Gauge(
            "widebeam_policy_live_info", "1 for the content id of each policy in force", ["policy", "id"],
            registry=registry,
        )  # fmt: skip
        self.policy_compile_seconds = Histogram(
            "widebeam_policy_compile_seconds", "Compiling a policy folder", buckets=SECONDS, registry=registry
        )
        self.policy_structures = Gauge(
            "widebeam_policy_structures", "Different structures among the policies in force", registry=registry
        )
        self.cutovers_total = Counter(
            "widebeam_cutovers_total", "Changes of the active snapshot, by cause", ["cause"], registry=registry
        )
        self.cutover_hold_seconds = Histogram(
            "widebeam_cutover_hold_seconds",
            "From the first admission on a new snapshot to its first batch, less the rest of the running batch",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.rejections_total = Counter(
            "widebeam_rejections_total", "Artifact versions refused by the gate, by kind", ["kind"], registry=registry
        )
        for kind in ("weights", "vocab", "takedowns"):
            self.rejections_total.labels(kind)

    def load(self, read: Callable[[], Reading]) -> None:
        """Show a load gauge: it is read when somebody asks for the metrics."""
        self.load_backlog.set_function(lambda: read().mean)
        for level in LEVELS:
            self.load_level.labels(level).set_function(partial(_is_at, read, level))

    def kernel_compilations(self, read: Callable[[], int]) -> None:
        """Count modules of kernels that were compiled: read when somebody asks for the metrics."""
        self._compilations.read = read

    def policies(self, live: Mapping[str, str], stale: Mapping[str, float]) -> None:
        """Replace the series by policy: content ids of those in force, and seconds of those that are stale."""
        self.policy_live_info.clear()
        for name, policy_id in sorted(live.items())[:MAX_POLICIES]:
            self.policy_live_info.labels(name, policy_id).set(1)
        self.policy_stale_seconds.clear()
        for name, seconds in sorted(stale.items())[:MAX_POLICIES]:
            self.policy_stale_seconds.labels(name).set(seconds)

    def _experiments(self) -> None:
        registry = self.registry
        self.exposures_total = Counter(
            "widebeam_exposures_total", "Answers by experiment, the arm that was served, and why",
            ["experiment", "arm", "reason"], registry=registry,
        )  # fmt: skip
        self.unassigned_total = Counter(
            "widebeam_unassigned_total", "Requests that lacked the unit that an experiment's layer hashes",
            ["experiment"], registry=registry,
        )  # fmt: skip
        self.experiment_alert = Gauge(
            "widebeam_experiment_alert", "1 while a guard (`stop_if`) of an arm is above its limit",
            ["experiment", "arm", "metric"], registry=registry,
        )  # fmt: skip
        self.records_lost_total = Counter(
            "widebeam_records_lost_total", "Lines of state/exposures and state/requests that were not written",
            ["kind"], registry=registry,
        )  # fmt: skip
        for kind in ("exposures", "requests"):
            self.records_lost_total.labels(kind)

    def snapshot(self, role: str, versions: Mapping[str, str]) -> None:
        """Say which versions fill a role ("active", "previous", "preparing"): `widebeam_snapshot_info{role=...} 1`."""
        self.snapshot_info.labels(role).info(dict(versions))

    def request_done(self, outcome: str, policy: str | None, seconds: float) -> None:
        """Count a request. `policy` is the name in the answer's versions, or None where no policy was bound."""
        self.requests_done(outcome, policy, (seconds,))

    def requests_done(self, outcome: str, policy: str | None, seconds: Sequence[float]) -> None:
        """Count as many requests of one outcome as there are `seconds`."""
        self.requests_total.labels(outcome, self._policy_label(policy)).inc(len(seconds))
        for one in seconds:
            self.request_seconds.observe(one)

    def shed(self, code: str) -> None:
        """Count a request that was refused."""
        self.shed_total.labels(code).inc()

    def lag(self, seconds: float) -> None:
        """Note how late an event loop woke up."""
        self.event_loop_lag_seconds.observe(seconds)

    def _policy_label(self, policy: str | None) -> str:
        if policy is None:
            return "none"
        if policy not in self._policies:
            if len(self._policies) >= MAX_POLICIES:
                return "other"
            self._policies.add(policy)
        return policy

    def counters(self) -> dict[str, int]:
        """The `counters` of `GET /admin/v1/status`: executed, cancelled, refused, failed."""
        count = dict.fromkeys(("executed", "cancelled", "refused", "failed"), 0)
        for family in self.requests_total.collect():
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                outcome = sample.labels["outcome"]
                name = "executed" if outcome in EXECUTED else "failed" if outcome == "expired" else outcome
                if name in count:
                    count[name] += int(sample.value)
        return count

    def render(self) -> bytes:
        """The text exposition of all metrics (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)


def _is_at(read: Callable[[], Reading], level: Level) -> float:
    return float(read().level == level)


CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class _Compilations(Collector):
    """A counter that somebody else keeps; 0 until they say where."""

    def __init__(self) -> None:
        self.read: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[CounterMetricFamily]:
        """See `Collector`."""
        text = "Modules of CUDA kernels that this process has compiled, or found in CuPy's cache of compiled ones"
        yield CounterMetricFamily("widebeam_kernel_compilations", text, value=self.read())
