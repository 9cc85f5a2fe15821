"""
Faults on demand, and counts of requests.

A fault says which requests it strikes and how often. Tests in the server's process use `Faults` directly; others use
`POST /test/faults` with the same fields, `DELETE /test/faults`, and `GET /test/counts`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Literal

import msgspec
from aiohttp import web

from tests.kubernetes.server.routes import Target


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One kind of trouble. Empty fields fit every request."""

    effect: Literal["status", "hang", "cut", "html", "gone", "lose"]
    """
    status: answer `code`. hang: never answer. cut: close the connection (a watch: in the middle of its stream). html: a proxy's
    page with status 200. gone: end a watch with an ERROR line of code 410. lose: carry the request out, then close the
    connection before the answer.
    """
    verb: str = ""
    plural: str = ""
    name: str = ""
    token: str = ""
    """Only requests with this bearer token: trouble of one client. Not for `cut` and `gone` of watches."""
    code: int = 500
    retry_after: int | None = None
    after: float = 0.0
    """Seconds from the beginning of a watch to `cut` or `gone`."""
    times: int | None = None
    """How many requests it strikes; None: all until it is withdrawn."""

    def fits(self, verb: str, target: Target, token: str = "") -> bool:
        if self.times == 0:
            return False
        wanted = (
            (self.verb, verb),
            (self.plural, target.kind.plural),
            (self.name, target.name),
            (self.token, token),
        )
        return all(not want or want == has for want, has in wanted)

    def spend(self) -> None:
        if self.times is not None:
            self.times -= 1


class Faults:
    def __init__(self) -> None:
        self.active: list[Fault] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        """Requests by verb and resource, such as ("create", "pods"). Those that a fault strikes count too."""
        self._changed = asyncio.Event()
        self._losing: set[int] = set()
        """Identities of requests whose answer must not arrive."""
        self._watches: set[asyncio.Future[None]] = set()

    def inject(self, fault: Fault) -> Fault:
        self.active.append(fault)
        return fault

    def withdraw(self, fault: Fault | None = None) -> None:
        """Ends one fault, or all. Requests that hang are let go on."""
        self.active = [one for one in self.active if fault is not None and one is not fault]
        self._changed.set()
        self._changed = asyncio.Event()

    def cut_watches(self) -> int:
        """Breaks all open watches now. Returns how many."""
        cut = [one for one in self._watches if not one.done()]
        for one in cut:
            one.set_result(None)
        return len(cut)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def count(self, verb: str, target: Target) -> None:
        plural = f"{target.kind.plural}/{target.subresource}" if target.subresource else target.kind.plural
        self.counts[verb, plural] += 1

    async def strike(self, request: web.Request, verb: str, target: Target) -> web.StreamResponse | None:
        """The answer of the first fault that fits, or None if the request goes on."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        fault = next((one for one in self.active if one.fits(verb, target, token)), None)
        if fault is None or (verb == "watch" and fault.effect in ("cut", "gone")):
            return None
        fault.spend()
        if fault.effect == "lose":
            self._losing.add(id(request))
            return None
        if fault.effect == "hang":
            while fault in self.active:
                await self._changed.wait()
            return None
        if fault.effect == "html":
            return web.Response(text="<html><body><h1>Sign in</h1></body></html>", content_type="text/html")
        if fault.effect == "cut":
            return _broken(request)
        return _refusal(fault)

    def passes(self, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        """The answer, or a broken connection if the request was carried out but its answer must not arrive."""
        if id(request) not in self._losing:
            return answer
        self._losing.discard(id(request))
        return _broken(request)

    @contextlib.contextmanager
    def open_watch(self, target: Target) -> Iterator[Callable[[], Coroutine[None, None, bytes | None]]]:
        """Counts an open watch. What it gives, called, ends when the watch must: with a last line, or None for a broken connection."""
        fault = next((one for one in self.active if one.effect in ("cut", "gone") and one.fits("watch", target)), None)
        if fault is not None:
            fault.spend()
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watches.add(end)

        async def trouble() -> bytes | None:
            await asyncio.wait((end,), timeout=None if fault is None else fault.after)
            return _GONE_LINE if fault is not None and fault.effect == "gone" and not end.done() else None

        try:
            yield trouble
        finally:
            self._watches.discard(end)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/test/faults", self._post)
        app.router.add_delete("/test/faults", self._delete)
        app.router.add_get("/test/counts", self._get)
        app.router.add_post("/test/cut", self._cut)

    async def _post(self, request: web.Request) -> web.Response:
        try:
            self.inject(msgspec.json.decode(await request.read(), type=Fault))
        except msgspec.ValidationError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.json_response({})

    async def _delete(self, request: web.Request) -> web.Response:
        self.withdraw()
        return web.json_response({})

    async def _cut(self, request: web.Request) -> web.Response:
        return web.json_response({"cut": self.cut_watches()})

    async def _get(self, request: web.Request) -> web.Response:
        counts = {f"{verb} {plural}": count for (verb, plural), count in sorted(self.counts.items())}
        return web.json_response({"requests": counts, "watches": self.num_watches})


_WORDS = {
    429: ("TooManyRequests", "the server has received too many requests and has asked us to try again later"),
    500: ("InternalError", "Internal error occurred: injected"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
    401: ("Unauthorized", "Unauthorized"),
    403: ("Forbidden", "forbidden: injected"),
    410: ("Expired", "too old resource version: 1 (2)"),
}


def _broken(request: web.Request) -> web.Response:
    """Closes the connection at once. The answer that is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


_GONE_LINE = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",'
    b'"message":"too old resource version: 1 (2)","reason":"Expired","code":410}}\n'
)


def _refusal(fault: Fault) -> web.Response:
    code = 410 if fault.effect == "gone" else fault.code
    reason, message = _WORDS.get(code, ("", "injected"))
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    return web.json_response(body, status=code, headers=headers)
