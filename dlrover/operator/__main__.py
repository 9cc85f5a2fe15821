"""
`python -m dlrover.operator`: keeps one master alive for each ElasticJob of a cluster.

It ends with 0 after SIGTERM or SIGINT, with 2 for an option or a cluster that cannot be used (no cluster, no right, no
ElasticJob resource), and with 1 if another operator has taken over.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Unavailable

try:
    from dlrover.operator.actions import ObjectKind
    from dlrover.operator.cluster_view import OPTIONAL, RESOURCES, ClusterView
    from dlrover.operator.doors import OperatorMetrics, open_doors, parse_door
    from dlrover.operator.lease import LEASE_NAME, USUAL_TIMING, LeaderLease, LeadershipLost, LeaseTiming
    from dlrover.operator.observations import OperatorSettings
    from dlrover.operator.owned import GROUP_KINDS
    from dlrover.operator.runner import Runner
    from dlrover.platforms.kubernetes.access import ClusterAccess, find_access
    from dlrover.platforms.kubernetes.api import NODES, ApiRefusal, ApiResource, ClusterApi, NotFound, Page
except ImportError as error:
    sys.stderr.write(f"dlrover.operator: error: {error}\n")
    sys.exit(2)

log = logging.getLogger("dlrover.operator")

T = TypeVar("T")

DEFAULT_IMAGE = "dlrover/dlrover:latest"
EXIT_LOST = 1
EXIT_USAGE = 2
START_TIMEOUT = 60.0
"""Seconds that the API server may be away at the start: after a power cut it comes up together with us."""


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return asyncio.run(_serve(options))
    except ConfigError as error:
        print(f"dlrover.operator: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except LeadershipLost as error:
        log.error("%s Another operator may be active now, so this one ends.", error)
        return EXIT_LOST


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.operator", description="Keep one master alive for each ElasticJob of a cluster."
    )
    parser.add_argument(
        "--metrics-bind-address", default=":8080", metavar="HOST:PORT", help="port of /metrics (:8080; 0: none)"
    )
    parser.add_argument(
        "--health-probe-bind-address",
        default=":8081",
        metavar="HOST:PORT",
        help="port of /healthz and /readyz (:8081; 0: none)",
    )
    parser.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=f"act only while this operator holds the Lease {LEASE_NAME}; needed if several operators run in one "
        "cluster",
    )
    parser.add_argument(
        "--leader-election-namespace", default="", metavar="NAME", help="namespace of that Lease (the operator's own)"
    )
    for name, default, text in (
        ("lease-duration", USUAL_TIMING.duration, "seconds that other operators wait after the holder's last renewal"),
        (
            "renew-deadline",
            USUAL_TIMING.renew_deadline,
            "seconds without a successful renewal after which the holder ends",
        ),
        ("retry-period", USUAL_TIMING.retry, "between two tries"),
    ):
        parser.add_argument(
            f"--leader-elect-{name}", type=_seconds, default=default, metavar="SECONDS", help=f"{text} ({default:g})"
        )
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        default=START_TIMEOUT,
        metavar="SECONDS",
        help=f"seconds to wait at the start for an API server that does not answer ({START_TIMEOUT:g})",
    )
    parser.add_argument(
        "--master-image",
        default=DEFAULT_IMAGE,
        metavar="IMAGE",
        help=f"container image of masters whose job names no image ({DEFAULT_IMAGE})",
    )
    parser.add_argument("--namespace", default="", metavar="NAME", help="manage the jobs of this namespace only (all)")
    parser.add_argument(
        "--allow-cordon",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="allow jobs of this namespace to mark machines unschedulable; may be given again",
    )
    parser.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help="kubeconfig file for the cluster (KUBECONFIG, or the pod's account)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="level of the log (info)"
    )
    return parser


async def _serve(options: argparse.Namespace) -> int:
    health = parse_door(options.health_probe_bind_address, "--health-probe-bind-address")
    metrics = parse_door(options.metrics_bind_address, "--metrics-bind-address")
    timing = _lease_timing(options)
    namespace = options.namespace or None
    access = find_access(os.environ, kubeconfig=Path(options.kubeconfig) if options.kubeconfig else None)
    numbers = OperatorMetrics()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with ClusterApi(access) as api:
        cluster = await _until(stop, _look_around(api, access, namespace, options.start_timeout))
        if cluster is None:
            return 0
        view = ClusterView(api, namespace=namespace, sees_machines=cluster.sees_machines, absent=cluster.absent)
        settings = OperatorSettings(
            master_image=options.master_image,
            allow_cordon=frozenset(options.allow_cordon if cluster.sees_machines else ()),
            gang_schedulers=frozenset(
                scheduler.value for scheduler, kind in GROUP_KINDS.items() if kind not in cluster.absent
            ),
        )
        runner = Runner(api, view, settings, report=numbers.report)
        work = _work(api, options, timing, view, runner, numbers)
        async with open_doors(
            health,
            metrics,
            readiness=lambda: _trouble(view),
            numbers=numbers,
            count=lambda: [job.status.phase for job in view.jobs.cache.values()],
        ):
            log.info("operator of namespace=%s at server=%s", namespace or "(all)", access.server)
            await _until(stop, work)
    log.info("operator ended")
    return 0


async def _work(
    api: ClusterApi,
    options: argparse.Namespace,
    timing: LeaseTiming,
    view: ClusterView,
    runner: Runner,
    numbers: OperatorMetrics,
) -> None:
    """Informers run from the start, so that an operator that takes over knows the cluster already."""

    async def act() -> None:
        numbers.is_leader.set(1)
        try:
            await runner.run()
        finally:
            numbers.is_leader.set(0)

    informers = [asyncio.ensure_future(informer.run()) for informer in view.informers]
    try:
        if options.leader_elect:
            identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
            namespace = options.leader_election_namespace or api.namespace
            lease = LeaderLease(api, namespace=namespace, identity=identity, timing=timing)
            leading = asyncio.ensure_future(lease.lead(act))
        else:
            leading = asyncio.ensure_future(act())
        tasks = (leading, *informers)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # none of them ends by itself but with an exception
        finally:
            leading.cancel()
            await asyncio.wait((leading,))
    finally:
        for task in informers:
            task.cancel()
        await asyncio.wait(informers)


class _FoundCluster(Struct, frozen=True):
    sees_machines: bool
    absent: frozenset[ObjectKind]


async def _look_around(api: ClusterApi, access: ClusterAccess, namespace: str | None, timeout: float) -> _FoundCluster:
    """Is there a cluster, with our resources, and may we see them?"""
    absent = set()
    for kind, resource in RESOURCES.items():
        answer = await _first_page(api, access, resource, namespace, timeout)
        if kind in OPTIONAL and not isinstance(answer, Page):
            log.info("jobs cannot use the gang scheduler %s: %s", resource.group, answer.message)
            absent.add(kind)
            continue
        if isinstance(answer, NotFound):
            raise ConfigError(
                f"The cluster at {access.server} has no resource {resource.plural}.{resource.group}. Install it: "
                "kubectl apply -f deploy/crds"
            )
        if not isinstance(answer, Page):
            raise ConfigError(
                f"The operator may not list {resource.plural} in {namespace or 'all namespaces'}: {answer.message} "
                "Give its service account the rights of the operator's role, or name one namespace with --namespace."
            )
    answer = await _first_page(api, access, NODES, None, timeout)
    if not isinstance(answer, Page):
        log.warning(
            "The operator cannot see the machines: %s It replaces a master on a lost machine only after its "
            "pod is deleted.",
            answer.message,
        )
    return _FoundCluster(isinstance(answer, Page), frozenset(absent))


async def _first_page(
    api: ClusterApi, access: ClusterAccess, resource: ApiResource, namespace: str | None, timeout: float
) -> Page | ApiRefusal:
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await api.list_page(resource, namespace=namespace, limit=1)
        except Unavailable as error:
            # A server with other resources of the group answers with a Status, one without any with plain text.
            if error.code == ErrorCode.UNKNOWN_RESOURCE or "was answered with 404" in str(error):
                return NotFound(str(error))
            if asyncio.get_running_loop().time() >= deadline:
                raise ConfigError(f"No cluster answers at {access.server}: {error}") from error
            log.warning("no answer server=%s: %s", access.server, error)
            await asyncio.sleep(2.0)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None: we were asked to stop, and the work was cancelled."""
    task, asked = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, asked):
            each.cancel()
        await asyncio.wait((task, asked))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return value


def _lease_timing(options: argparse.Namespace) -> LeaseTiming:
    timing = LeaseTiming(
        duration=options.leader_elect_lease_duration,
        renew_deadline=options.leader_elect_renew_deadline,
        retry=options.leader_elect_retry_period,
    )
    if not timing.retry < timing.renew_deadline < timing.duration:
        raise ConfigError(
            f"--leader-elect-retry-period {timing.retry:g}, --leader-elect-renew-deadline {timing.renew_deadline:g} and "
            f"--leader-elect-lease-duration {timing.duration:g} must ascend in this order."
        )
    return timing


def _trouble(view: ClusterView) -> str | None:
    return next((informer.trouble for informer in view.informers if informer.trouble is not None), None)


if __name__ == "__main__":
    sys.exit(main())
