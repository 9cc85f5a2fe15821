"""
ElasticJobs of a cluster, as commands on a terminal need them: each refusal of the API server is an error with a sentence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, JobError, Unavailable

if TYPE_CHECKING:
    from dlrover.platforms.kubernetes.answers import ApiRefusal, FoundObject
    from dlrover.platforms.kubernetes.api import ClusterApi
    from dlrover.platforms.kubernetes.elastic_job import ElasticJob
    from dlrover.platforms.kubernetes.objects import Pod

JsonObject = dict[str, Any]

NO_RESOURCE = (
    "This cluster has no ElasticJob resource. Install the definitions and the operator first: kubectl apply -k "
    "deploy (see docs/how-to/kubernetes-clusters.md)."
)


class ClusterJobs:
    """Jobs of one namespace."""

    def __init__(self, api: ClusterApi, namespace: str, server: str) -> None:
        self._api = api
        self.namespace = namespace
        self.server = server

    async def find(self, name: str) -> ElasticJob | None:
        """None: there is no job of this name."""
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS, FoundObject, NotFound

        answer = await self._api.get(ELASTIC_JOBS, name, namespace=self.namespace)
        if isinstance(answer, NotFound):
            return None
        if not isinstance(answer, FoundObject):
            raise self._refused(f"read the job {name}", answer)
        return _decoded(answer.body)

    async def get(self, name: str) -> ElasticJob:
        job = await self.find(name)
        if job is None:
            known = ", ".join(sorted(each.metadata.name for each in await self.list())) or "none"
            raise ConfigError(f"There is no job {name} in the namespace {self.namespace}. Jobs there: {known}.")
        return job

    async def list(self, *, is_everywhere: bool = False) -> tuple[ElasticJob, ...]:
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS, Page

        page = await self._api.list_all(ELASTIC_JOBS, namespace=None if is_everywhere else self.namespace)
        if not isinstance(page, Page):
            raise self._refused("list jobs", page)
        return tuple(_decoded(bytes(item)) for item in page.items)

    async def create(self, body: JsonObject, *, is_trial: bool = False) -> FoundObject:
        """`body`: an ElasticJob or what it needs. `is_trial`: the API server only checks it."""
        from dlrover.platforms.kubernetes.answers import Conflict, FoundObject, Invalid

        resource = resource_of(body)
        metadata = body.get("metadata") or {}
        what = f"{body.get('kind')} {metadata.get('name') or metadata.get('generateName', '')}"
        namespace = str(metadata.get("namespace") or self.namespace)
        answer = await self._api.create(resource, body, namespace=namespace, dry_run=is_trial)
        match answer:
            case FoundObject():
                return answer
            case Conflict():
                raise ConfigError(f"{what} already exists in {namespace}. Delete it first, or choose another name.")
            case Invalid():
                raise ConfigError(f"The API server rejected {what}: {answer.message}")
            case _:
                raise self._refused(f"create {what}", answer)

    async def change(self, name: str, patch: JsonObject) -> ElasticJob:
        """A merge patch."""
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS, FoundObject, Invalid, NotFound, PatchKind

        answer = await self._api.patch(ELASTIC_JOBS, name, patch, namespace=self.namespace, kind=PatchKind.MERGE)
        match answer:
            case FoundObject():
                return _decoded(answer.body)
            case NotFound():
                return await self.get(name)  # says which jobs there are
            case Invalid():
                raise ConfigError(f"The API server rejected the change of {name}: {answer.message}")
            case _:
                raise self._refused(f"change the job {name}", answer)

    async def delete(self, name: str) -> None:
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS, FoundObject, NotFound

        answer = await self._api.delete(ELASTIC_JOBS, name, namespace=self.namespace)
        if isinstance(answer, NotFound):
            await self.get(name)
        elif not isinstance(answer, FoundObject):
            raise self._refused(f"delete the job {name}", answer)

    async def pods(self, job: ElasticJob) -> tuple[Pod, ...]:
        from dlrover.platforms.kubernetes import names
        from dlrover.platforms.kubernetes.answers import PODS, Page
        from dlrover.platforms.kubernetes.objects import Pod, decode

        page = await self._api.list_all(PODS, namespace=self.namespace, labels=names.selector_of(job.metadata.uid))
        if not isinstance(page, Page):
            raise self._refused("list pods", page)
        return tuple(decode(Pod, item) for item in page.items)

    async def events(self, job: ElasticJob) -> tuple[JsonObject, ...]:
        """Newest last. Empty where we may not read them."""
        from dlrover.platforms.kubernetes.answers import EVENTS, Page

        fields = f"involvedObject.uid={job.metadata.uid}"
        page = await self._api.list_all(EVENTS, namespace=self.namespace, fields=fields)
        if not isinstance(page, Page):
            return ()
        events = [msgspec.json.decode(item, type=JsonObject) for item in page.items]
        return tuple(sorted(events, key=lambda event: str(event.get("lastTimestamp") or "")))

    async def follow(self, name: str) -> AsyncIterator[ElasticJob | None]:
        """The job now and after each change. None: it was deleted."""
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS
        from dlrover.platforms.kubernetes.elastic_job import ElasticJob
        from dlrover.platforms.kubernetes.informer import Informer, ObjectDeleted, ObjectsListed

        informer = Informer(
            self._api, ELASTIC_JOBS, ElasticJob, namespace=self.namespace, fields=f"metadata.name={name}"
        )
        async with contextlib.AsyncExitStack() as stack:
            import asyncio

            running = asyncio.ensure_future(informer.run())
            stack.callback(running.cancel)
            async for sight in informer.subscribe():
                if isinstance(sight, ObjectsListed):
                    yield sight.objects[0] if sight.objects else None
                else:
                    yield None if isinstance(sight, ObjectDeleted) else sight.object

    async def log(self, pod: Pod, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
        from dlrover.platforms.kubernetes.pods import main_name

        pieces = self._api.read_log(
            pod.metadata.name, namespace=self.namespace, container=main_name(pod), follow=follow, tail=tail
        )
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if not isinstance(piece, bytes):
                    raise self._refused(f"read the log of {pod.metadata.name}", piece)
                yield piece

    def _refused(self, what: str, answer: ApiRefusal) -> ConfigError | JobError:
        from dlrover.platforms.kubernetes.answers import Forbidden, NotFound

        match answer:
            case Forbidden():
                return ConfigError(f"You may not {what} in {self.namespace} ({self.server}): {answer.message}")
            case NotFound() if "namespaces" in answer.message:
                return ConfigError(f"There is no namespace {self.namespace} at {self.server}.")
            case _:
                return ConfigError(f"The API server at {self.server} does not {what}: {answer.message}")


@contextlib.asynccontextmanager
async def open_cluster(namespace: str, environ: Mapping[str, str] = os.environ) -> AsyncIterator[ClusterJobs]:
    """Raises `ConfigError` if there is no cluster, no extra, or no such resource."""
    try:
        from dlrover.platforms.kubernetes.access import find_access
        from dlrover.platforms.kubernetes.api import ClusterApi
    except ImportError as error:
        raise ConfigError(str(error)) from error
    access = find_access(environ)
    try:
        async with ClusterApi(access) as api:
            yield ClusterJobs(api, namespace or access.namespace, access.server)
    except Unavailable as error:
        if error.code == ErrorCode.UNKNOWN_RESOURCE or "was answered with 404" in str(error):
            raise ConfigError(NO_RESOURCE) from error
        raise ConfigError(f"No cluster answers at {access.server} ({access.origin}): {error}") from error


def resource_of(body: JsonObject) -> Any:
    """By `apiVersion` and `kind`. Raises `ConfigError` for kinds that a job file does not hold."""
    from dlrover.platforms.kubernetes import answers

    known = (
        answers.ELASTIC_JOBS,
        answers.SCALE_PLANS,
        answers.CONFIG_MAPS,
        answers.SECRETS,
        answers.SERVICES,
        answers.CLAIMS,
    )
    for resource in known:
        if (body.get("apiVersion"), body.get("kind")) == (resource.api_version, resource.kind):
            return resource
    kinds = ", ".join(each.kind for each in known)
    raise ConfigError(
        f"The file holds a {body.get('kind')} of {body.get('apiVersion')}. `dlrover job submit` creates {kinds}; use "
        "kubectl apply for others."
    )


def _decoded(body: bytes) -> ElasticJob:
    from dlrover.platforms.kubernetes.elastic_job import ElasticJob
    from dlrover.platforms.kubernetes.objects import decode

    try:
        return decode(ElasticJob, body)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"An ElasticJob of the cluster cannot be read: {error}.") from error
