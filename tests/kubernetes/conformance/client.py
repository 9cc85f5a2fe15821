"""A client that hides nothing: a call returns status and body, a watch returns lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from tests.kubernetes.servers import Server

Json = dict[str, Any]
WITHIN = 60.0
"""Seconds that a busy machine may need for anything that is expected to happen soon."""
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Answer:
    def __init__(self, status: int, body: Any, headers: dict[str, str]) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def meta(self) -> Json:
        found: Json = self.body["metadata"]
        return found

    @property
    def message(self) -> str:
        return str(self.body.get("message", "")) if isinstance(self.body, dict) else str(self.body)

    @property
    def reason(self) -> str:
        return str(self.body.get("reason", ""))

    def __repr__(self) -> str:
        return f"{self.status} {json.dumps(self.body)[:2000]}"


class Client:
    def __init__(
        self, server: Server, session: aiohttp.ClientSession, namespace: str, token: str | None = None
    ) -> None:
        self.server = server
        self.session = session
        self.namespace = namespace
        self.token = server.token if token is None else token

    def as_user(self, token: str) -> Client:
        return Client(self.server, self.session, self.namespace, token)

    def path(self, plural: str, name: str = "", *, sub: str = "", namespace: str | None = None) -> str:
        """The path of a resource: `pods`, `nodes`, `policy/v1/poddisruptionbudgets`."""
        group, _, short = plural.rpartition("/")
        root = f"/apis/{group}" if group else "/api/v1"
        space = self.namespace if namespace is None else namespace
        parts = [root] + ([f"namespaces/{space}"] if space else []) + [short, name, sub]
        return "/".join(part for part in parts if part)

    async def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", **query: Any
    ) -> Answer:
        headers = {"Content-Type": kind, "User-Agent": "conformance/1"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.request(
            method, self.server.url + path, data=data, headers=headers, params=_text(query), ssl=self.server.ssl or True
        ) as answer:
            raw = await answer.read()
            is_json = answer.content_type == "application/json"
            return Answer(answer.status, json.loads(raw) if is_json and raw else raw.decode(), dict(answer.headers))

    async def get(
        self, plural: str, name: str = "", *, sub: str = "", namespace: str | None = None, **query: Any
    ) -> Answer:
        return await self.call("GET", self.path(plural, name, sub=sub, namespace=namespace), **query)

    async def create(
        self, plural: str, body: Json, *, name: str = "", sub: str = "", namespace: str | None = None, **query: Any
    ) -> Answer:
        return await self.call("POST", self.path(plural, name, sub=sub, namespace=namespace), body, **query)

    async def replace(
        self, plural: str, body: Json, *, sub: str = "", namespace: str | None = None, **query: Any
    ) -> Answer:
        return await self.call(
            "PUT", self.path(plural, body["metadata"]["name"], sub=sub, namespace=namespace), body, **query
        )

    async def patch(
        self,
        plural: str,
        name: str,
        body: Any,
        kind: str = MERGE,
        *,
        sub: str = "",
        namespace: str | None = None,
        **query: Any,
    ) -> Answer:
        return await self.call("PATCH", self.path(plural, name, sub=sub, namespace=namespace), body, kind=kind, **query)

    async def delete(
        self, plural: str, name: str = "", body: Json | None = None, *, namespace: str | None = None, **query: Any
    ) -> Answer:
        return await self.call("DELETE", self.path(plural, name, namespace=namespace), body, **query)

    @contextlib.asynccontextmanager
    async def watch(self, plural: str, *, namespace: str | None = None, **query: Any) -> AsyncIterator[Watch]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        params = _text({"watch": "true", "timeoutSeconds": 60, **query})
        url = self.server.url + self.path(plural, namespace=namespace)
        async with self.session.get(url, headers=headers, params=params, ssl=self.server.ssl or True) as answer:
            yield Watch(answer)

    async def soon(self, ask: Callable[[], Any], true: Callable[[Answer], bool]) -> Answer:
        """Asks again until the answer is as wanted."""
        async with asyncio.timeout(WITHIN):
            while True:
                answer: Answer = await ask()
                if true(answer):
                    return answer
                await asyncio.sleep(0.05)


class Watch:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.status = answer.status
        self._answer = answer

    async def next(self) -> Json | None:
        """The next line; None at the end of the stream."""
        async with asyncio.timeout(WITHIN):
            line = await self._answer.content.readline()
        found: Json | None = json.loads(line) if line else None
        return found

    async def until(self, kind: str, name: str = "") -> Json:
        """The next line of this type (and object). Others are passed over."""
        while True:
            line = await self.next()
            assert line is not None, f"the watch ended before {kind} {name}"
            if line["type"] == kind and (not name or line["object"]["metadata"].get("name") == name):
                return line

    async def rest(self) -> list[Json]:
        found = []
        while (line := await self.next()) is not None:
            found.append(line)
        return found


def _text(query: Json) -> dict[str, str]:
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in query.items()}


def config_map(name: str, data: dict[str, str] | None = None, **meta: Any) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **meta}, "data": data or {}}


def pod(name: str, *, spec: Json | None = None, **meta: Any) -> Json:
    container = {"name": "main", "image": "example.org/trainer:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **meta},
        "spec": {"containers": [container], "restartPolicy": "Never", **(spec or {})},
    }


GROUP = "elastic.iml.github.io"


def job(name: str, **spec: Any) -> Json:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    worker = {"replicas": 2, "template": template}
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": {"worker": worker}, **spec},
    }


def fresh(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(4)}"
