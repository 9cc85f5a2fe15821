"""
The API server as the kubelet and the controllers of the tests see it.

Not the product's client: an error in that one must not be hidden by the same error on the other side of a test. Objects
are plain dictionaries, as the server sends them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Body = dict[str, Any]

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_WATCH_TIMEOUT = 120
_RETRY = 0.2
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The server's answer was not a success, or there was none (code 0)."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason


class Cluster:
    """An async context manager. `reachable` is cleared to cut this client off: calls wait, watches end."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config = _Config(kubeconfig)
        self.server = self._config.server
        self.token = self._config.token
        self.authority = self._config.authority
        self.tls = self._config.tls()
        self.reachable = asyncio.Event()
        self.reachable.set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Cluster:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls, limit=0), headers=headers)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str) -> Body:
        return await self._call("GET", path)

    async def create(self, path: str, body: Body) -> Body:
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: Body) -> Body:
        return await self._call("PUT", path, body)

    async def patch(self, path: str, body: Body) -> Body:
        return await self._call("PATCH", path, body, content=MERGE)

    async def delete(self, path: str, *, grace: int | None = None, uid: str = "") -> Body:
        options: Body = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self._call("DELETE", path, options)

    async def change_status(self, path: str, uid: str, change: Callable[[Body], Body]) -> Body | None:
        """
        Replace the status by `change(status)` under the version that was read; None if the object is gone.

        A real kubelet sends a strategic merge patch, which merges conditions by type. Reading and replacing does the same
        on servers that know no strategic merge.
        """
        while True:
            try:
                found = await self.get(path)
            except ApiError as error:
                if error.code == 404:
                    return None
                raise
            if found["metadata"]["uid"] != uid:
                return None
            found["status"] = change(found.get("status") or {})
            try:
                return await self.replace(f"{path}/status", found)
            except ApiError as error:
                if error.code == 404:
                    return None
                if error.code != 409:
                    raise

    async def follow(self, path: str, *, fields: str = "", labels: str = "") -> AsyncIterator[tuple[str, Body]]:
        """
        For ever: `("LISTED", list)`, then `(ADDED|MODIFIED|DELETED, object)`; after a lost watch a list again.
        """
        selectors = {key: value for key, value in (("fieldSelector", fields), ("labelSelector", labels)) if value}
        while True:
            try:
                listed = await self._call("GET", path, params=selectors)
                yield "LISTED", listed
                version = listed["metadata"]["resourceVersion"]
                async with contextlib.aclosing(self._watch(path, {**selectors, "resourceVersion": version})) as events:
                    async for kind, seen in events:
                        yield kind, seen
            except (ApiError, aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
                await asyncio.sleep(_RETRY)

    async def _watch(self, path: str, params: dict[str, str]) -> AsyncIterator[tuple[str, Body]]:
        params = {**params, "watch": "true", "timeoutSeconds": str(_WATCH_TIMEOUT)}
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_WATCH_TIMEOUT + 30.0)
        async with self._session.get(self.server + path, params=params, timeout=timeout) as response:
            if response.status != 200:
                return
            # Lines of any length: a pod may be larger than the reader's line limit.
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return
                    if not self.reachable.is_set():
                        return
                    yield event["type"], event["object"]

    async def _call(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        content: str = "application/json",
        params: dict[str, str] | None = None,
    ) -> Body:
        await self.reachable.wait()
        assert self._session is not None, "use it as a context manager"
        data = None if body is None else json.dumps(body)
        try:
            async with self._session.request(
                method,
                self.server + path,
                data=data,
                params=params,
                headers={"Content-Type": content} if data is not None else {},
                timeout=_TIMEOUT,
            ) as response:
                if (
                    response.status == 404 and response.content_type == "text/plain"
                ):  # of a kind that the server does not know
                    raise ApiError(404, "NotFound", await response.text())
                answer = await response.json(content_type=None)
                if response.status < 300:
                    return dict(answer)
                raise ApiError(response.status, str(answer.get("reason", "")), str(answer.get("message", "")))
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            raise ApiError(0, "Unreachable", f"{method} {path}: {error!r}") from error


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


class _Config:
    """What the current context of a kubeconfig says: server, authority, and a token or a client certificate."""

    def __init__(self, path: Path) -> None:
        config = yaml.safe_load(path.read_text())
        context = _named(config, "contexts", config["current-context"])["context"]
        cluster = _named(config, "clusters", context["cluster"])["cluster"]
        user = _named(config, "users", context["user"]).get("user") or {}
        self._folder = path.parent
        self.server = str(cluster["server"]).rstrip("/")
        self.token = str(user.get("token", ""))
        self.authority = self._read(cluster, "certificate-authority")
        self._certificate = self._read(user, "client-certificate")
        self._key = self._read(user, "client-key")
        self._is_unchecked = bool(cluster.get("insecure-skip-tls-verify"))

    def tls(self) -> ssl.SSLContext | bool:
        if not self.server.startswith("https"):
            return True
        context = ssl.create_default_context(cadata=self.authority.decode() if self.authority else None)
        if self._is_unchecked:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self._certificate:
            with tempfile.NamedTemporaryFile() as pair:  # the ssl module takes files alone
                pair.write(self._certificate + b"\n" + self._key)
                pair.flush()
                context.load_cert_chain(pair.name)
        return context

    def _read(self, section: Body, key: str) -> bytes:
        if f"{key}-data" in section:
            return base64.b64decode(section[f"{key}-data"])
        return (self._folder / section[key]).read_bytes() if key in section else b""


def _named(config: Body, section: str, name: str) -> Body:
    return next(entry for entry in config[section] if entry["name"] == name)
