"""
A server that answers each request as a test says, for what a good API server never does: HTML, cuts, silence, nonsense.

How a good one behaves is the matter of `tests/kubernetes/server`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

Json = dict[str, Any]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Requests get the answers of `script` in order; the last one answers all that follow."""

    def __init__(self, *script: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.script = list(script)
        self.requests: list[web.Request] = []
        self.times: list[float] = []
        self.bodies: list[bytes] = []
        self.num_busy = self.most_busy = 0
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.over = asyncio.Event()
        """Set at the end, so that answers which hold their connection let go."""

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.times.append(time.monotonic())
        self.bodies.append(await request.read())
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.num_busy += 1
        self.most_busy = max(self.most_busy, self.num_busy)
        try:
            return await answer(request)
        finally:
            self.num_busy -= 1

    def count(self, verb: str) -> int:
        """Of lists or watches."""
        return sum(1 for each in self.requests if ("watch" in each.query) == (verb == "watch"))

    def hold(self, *lines: Json | bytes) -> Answer:
        """A watch that stays open and mute after these lines."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = await _begin(request, lines)
            await self.over.wait()
            return response

        return answer

    def mute(self) -> Answer:
        """Not even a head."""

        async def answer(request: web.Request) -> web.StreamResponse:
            await self.over.wait()
            return web.Response()

        return answer


def reply(body: object, *, code: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=code, headers=headers)

    return answer


def page_of_html(code: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html><h1>Please sign in</h1></html>", content_type="text/html", status=code)

    return answer


def refuse(
    code: int,
    reason: str = "",
    message: str = "",
    *,
    details: Json | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    return reply(status(code, reason, message, details=details), code=code, headers=headers)


def stream(*lines: Json | bytes, is_cut: bool = False) -> Answer:
    """A watch that ends after these lines: as it should, or in the middle of the next chunk."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await _begin(request, lines)
        if is_cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return answer


def break_off() -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return answer


async def until(condition: Callable[[], bool], *, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  the condition may be of another process
            await asyncio.sleep(0.005)


def status(code: int, reason: str, message: str, *, details: Json | None = None) -> Json:
    body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return body | {"reason": reason, "message": message} | ({} if details is None else {"details": details})


def pod(name: str, version: int, *, phase: str = "Running", **more: object) -> Json:
    metadata = {"name": name, "namespace": "train", "uid": f"uid-of-{name}", "resourceVersion": str(version)}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "status": {"phase": phase}} | more


def listing(*items: Json, version: int, token: str = "") -> Json:
    metadata = {"resourceVersion": str(version)} | ({"continue": token} if token else {})
    return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": list(items)}


def event(kind: str, item: Json) -> Json:
    return {"type": kind, "object": item}


def bookmark(version: int) -> Json:
    """As a real server writes it: with a version and nothing else."""
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return event("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"containers": None}})


class TestAuthority:
    """Certificates for one test, made by openssl."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.crt"
        self._key = folder / "ca.key"
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate, "-subj", "/CN=test-ca")

    def issue(self, name: str, *, alternative: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """The certificate's file and its key's."""
        key, request, certificate = (self._folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
        extension = self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName={alternative}\n")
        self._openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extension)
        self._openssl("x509", "-req", "-in", request, "-out", certificate, *signed)
        return certificate, key

    def server_side(
        self, name: str, *, asks_clients: bool = False, alternative: str = "IP:127.0.0.1"
    ) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.certificate))
        context.load_cert_chain(*map(str, self.issue(name, alternative=alternative)))
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


async def _begin(request: web.Request, lines: tuple[Json | bytes, ...]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for line in lines:
        await response.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
    return response
