"""
One method for each verb of the Kubernetes API, with typed answers.

The client is our own and thin: the master reads a few fields of a pod, and a generated client costs 94 MB and 0.8 s
for a list of 1,000 pods. aiohttp carries the bytes, msgspec reads them.

There are two kinds of ends:

* The server gave a definite answer: a struct (`FoundObject`, `NotFound`, `Conflict`, ...). The same request would get
  the same answer again. Callers `match` on it.
* There is no usable answer: the client raises `Unavailable`, with `retry_after` if the server named a time. Such are
  timeouts, broken connections, 429 (`Throttled`), every 5xx, a 401 that a fresh credential does not cure, a certificate
  that does not fit, and HTML where JSON belongs. Callers retry later.

The client itself repeats a request in one case only: after a 401, once, with a fresh credential.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib import metadata
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes.access import ClusterAccess
from dlrover.platforms.kubernetes.answers import (
    CLAIMS,
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    EVENTS,
    LEASES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    RESOURCE_QUOTAS,
    ROLE_BINDINGS,
    SCALE_PLANS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    ApiRefusal,
    ApiResource,
    Conflict,
    ConflictReason,
    EventKind,
    Forbidden,
    FoundObject,
    Gone,
    Invalid,
    NotFound,
    ObjectAnswer,
    Page,
    PatchKind,
    Throttled,
    WatchEvent,
    error_of,
    refusal_of,
)
from dlrover.platforms.kubernetes.objects import ObjectList, decode
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Unavailable

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise ImportError(f"Kubernetes needs aiohttp: pip install 'dlrover[k8s]' ({error})") from error

__all__ = [
    "CLAIMS",
    "CONFIG_MAPS",
    "DISRUPTION_BUDGETS",
    "ELASTIC_JOBS",
    "EVENTS",
    "LEASES",
    "NETWORK_POLICIES",
    "NODES",
    "PODS",
    "RESOURCE_QUOTAS",
    "ROLE_BINDINGS",
    "SCALE_PLANS",
    "SECRETS",
    "SERVICES",
    "SERVICE_ACCOUNTS",
    "ApiRefusal",
    "ApiResource",
    "ClusterApi",
    "Conflict",
    "ConflictReason",
    "EventKind",
    "Forbidden",
    "FoundObject",
    "Gone",
    "Invalid",
    "NotFound",
    "ObjectAnswer",
    "Page",
    "PatchKind",
    "Throttled",
    "WatchEvent",
    "error_of",
]

MAX_BODY = 64 << 20
"""Bytes of one answer. A page of 500 pods has 2 to 10 MB."""
MAX_EVENT = 8 << 20
"""Bytes of one event of a watch. etcd takes objects up to 1.5 MB."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What decoding raises for bytes that are no such object."""


class ClusterApi:
    """
    Requests to one API server over a bounded number of connections, each with a timeout.

    Use it as an async context manager. At most `num_connections` calls are under way; further ones wait for their
    turn, and their timeout begins when it comes: `timeout` seconds for the head of the answer, and as many for the rest.
    A watch has a connection of its own beyond these.
    """

    def __init__(self, access: ClusterAccess, *, timeout: float = 10.0, num_connections: int = 16) -> None:
        self._access = access
        self._timeout = timeout
        self._turn = asyncio.Semaphore(num_connections)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # The semaphore bounds the calls. A limit here would let watches take the connections of calls.
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # each wait has its own deadline
            headers={
                "Accept": "application/json",
                # A zipped list costs the server and our loop more time than the bytes cost the network.
                "Accept-Encoding": "identity",
                "User-Agent": f"dlrover/{metadata.version('dlrover')}",
            },
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def namespace(self) -> str:
        """The namespace of the pod or of the kubeconfig's context."""
        return self._access.namespace

    async def get(self, resource: ApiResource, name: str, *, namespace: str | None) -> ObjectAnswer:
        return await self._object("GET", resource.path(namespace, name))

    async def list_page(
        self,
        resource: ApiResource,
        *,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        token: str = "",
    ) -> Page | ApiRefusal:
        """A failed list is a refusal or raises `Unavailable`, never an empty page."""
        path = resource.path(namespace)
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit), "continue": token}
        answer = await self._ask("GET", path, query)
        if not isinstance(answer, bytes):
            return answer
        try:
            found = decode(ObjectList, answer)
        except UNREADABLE as error:
            raise _no_object(self._access, f"GET {path}", answer, error) from error
        return Page(found.items or (), found.metadata.resource_version, found.metadata.next_page)

    async def list_all(
        self, resource: ApiResource, *, namespace: str | None, labels: str = "", fields: str = "", limit: int = 500
    ) -> Page | ApiRefusal:
        """All pages as one. `Gone` if the server forgets the list's version between two pages: begin again."""
        items: list[msgspec.Raw] = []
        token = ""
        while True:
            page = await self.list_page(
                resource, namespace=namespace, labels=labels, fields=fields, limit=limit, token=token
            )
            if not isinstance(page, Page):
                return page
            items += page.items
            token = page.token
            if not token:
                return Page(tuple(items), page.version)

    async def create(
        self,
        resource: ApiResource,
        body: Mapping[str, Any] | Struct,
        *,
        namespace: str | None,
        dry_run: bool = False,
        field_manager: str = "",
    ) -> ObjectAnswer:
        query = {"dryRun": "All" if dry_run else "", "fieldManager": field_manager}
        return await self._object("POST", resource.path(namespace), query, body)

    async def replace(
        self,
        resource: ApiResource,
        name: str,
        body: Mapping[str, Any] | Struct,
        *,
        namespace: str | None,
        subresource: str = "",
    ) -> ObjectAnswer:
        """PUT. With `metadata.resourceVersion` in the body, an object that has changed since is a `Conflict`."""
        return await self._object("PUT", resource.path(namespace, name, subresource), {}, body)

    async def patch(
        self,
        resource: ApiResource,
        name: str,
        body: Mapping[str, Any] | list[Any] | Struct,
        *,
        namespace: str | None,
        kind: PatchKind,
        subresource: str = "",
        field_manager: str = "",
        force: bool = False,
        dry_run: bool = False,
    ) -> ObjectAnswer:
        """`force` takes fields from other managers (apply only)."""
        query = {
            "fieldManager": field_manager,
            "force": "true" if force else "",
            "dryRun": "All" if dry_run else "",
        }
        path = resource.path(namespace, name, subresource)
        return await self._object("PATCH", path, query, body, content_type=kind.value)

    async def delete(
        self,
        resource: ApiResource,
        name: str,
        *,
        namespace: str | None,
        uid: str | None = None,
        resource_version: str | None = None,
        grace: int | None = None,
        propagation: str = "Background",
    ) -> ObjectAnswer:
        """
        `FoundObject` means accepted: with a grace period the object stays until its end.

        `uid` and `resource_version` are preconditions: an object of the same name with another uid is a `Conflict`.
        """
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        conditions = {"uid": uid, "resourceVersion": resource_version}
        given = {key: value for key, value in conditions.items() if value is not None}
        if given:
            options["preconditions"] = given
        return await self._object("DELETE", resource.path(namespace, name), {}, options)

    async def watch(
        self,
        resource: ApiResource,
        *,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        version: str = "",
        timeout: float = 300.0,
        silence: float = 30.0,
        opened: Callable[[], None] | None = None,
    ) -> AsyncGenerator[WatchEvent | ApiRefusal, None]:
        """
        What changes after `version`, bookmarks included, until the server ends the watch after `timeout` seconds.

        A refusal is the last item. `Gone` also comes when the server sends it within the stream. The client raises
        `Unavailable` if the connection breaks, or if it is still open `silence` seconds after its time. Close the
        iterator (`contextlib.aclosing`) to end the watch early. `opened` is called when the server has accepted the
        watch, which may be long before its first event. Prefer `informer.Informer`.
        """
        path = resource.path(namespace)
        asked = f"watch of {path}"
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(timeout))),
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout + silence
        response = await self._open("GET", path, query)
        try:
            if response.status != 200:
                body = await self._read(response, asked)
                yield refusal_of(response.status, body, asked=asked, retry_after=_retry_after(response))
                return
            if opened is not None:
                opened()
            rest = bytearray()
            while chunk := await self._next_chunk(response, asked, ends_at):
                *lines, tail = (rest + chunk).split(b"\n") if b"\n" in chunk else (rest + chunk,)
                for line in lines:
                    event = _event_of(bytes(line), asked)
                    yield event
                    if not isinstance(event, WatchEvent):
                        return
                rest = tail
                if len(rest) > MAX_EVENT:
                    yield Gone(f"The {asked} sent an event of more than {MAX_EVENT >> 20} MB.")
                    return
            if rest.strip():
                raise Unavailable(f"The {asked} ended in the middle of an event.")
        finally:
            response.close()

    async def read_log(
        self, pod: str, *, namespace: str, container: str, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[bytes | ApiRefusal, None]:
        """The output of a container in pieces as they come; with `follow` until it ends. A refusal is the only item."""
        path = PODS.path(namespace, pod, "log")
        query = {
            "container": container,
            "follow": "true" if follow else "",
            "tailLines": "" if tail is None else str(tail),
        }
        response = await self._open("GET", path, query)
        try:
            if response.status != 200:
                body = await self._read(response, f"GET {path}")
                yield refusal_of(response.status, body, asked=f"GET {path}", retry_after=_retry_after(response))
                return
            async for chunk in response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(self._access, f"GET {path}", error) from error
        finally:
            response.close()

    async def _object(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        content_type: str = "application/json",
    ) -> ObjectAnswer:
        payload = None if body is None else msgspec.json.encode(body)
        answer = await self._ask(method, path, query or {}, payload, content_type)
        if not isinstance(answer, bytes):
            return answer
        try:
            head = decode(_AnswerHead, answer)
        except UNREADABLE as error:
            raise _no_object(self._access, f"{method} {path}", answer, error) from error
        return FoundObject(answer, head.metadata.resource_version)

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        payload: bytes | None = None,
        content_type: str = "",
    ) -> bytes | ApiRefusal:
        """The body of a success, or what the failure means."""
        asked = f"{method} {path}"
        async with self._turn:
            async with await self._open(method, path, query, payload, content_type) as response:
                body = await self._read(response, asked)
        if response.status < 300:
            return body
        return refusal_of(response.status, body, asked=asked, retry_after=_retry_after(response))

    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        payload: bytes | None = None,
        content_type: str = "",
    ) -> aiohttp.ClientResponse:
        """The head of the answer. After a 401 once more, if there is a fresh credential."""
        assert self._session is not None, "use the API as an async context manager"
        url = URL(self._access.server + path, encoded=True).with_query(
            {key: value for key, value in query.items() if value}
        )
        headers = {"Content-Type": content_type} if payload is not None else {}
        credential = await self._access.credential()
        is_second = False
        while True:
            if credential.token is not None:
                headers["Authorization"] = f"Bearer {credential.token}"
            try:
                async with asyncio.timeout(self._timeout):
                    response = await self._session.request(
                        method,
                        url,
                        data=payload,
                        headers=headers,
                        ssl=credential.tls if credential.tls is not None else True,
                        server_hostname=self._access.server_name,
                        proxy=self._access.proxy,
                        allow_redirects=False,
                    )
            except (aiohttp.ClientError, OSError) as error:
                raise _unreachable(self._access, f"{method} {path}", error) from error
            if response.status != 401:
                return response
            response.close()
            fresh = await self._access.credential(refused=credential)
            if is_second or fresh == credential:
                raise Unavailable(
                    f"{self._access.server} rejected the credential (401, {method} {path}). The token has "
                    f"expired, or it belongs to another cluster. dlrover read it {self._access.origin}.",
                    code=ErrorCode.UNAUTHORIZED,
                )
            credential, is_second = fresh, True

    async def _read(self, response: aiohttp.ClientResponse, asked: str) -> bytes:
        body = bytearray()
        deadline = asyncio.get_running_loop().time() + self._timeout
        while chunk := await self._next_chunk(response, asked, deadline):
            body += chunk
            if len(body) > MAX_BODY:
                response.close()
                raise Unavailable(f"The answer to {asked} has more than {MAX_BODY >> 20} MB. Ask for smaller pages.")
        return bytes(body)

    async def _next_chunk(self, response: aiohttp.ClientResponse, asked: str, deadline: float) -> bytes:
        """Empty at the end."""
        try:
            async with asyncio.timeout_at(deadline):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            response.close()
            raise _unreachable(self._access, asked, error) from error


class _AnswerVersion(Struct, rename="camel"):
    resource_version: str = ""


class _AnswerHead(Struct):
    """Every success is an object or a Status, and both have these."""

    kind: str
    metadata: _AnswerVersion


class _WatchLine(Struct):
    type: str
    object: msgspec.Raw


def _event_of(line: bytes, asked: str) -> WatchEvent | ApiRefusal:
    """A whole line that is no event means that we have lost the thread, and a list must find it again."""
    try:
        read = decode(_WatchLine, line)
        if read.type != "ERROR":
            return WatchEvent(EventKind(read.type), read.object)
        code = decode(_ErrorCode, read.object).code
    except (*UNREADABLE, ValueError) as error:
        return Gone(f"The {asked} sent a line that is not an event ({error}): {line[:80]!r}")
    return refusal_of(code, read.object, asked=asked)


def _unreachable(access: ClusterAccess, asked: str, error: Exception) -> Unavailable:
    server = access.server
    if isinstance(error, TimeoutError):  # also of the connector: an OSError
        return Unavailable(f"{server} did not answer in time ({asked}).", code=ErrorCode.TIMEOUT)
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        cause = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error
        why = getattr(cause, "verify_message", "") or str(cause)
        return Unavailable(
            f"The certificate of {server} cannot be verified: {why}. "
            f"Check the certificate authority that dlrover read {access.origin}.",
            code=ErrorCode.BAD_CERTIFICATE,
        )
    return Unavailable(
        f"{server} cannot be reached ({asked}): {type(error).__name__}: {error}", code=ErrorCode.UNREACHABLE
    )


def _no_object(access: ClusterAccess, asked: str, body: bytes, error: Exception) -> Unavailable:
    start = " ".join(body[:200].decode("utf-8", "replace").split())[:80]
    return Unavailable(
        f"{access.server} answered {asked} with something other than the object ({error}): {start!r}. "
        "Check that this is the address of an API server.",
        code=ErrorCode.NO_JSON,
    )


class _ErrorCode(Struct):
    code: int


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds. Kubernetes sends whole numbers; a date, which HTTP also allows, counts as none."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else None


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """The kernel gives up a peer that has been dead for 30 s. Else a watch would learn it after minutes."""
    family, kind, protocol, *_ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return made
