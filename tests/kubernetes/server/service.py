"""
The HTTP side: one entry for all requests. It reads options and bodies, calls the registry, and writes answers.

Order as in a real server: count and injected faults, who asks, may they, what is the request about, then the verb.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import ClientConnectionResetError, web

from tests.kubernetes.server import answers
from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.answers import Json, NoSuchGroup, Refused
from tests.kubernetes.server.cluster import Cluster
from tests.kubernetes.server.decoding import Undecodable, decode, parse
from tests.kubernetes.server.discovery import described, is_custom
from tests.kubernetes.server.faults import Faults
from tests.kubernetes.server.patches import json_patch, merge, strategic
from tests.kubernetes.server.registry import Options
from tests.kubernetes.server.routes import Target
from tests.kubernetes.server.store import ObjectKey
from tests.kubernetes.server.watching import Query, check_options, list_page, watch

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
MAX_BODY = 3 * 1024 * 1024


class Service:
    def __init__(self, cluster: Cluster, faults: Faults, *, bookmark_every: float) -> None:
        self.cluster = cluster
        self.faults = faults
        self._bookmark_every = bookmark_every
        self._logs: dict[tuple[str, str], bytes] = {}
        """What containers wrote, by namespace and pod. A real server asks the kubelet; here a test says it."""

    def add_routes(self, app: web.Application) -> None:
        self.faults.add_routes(app)
        app.router.add_post("/test/compact", self._compact)
        app.router.add_put("/test/logs/{namespace}/{pod}", self._write_log)
        app.router.add_route("*", "/{path:.*}", self._answer)

    async def _compact(self, request: web.Request) -> web.Response:
        self.cluster.store.compact()
        return _json(200, {})

    async def _write_log(self, request: web.Request) -> web.Response:
        self._logs[request.match_info["namespace"], request.match_info["pod"]] = await request.read()
        return _json(200, {})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            user = self.cluster.tokens.user_of(request.headers.get("Authorization"))
            if (described_as := described(request.path, self.cluster.routes)) is not None:
                return _json(200, described_as)
            target = self.cluster.routes.target(request.path)
            verb = _verb_of(request, target)
            self.faults.count(verb, target)
            if (fault := await self.faults.strike(request, verb, target)) is not None:
                return fault
            self.cluster.rights.check(user, verb, target, target.name or _selected_name(request))
            answer = await self._carry_out(request, verb, target, user)
        except NoSuchGroup:
            return web.Response(status=404, text="404 page not found\n")
        except Refused as refused:
            answer = _json(refused.code, refused.body, headers=_retry_after(refused))
        return self.faults.passes(request, answer)

    async def _carry_out(self, request: web.Request, verb: str, target: Target, user: User) -> web.StreamResponse:
        if verb == "watch":
            return await self._watch(request, target)
        raw = await _read(request)
        if target.subresource == "log" and verb == "get":
            self.cluster.registry.find(target.kind, target.namespace, target.name)
            text = self._logs.get((target.namespace, target.name), b"")
            last = int(request.query.get("tailLines", "0"))
            lines = text.splitlines(keepends=True)
            return web.Response(body=b"".join(lines[-last:] if last else lines), content_type="text/plain")
        if target.subresource not in ("", "status"):
            body = parse(raw) if raw else {}
            options = _write_options(request, target, b"")
            return _json(*self.cluster.subresources.carry_out(verb, target, body, request.content_type, options))
        if verb == "list":
            return _bytes(list_page(self.cluster.store, target.kind, _query(request, target)))
        if verb == "get":
            return _bytes(self.cluster.registry.find(target.kind, target.namespace, target.name).encoded)
        if verb == "deletecollection":
            return self._delete_all(request, target, raw)
        if verb == "delete":
            return self._delete(request, target, raw)
        change = {"create": self._create, "update": self._update, "patch": self._patch}[verb]
        return change(request, target, raw, user)

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = _query(request, target)
        check_options(query, is_watch=True)
        lines = watch(self.cluster.store, target.kind, query, bookmark_every=self._bookmark_every)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        with contextlib.suppress(ClientConnectionResetError, ConnectionResetError):
            async with contextlib.aclosing(lines):
                with self.faults.open_watch(target) as trouble:
                    await response.prepare(request)
                    await _send(request, response, lines, trouble())
                    await response.write_eof()
        return response

    def _check_format(self, request: web.Request) -> None:
        if request.content_type not in ("application/json", "application/yaml", "application/octet-stream"):
            raise _unsupported_format()

    def _create(self, request: web.Request, target: Target, raw: bytes, user: User) -> web.Response:
        if target.name or (target.kind.namespaced and not target.namespace):
            raise answers.not_supported(target.kind.plural, target.kind.group)
        self._check_format(request)
        body, warnings = decode(target.kind, parse(raw, target.kind.kind), _strictness(request))
        self.cluster.rights.check_binding(user, target.kind, body, target.namespace)
        made = self.cluster.registry.create(target.kind, target.namespace, body, _write_options(request, target, b""))
        return _json(201, made, headers=_warnings(warnings))

    def _update(self, request: web.Request, target: Target, raw: bytes, user: User) -> web.Response:
        self._check_format(request)
        body, warnings = decode(target.kind, parse(raw, target.kind.kind), _strictness(request))
        self.cluster.rights.check_binding(user, target.kind, body, target.namespace)
        options = _write_options(request, target, b"")
        changed = self.cluster.registry.change(target.kind, _key(target), lambda _: body, options)
        return _json(200, changed, headers=_warnings(warnings))

    def _patch(self, request: web.Request, target: Target, raw: bytes, user: User) -> web.Response:
        options, strictness = _write_options(request, target, b""), _strictness(request)
        patch = parse(raw)
        if request.content_type == "application/apply-patch+yaml":
            return self._apply(request, target, patch, user)
        how: Callable[[Any, Any], Any]
        if request.content_type == "application/json-patch+json":
            how = json_patch
        elif request.content_type == "application/merge-patch+json":
            how = merge
        elif request.content_type == "application/strategic-merge-patch+json" and not is_custom(target.kind):
            how = strategic
        else:
            raise _unsupported_format()
        warnings: list[str] = []

        def make(old: Json) -> Json:
            patched = how(old, patch)
            try:
                body, said = decode(target.kind, patched, strictness)
            except Undecodable as error:
                raise _bad_patch(patched, error) from error
            warnings.extend(said)
            return body

        changed = self.cluster.registry.change(target.kind, _key(target), make, options)
        return _json(200, changed, headers=_warnings(warnings))

    def _apply(self, request: web.Request, target: Target, config: Any, user: User) -> web.Response:
        options = msgspec.structs.replace(_write_options(request, target, b""), is_apply=True)
        if not request.query.get("fieldManager"):
            complaints = answers.Complaints()
            complaints.required("fieldManager", "is required for apply patch")
            complaints.raise_for("PatchOptions", "meta.k8s.io", "")
        force = _flag(request, "force")
        return _json(*self.cluster.apply(target, config, options, force=force, user=user))

    def _delete(self, request: web.Request, target: Target, raw: bytes) -> web.Response:
        options = _write_options(request, target, raw)
        body, gone = self.cluster.registry.remove(target.kind, _key(target), options)
        if not gone or target.kind.rules.returns_deleted:
            return _json(200, body)
        details = {
            "name": target.name,
            "group": target.kind.group,
            "kind": target.kind.plural,
            "uid": body["metadata"]["uid"],
        }
        details = {key: value for key, value in details.items() if value}
        return _json(
            200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        )

    def _delete_all(self, request: web.Request, target: Target, raw: bytes) -> web.Response:
        page = list_page(self.cluster.store, target.kind, _query(request, target))
        options = _write_options(request, target, raw)
        for item in msgspec.json.decode(page)["items"]:
            key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
            with contextlib.suppress(Refused):
                self.cluster.registry.remove(target.kind, key, options)
        return _bytes(page)


async def _send(
    request: web.Request, response: web.StreamResponse, lines: AsyncIterator[bytes], trouble: Awaitable[bytes | None]
) -> None:
    """Sends lines until they end, or until trouble comes: a last line, or none and a broken connection."""
    breaker = asyncio.ensure_future(trouble)
    try:
        while True:
            step = asyncio.ensure_future(anext(lines, None))
            await asyncio.wait((step, breaker), return_when=asyncio.FIRST_COMPLETED)
            if breaker.done():
                step.cancel()
                await asyncio.wait((step,))
                if (last := breaker.result()) is not None:
                    await response.write(last)
                    return
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("cut on demand")
            text = step.result()
            if text is None:
                return
            await response.write(text)
    finally:
        breaker.cancel()
        await asyncio.gather(breaker, return_exceptions=True)


def _verb_of(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        if _flag(request, "watch"):
            return "watch"
        return "get" if target.name else "list"
    if request.method == "DELETE" and not target.name:
        return "deletecollection"
    if request.method not in _VERBS or (request.method in ("PUT", "PATCH") and not target.name):
        raise answers.not_supported(target.kind.plural, target.kind.group)
    return _VERBS[request.method]


def _query(request: web.Request, target: Target) -> Query:
    text = request.query
    query = Query(
        namespace=target.namespace,
        name=target.name,
        labels=text.get("labelSelector", ""),
        fields=text.get("fieldSelector", ""),
        limit=_number(text.get("limit", "")) or 0,
        token=text.get("continue", ""),
        version=text.get("resourceVersion", ""),
        match=text.get("resourceVersionMatch", ""),
        bookmarks=_flag(request, "allowWatchBookmarks"),
        timeout=_number(text.get("timeoutSeconds", "")),
    )
    if not _flag(request, "watch"):
        check_options(query, is_watch=False)
    return query


def _write_options(request: web.Request, target: Target, raw: bytes) -> Options:
    """A body of DeleteOptions counts alone: a real server then reads no query parameters."""
    agent = request.headers.get("User-Agent", "")
    manager = request.query.get("fieldManager") or agent.split("/", 1)[0] or "unknown"
    said: Json = {}
    if raw and request.method == "DELETE":
        said = parse(raw)
        if not isinstance(said, dict):
            raise answers.bad_request("the body of a DELETE must be DeleteOptions")
        dry_run = said.get("dryRun") or []
    else:
        dry_run = request.query.getall("dryRun", [])
        said = {"gracePeriodSeconds": _number(request.query.get("gracePeriodSeconds", ""))}
        said["propagationPolicy"] = request.query.get("propagationPolicy")
    if dry_run not in ([], ["All"]):
        complaints = answers.Complaints()
        complaints.unsupported("dryRun", dry_run, ["All"])
        complaints.raise_for(_VERBS[request.method].capitalize() + "Options", "meta.k8s.io", "")
    if (policy := said.get("propagationPolicy")) not in (None, "Foreground", "Background", "Orphan"):
        complaints = answers.Complaints()
        complaints.unsupported("propagationPolicy", policy, ["Foreground", "Background", "Orphan", "nil"])
        complaints.raise_for("DeleteOptions", "meta.k8s.io", "")
    before = said.get("preconditions") or {}
    return Options(
        dry_run=bool(dry_run),
        manager=manager,
        subresource=target.subresource,
        grace=said.get("gracePeriodSeconds"),
        uid=before.get("uid"),
        version=before.get("resourceVersion"),
        propagation=said.get("propagationPolicy"),
    )


def _strictness(request: web.Request) -> str:
    return request.query.get("fieldValidation", "") or "Warn"


def _key(target: Target) -> ObjectKey:
    return (target.namespace, target.name)


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() in ("true", "1")


def _number(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise answers.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax') from error


async def _read(request: web.Request) -> bytes:
    raw = await request.content.read(-1)
    if len(raw) > MAX_BODY:
        message = f"Request entity too large: limit is {MAX_BODY}"
        raise Refused(413, "RequestEntityTooLarge", message)
    return raw


def _bad_patch(patched: Any, error: Undecodable) -> Refused:
    cause = {
        "reason": "FieldValueInvalid",
        "message": f"Invalid value: {answers.shown(answers.shown(patched))}: {error.why}",
        "field": "patch",
    }
    return Refused(422, "Invalid", f' "" is invalid: patch: {cause["message"]}', details={"causes": [cause]})


def _unsupported_format() -> Refused:
    return Refused(415, "UnsupportedMediaType", "415: Unsupported Media Type")


def _retry_after(refused: Refused) -> dict[str, str]:
    seconds = refused.body.get("details", {}).get("retryAfterSeconds")
    return {"Retry-After": str(seconds)} if seconds else {}


def _warnings(said: list[str]) -> dict[str, str]:
    quoted = ["299 - " + msgspec.json.encode(one).decode() for one in said]
    return {"Warning": ", ".join(quoted)} if said else {}


def _bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _selected_name(request: web.Request) -> str:
    """A list or watch of one object by its name counts as a request for that name."""
    for part in request.query.get("fieldSelector", "").split(","):
        key, sign, value = part.partition("=")
        if key.strip() == "metadata.name" and sign:
            return value.strip("= ")
    return ""


def _json(code: int, body: Any, *, headers: dict[str, str] | None = None) -> web.Response:
    if isinstance(body, str):
        return web.Response(status=code, text=body)
    return web.Response(status=code, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
