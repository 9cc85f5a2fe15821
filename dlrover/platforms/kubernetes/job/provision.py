"""
What a master does in its cluster before it begins: read its job, and make what the operator has not made.

The operator makes ledger, services and token with the job. A master that was started by hand, or by the original's
operator, makes them itself if it may, and else says which right is missing.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import (
    CONFIG_MAPS,
    ELASTIC_JOBS,
    SECRETS,
    SERVICES,
    ApiResource,
    Conflict,
    ConflictReason,
    Forbidden,
    FoundObject,
    NotFound,
)
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JsonObject
from dlrover.platforms.kubernetes.objects import Metadata, decode
from dlrover.protocol.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

ATTEMPTS = 3
PAUSE = 5.0
"""Seconds between two attempts to read the job."""


class Provision(Struct, frozen=True, kw_only=True):
    token: str
    master_addr: str = ""
    """Empty: the name of the master's service."""


class _SecretObject(Struct, frozen=True):
    metadata: Metadata
    data: dict[str, str] = {}


async def read_job(api: ClusterApi, name: str, *, namespace: str, pause: float = PAUSE) -> ElasticJob:
    """Raises `ConfigError` if there is none, it cannot be read, or the API server does not answer."""
    trouble = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause)
        try:
            answer = await api.get(ELASTIC_JOBS, name, namespace=namespace)
        except Unavailable as error:
            trouble = str(error)
            continue
        if isinstance(answer, FoundObject):
            try:
                return decode(ElasticJob, answer.body)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"The ElasticJob {name} in {namespace} cannot be used: {error}.") from error
        if isinstance(answer, Forbidden):
            raise ConfigError(
                f"The master may not read the ElasticJob {name} in {namespace}: {answer.message} Give its service account "
                "the right to get elasticjobs of elastic.iml.github.io."
            )
        trouble = answer.message
    raise ConfigError(f"Cannot get the training job {name} in {namespace} after {ATTEMPTS} attempts: {trouble}")


async def provide(api: ClusterApi, job: ElasticJob, *, port: int, token: str, pod_ip: str) -> Provision:
    """
    Make sure of ledger, services and token. `token`: what was given to the master, if anything.

    Raises `ConfigError` for a right without which the job cannot run, and `Unavailable`.
    """
    name, namespace = job.metadata.name, job.metadata.namespace
    ledger = await api.get(CONFIG_MAPS, names.ledger_name(name), namespace=namespace)
    if isinstance(ledger, FoundObject):
        return Provision(token=token or await _read_token(api, job))
    if not isinstance(ledger, NotFound | Forbidden):
        raise Unavailable(f"The ledger of {name} cannot be read: {ledger.message}")
    log.info("no operator prepared this job, so the master does it job=%s namespace=%s", name, namespace)
    await _make(api, job, CONFIG_MAPS, names.ledger_name(name), {"data": {}}, what="its ledger")
    token = await _make_token(api, job, token)
    try:
        await _make(api, job, SERVICES, names.master_service(name), _master_service(job, port), what="its service")
        await _make(api, job, SERVICES, names.nodes_service(name), _nodes_service(job), what="the nodes' names")
    except ConfigError as error:
        if not pod_ip:
            raise ConfigError(f"{error} Without it, set POD_IP to the master's own address.") from error
        log.warning(
            "%s Nodes use the address of this master's pod, and lose the master if it moves to another pod.", error
        )
        return Provision(token=token, master_addr=f"[{pod_ip}]:{port}" if ":" in pod_ip else f"{pod_ip}:{port}")
    return Provision(token=token)


async def _make_token(api: ClusterApi, job: ElasticJob, token: str) -> str:
    """The pods read it from a Secret, so it is written there; one that is there already wins over a new one."""
    wanted = token or secrets.token_urlsafe(32)
    data = {names.TOKEN_KEY: base64.b64encode(wanted.encode()).decode()}
    is_new = await _make(api, job, SECRETS, names.token_secret(job.metadata.name), {"data": data}, what="the token")
    return wanted if is_new or token else await _read_token(api, job)


async def _read_token(api: ClusterApi, job: ElasticJob) -> str:
    name = names.token_secret(job.metadata.name)
    answer = await api.get(SECRETS, name, namespace=job.metadata.namespace)
    if not isinstance(answer, FoundObject):
        raise ConfigError(
            f"The job's token cannot be read from the Secret {name}: {answer.message} Give --token-file FILE, "
            "or give the service account the right to read that Secret."
        )
    text = decode(_SecretObject, answer.body).data.get(names.TOKEN_KEY, "")
    return base64.b64decode(text).decode()


async def _make(
    api: ClusterApi, job: ElasticJob, resource: ApiResource, name: str, body: JsonObject, *, what: str
) -> bool:
    """Whether it is new. Raises `ConfigError` if we may not make it."""
    metadata = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": {
            names.APP: names.APP_DLROVER,
            names.JOB_NAME: job.metadata.name,
            names.JOB_UID: job.metadata.uid,
        },
        "ownerReferences": [names.owner_reference(job.metadata.name, job.metadata.uid)],
    }
    whole = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **body}
    answer = await api.create(resource, whole, namespace=job.metadata.namespace)
    match answer:
        case FoundObject():
            return True
        case Conflict(reason=ConflictReason.ALREADY_EXISTS):
            return False
        case Forbidden():
            raise ConfigError(
                f"The master may not create {what} for the job {job.metadata.name}, and no operator has created "
                f"it: {answer.message} Give its service account the right to create {resource.plural}, or "
                "install the operator."
            )
    raise Unavailable(f"The master cannot create {what} ({name}): {answer.message}")


def _master_service(job: ElasticJob, port: int) -> JsonObject:
    """By labels that pods of the original's operator have, too."""
    selector = {names.JOB_NAME: job.metadata.name, names.REPLICA_TYPE: names.MASTER_TYPE}
    ports = [{"name": "grpc", "port": names.MASTER_PORT, "targetPort": port, "protocol": "TCP"}]
    return {"spec": {"selector": selector, "ports": ports}}


def _nodes_service(job: ElasticJob) -> JsonObject:
    return {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_UID: job.metadata.uid},
        }
    }
