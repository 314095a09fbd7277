"""The composition root: reads a deployment, resolves what is "auto", and builds the rooms with what each of them needs.
`serve`, `recommend` and `demo` start here and nowhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from app.cli.deployment import read_deployment
from app.config import Deployment, Server, SidConfig
from app.errors import BadDeployment
from app.policies.plugins import installed
from app.runtime.contracts import Contracts
from app.runtime.engines import Engines
from app.runtime.live import Live
from app.runtime.loader import Loaded, load_root
from app.runtime.logs import Log, make_log
from app.runtime.metrics import Metrics
from app.runtime.recorder import Files
from app.runtime.runtime import Runtime
from app.runtime.status import Reason

Device = Literal["auto", "cpu", "cuda"]
clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says instead of deployment.toml; None = as the file says.

    offline  for commands that try policies out: requests name their policy, and nothing is written down about them
    """

    host: str | None = None
    port: int | None = None
    admin_port: int | None = None
    device: Device | None = None
    front_ends: int | None = None
    offline: bool = False

    def apply(self, deployment: Deployment) -> Deployment:
        """The deployment with these values."""
        given = {"host": self.host, "port": self.port, "admin_port": self.admin_port, "front_ends": self.front_ends}
        server = msgspec.structs.replace(deployment.server, **{k: v for k, v in given.items() if v is not None})
        deployment = msgspec.structs.replace(deployment, server=server, device=self.device or deployment.device)
        if not self.offline:
            return deployment
        server = msgspec.structs.replace(server, policy_override=True)
        log = msgspec.structs.replace(deployment.log, level="warning", requests=0.0, exposures=False)
        return msgspec.structs.replace(deployment, server=server, log=log)


@dataclass(frozen=True, slots=True)
class Service:
    """A composed server: `runtime.start(load)` makes it ready, or says why not; `live` follows the root for ever;
    `stream` is what the log goes to."""

    deployment: Deployment
    metrics: Metrics
    log: Log
    build: Callable[[], Runtime]
    load: Callable[[], Loaded]
    live: Callable[[Runtime], Live]
    stream: BinaryIO


def compose(root: Path, overrides: Overrides, stream: BinaryIO, *, tolerant: bool = False) -> Service:
    """Build a service over a deployment root; nothing is loaded yet.

    tolerant: with a bad deployment.toml the service is built on default sockets and never becomes ready, so that
    whoever asks it is told why. Otherwise BadDeployment is raised.
    """
    try:
        deployment, bad = overrides.apply(read_deployment(root)), None
    except BadDeployment as error:
        if not tolerant:
            raise
        deployment, bad = overrides.apply(Deployment(family="", sid=SidConfig(sizes=(1,)), server=Server())), error
    log, metrics = make_log(stream, deployment.log.level), Metrics()
    engines, contracts = Engines(root, metrics, log), Contracts(root, log)
    threads = deployment.server.threads or available_cores()
    operators = installed()
    for name, reason in operators.broken.items():
        log.error("operator_refused", operator=name, reason=reason)

    def load() -> Loaded:
        if bad is not None:
            return Loaded(reasons=(Reason(bad.code, bad.message, bad.path),))
        return load_root(root, deployment, log, clock, operators, contracts)

    def build() -> Runtime:
        records = Files(deployment.log, root / deployment.server.state_dir, metrics, log, clock)
        return Runtime(deployment, metrics, log, clock, recorder=records, threads=threads, engines=engines)

    def live(runtime: Runtime) -> Live:
        return Live(root, deployment, runtime, metrics, log, clock, contracts, operators)

    return Service(deployment, metrics, log, build, load, live, stream)


def available_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota where one is set (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
