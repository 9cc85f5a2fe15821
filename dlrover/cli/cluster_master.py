"""
A master in a Kubernetes cluster: what it reads there before it starts, and what it leaves there when its job is over.

The command reads the ElasticJob and makes of it what every master gets: a fleet, options of the platform, a token. The
master process itself is the same as everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from dlrover.cli.options.scaling_settings import OPTIMIZE_MODES
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.fleet import FleetSpec, NodeType
from dlrover.protocol.messages.job import JobEnd
from dlrover.protocol.messages.scaling import ScaleMode

if TYPE_CHECKING:
    from dlrover.platforms.kubernetes.elastic_job import ElasticJob

log = logging.getLogger(__name__)

CLUSTER_PLATFORMS = ("pyk8s", "kubernetes", "k8s")
"""The first two are one platform: the master creates the pods itself. With the last it asks the operator to, by plans."""
TERMINATION_MESSAGE = "/dev/termination-log"
MAX_MESSAGE = 4096
"""Bytes of it that a kubelet keeps."""
LAPSE = 11.0
"""Seconds that the API server may go on accepting the token of a pod whose object is gone."""


class ClusterStart(Struct, frozen=True, kw_only=True):
    fleet: FleetSpec
    platform_options: dict[str, object]
    job_uid: str
    token: str
    scale_mode: ScaleMode = ScaleMode.OFF
    scaled_types: tuple[NodeType, ...] = ()
    """Types with `autoScale`."""
    nodes_start: int = 0
    """`replicas` of the workers; 0: there are none."""


class ClusterWish(Struct, frozen=True, kw_only=True):
    """What the command line says about the job in the cluster."""

    job_name: str
    namespace: str
    port: int
    """That the master listens on."""
    token: str
    """Given to the master; empty: it is found in the cluster."""
    pod_ip: str
    journal: str
    pending_timeout: float | None = None
    pending_strategy: int | None = None
    group_affinity: dict[int, int] = {}
    relaunches_errors: bool = False


class JobNotice(Struct, frozen=True):
    """The termination message: how the job ended. The operator believes it, and no exit code."""

    stage: str
    reason: str
    sentence: str


def prepare_in_cluster(wish: ClusterWish, environ: Mapping[str, str]) -> ClusterStart:
    """Raises `ConfigError`."""
    try:
        return asyncio.run(_prepare(wish, environ))
    except (Unavailable, Rejected) as error:
        raise ConfigError(f"The master of {wish.job_name} cannot start on this cluster: {error}") from error


async def _prepare(wish: ClusterWish, environ: Mapping[str, str]) -> ClusterStart:
    # Late: a master elsewhere needs no HTTP client.
    from dlrover.core.fleet.commands import check_spec
    from dlrover.platforms.kubernetes import names
    from dlrover.platforms.kubernetes.access import find_access

    try:
        from dlrover.platforms.kubernetes.api import ClusterApi
    except ImportError as error:
        raise ConfigError(str(error)) from error
    from dlrover.platforms.kubernetes.elastic_job import FaultyHosts
    from dlrover.platforms.kubernetes.job.fleet import MasterWishes, fleet_of, pod_job_of, scaled_types
    from dlrover.platforms.kubernetes.job.provision import provide, read_job
    from dlrover.platforms.kubernetes.platform import PodOptions

    access = find_access(environ)
    async with ClusterApi(access) as api:
        job = await read_job(api, wish.job_name, namespace=wish.namespace or access.namespace)
        fleet = fleet_of(
            job,
            MasterWishes(
                pending_timeout=wish.pending_timeout,
                pending_strategy=wish.pending_strategy,
                group_affinity=wish.group_affinity,
                relaunches_errors=wish.relaunches_errors,
            ),
        )
        try:
            check_spec(fleet)
        except Rejected as error:
            raise ConfigError(f"The ElasticJob {job.key} cannot run: {error}") from error
        provision = await provide(api, job, port=wish.port, token=wish.token, pod_ip=wish.pod_ip)
        pause = lapse_left(job, has_journal=os.path.exists(wish.journal), now=time.time())
        if pause:
            log.info("waiting until the former master has lost its access to the cluster seconds=%.1f", pause)
            await asyncio.sleep(pause)
    pods = pod_job_of(job, fleet, master_addr=provision.master_addr, token_secret=names.token_secret(job.metadata.name))
    options = PodOptions(job=pods, can_cordon=job.spec.faulty_hosts is FaultyHosts.CORDON)
    return ClusterStart(
        fleet=fleet,
        platform_options=msgspec.to_builtins(options, str_keys=True),
        job_uid=job.metadata.uid,
        token=provision.token,
        scale_mode=OPTIMIZE_MODES[job.spec.optimize_mode],
        scaled_types=scaled_types(job),
        nodes_start=fleet.replicas[NodeType.WORKER].count if NodeType.WORKER in fleet.replicas else 0,
    )


def lapse_left(job: ElasticJob, *, has_journal: bool, now: float) -> float:
    """
    Seconds that a master without a journal waits until its predecessor can write nothing any more.

    With a journal its first record ends the predecessor's right to decide. Without one, the API server itself refuses the
    predecessor, some seconds after its pod's object is gone.
    """
    record = job.status.master
    if record is None or not record.gone_at or has_journal:
        return 0.0
    try:
        gone_at = datetime.fromisoformat(record.gone_at).timestamp()
    except ValueError:
        log.warning("status.master.goneAt is not a time, so this master waits the full time value=%s", record.gone_at)
        return LAPSE
    return max(0.0, min(LAPSE, gone_at + LAPSE - now))  # clocks differ: never longer than the lapse itself


def leave_notice(end_file: str, path: str) -> bool:
    """
    Tell the cluster how the job ended. False: it has not ended, or no kubelet made the file `path` to hear of it.
    """
    try:
        end = msgspec.json.decode(Path(end_file).read_bytes(), type=JobEnd)
    except FileNotFoundError:
        return False
    if not os.path.exists(path):
        log.info("this pod has no termination message file, so the end of the job is not written there file=%s", path)
        return False
    stage = "Succeeded" if end.exit_code == 0 else "Failed"
    text = _fitting(JobNotice(stage=stage, reason=end.reason.value, sentence=end.message))
    try:
        Path(path).write_bytes(text)
    except OSError as error:
        log.error("the end of the job could not be written for the cluster file=%s reason=%s", path, error.strerror)
        return False
    return True


def _fitting(notice: JobNotice) -> bytes:
    """A message that the kubelet cuts would be no JSON any more."""
    text = msgspec.json.encode(notice)
    while len(text) > MAX_MESSAGE:
        kept = len(notice.sentence) - max(1, (len(text) - MAX_MESSAGE) // 4 + 1)
        notice = msgspec.structs.replace(notice, sentence=notice.sentence[: max(0, kept)])
        text = msgspec.json.encode(notice)
    return text
