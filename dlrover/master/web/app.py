"""
The page and its interface: who asks for what, and whether they may.

Every answer about the job needs the job's token, the read-only token or the cookie that a link was exchanged for; without it there is nothing
but a form for the token. Actions need more: the right to act, and for a browser proof that the request comes from our own page. No answer
allows other sites to read it, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from dlrover.master.view.gatherer import Gatherer
from dlrover.master.web.access import SESSION_SECONDS, Access, Scope, bearer_of, is_own_origin
from dlrover.master.web.actions import ACTIONS, BadWish, read_wish
from dlrover.master.web.hosts import Hosts
from dlrover.master.web.logs import BadName, LogReader, NoLog
from dlrover.master.web.old_paths import OldPaths
from dlrover.master.web.questions import ASK_PATH, JsonQuestions
from dlrover.master.web.stream import STUCK, EventStream
from dlrover.protocol.codec import Question
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Reply

log = logging.getLogger(__name__)

MAX_BODY = 16 * 1024
MAX_VIEWERS = 64
MAX_PAGE = 1000

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[Request], Awaitable[Response | EventStream]]


class _Callers:
    """Who asks: what a request shows, and whether it comes from our own page."""

    def __init__(self, access: Access, hosts: Hosts) -> None:
        self._access = access
        self._hosts = hosts

    def wrong_host(self, request: Request) -> Response | None:
        """Programs that show the token may use any name: a site of a stranger cannot show it."""
        host = request.headers.get("host", "")
        if self._hosts.is_known(host) or self._access.scope_of_token(bearer_of(request.headers)) is not None:
            return None
        message = (
            "This page is not served under the name in your request. Open it by its IP address or as localhost, or "
            "start the job with --dashboard-url and the URL that you use."
        )
        return _json(421, {"error": message})

    def scope(self, request: Request) -> Scope | None:
        bearer = bearer_of(request.headers)
        if bearer:
            return self._access.scope_of_token(bearer)
        return self._access.scope_of_cookie(request.cookies.get(self._access.cookie_name, ""))

    def is_ours(self, request: Request) -> bool:
        origin = request.headers.get("origin", "")
        return origin in self._hosts.origins or is_own_origin(
            origin, request.headers.get("host", ""), request.url.scheme
        )


class Web:
    """Everything behind the page's port."""

    def __init__(
        self,
        gatherer: Gatherer,
        *,
        access: Access,
        ask: Callable[[Question], Awaitable[Reply]],
        logs: LogReader,
        metrics: Callable[[], Awaitable[bytes]],
        metrics_type: str,
        hosts: Hosts | None = None,
        stuck: float = STUCK,
    ) -> None:
        """`stuck`: seconds that a reader of the stream may take for what was sent to it."""
        self._gatherer = gatherer
        self._access = access
        self._ask = ask
        self._logs = logs
        self._metrics = metrics
        self._metrics_type = metrics_type
        self._stuck = stuck
        self._hosts = Hosts() if hosts is None else hosts
        self._callers = _Callers(access, self._hosts)
        self._files = _load_files()
        self._questions = JsonQuestions(ask, access=access, headers=_HEADERS)

    def is_known(self, scope: AsgiScope) -> bool:
        """Whether a request shows the token or what was given for it."""
        return scope["type"] == "http" and self._callers.scope(Request(scope)) is not None

    def app(self) -> ASGIApp:
        reads: list[tuple[str, Handler]] = [
            ("/api/v1/me", self._me),
            ("/api/v1/view", self._view),
            ("/api/v1/stream", self._stream),
            ("/api/v1/nodes", self._nodes),
            ("/api/v1/logs", self._log_names),
            ("/api/v1/logs/{name}", self._log),
            ("/metrics", self._scrape),
            ("/api/logs/{name}", self._log),
            *OldPaths(self._gatherer).handlers(),
        ]
        routes = [
            Route("/", self._page),
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{name}", self._static),
            *(Route(path, self._guarded(handler)) for path, handler in reads),
            Route("/api/v1/actions/{name}", self._act, methods=["POST"]),
            Route(ASK_PATH, self._questions.answer, methods=["POST"]),
        ]
        inner = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _broken})

        async def app(scope: AsgiScope, receive: Receive, send: Send) -> None:
            refusal = self._callers.wrong_host(Request(scope)) if scope["type"] == "http" else None
            await (inner if refusal is None else refusal)(scope, receive, send)

        return app

    # The page.

    async def _page(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None:
            scope = self._access.scope_of_link(given)
            if scope is None:
                return self._form(
                    "This link is not valid, or it was used before. Get another one with: dlrover dashboard"
                )
            return self._welcome(request, scope)
        scope = self._callers.scope(request)
        if scope is None:
            return self._form("")
        return _answer(200, self._files["index.html"], "text/html")

    async def _login(self, request: Request) -> Response:
        if not self._callers.is_ours(request):
            raise HTTPException(403, "This form was sent from another site.")
        form = parse_qs((await _body(request)).decode("utf-8", "replace"))
        scope = self._access.scope_of_link((form.get("token") or [""])[0].strip())
        return self._form("This is not the token of the job.") if scope is None else self._welcome(request, scope)

    async def _logout(self, request: Request) -> Response:
        if not self._callers.is_ours(request):
            raise HTTPException(403, "This request was sent from another site.")
        response = _answer(200, b"{}", "application/json")
        response.delete_cookie(self._access.cookie_name, path="/", httponly=True, samesite="strict")
        return response

    def _welcome(self, request: Request, scope: Scope) -> Response:
        """
        A cookie instead of the token, and on to the page without it in the address.

        By a page and not by a redirect: browsers hold back such a cookie from a redirect that began at another site.
        """
        response = _answer(200, self._files["enter.html"], "text/html")
        response.set_cookie(
            self._access.cookie_name,
            self._access.cookie(scope),
            max_age=SESSION_SECONDS,
            path="/",
            secure=request.url.scheme == "https" or self._hosts.is_encrypted(request.headers.get("host", "")),
            httponly=True,
            samesite="strict",
        )
        return response

    def _form(self, message: str) -> Response:
        page = self._files["login.html"].replace(b"<!-- message -->", html.escape(message).encode())
        return _answer(401, page, "text/html", {"WWW-Authenticate": "Bearer"})

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files or name.endswith(".html"):
            raise HTTPException(404, "There is no such file.")
        return _answer(200, self._files[name], _TYPES[PurePosixPath(name).suffix], {"Cache-Control": "no-cache"})

    async def _me(self, request: Request) -> Response:
        return _json(200, {"scope": self._callers.scope(request)})

    # What it shows.

    async def _view(self, request: Request) -> Response:
        await self._gatherer.fresh()
        return _json(200, self._gatherer.board.delta(0))

    async def _stream(self, request: Request) -> EventStream:
        if self._gatherer.num_viewers >= MAX_VIEWERS:
            raise HTTPException(
                503, f"{MAX_VIEWERS} viewers are connected already. Try again later.", {"Retry-After": "10"}
            )
        headers = {**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        return EventStream(self._gatherer, request.headers.get("last-event-id", ""), raw, stuck=self._stuck)

    async def _nodes(self, request: Request) -> Response:
        """A part of the nodes, for jobs with many."""
        await self._gatherer.fresh()
        nodes = sorted(self._gatherer.board.section("nodes").values(), key=lambda node: node.rank)  # type: ignore[attr-defined]
        health = request.query_params.get("health", "")
        if health:
            nodes = [node for node in nodes if node.health == health]  # type: ignore[attr-defined]
        offset, limit = _number(request, "offset", 0), min(_number(request, "limit", 100), MAX_PAGE)
        return _json(200, {"total": len(nodes), "nodes": nodes[offset : offset + limit]})

    async def _log_names(self, request: Request) -> Response:
        return _json(200, {"logs": self._logs.names()})

    async def _log(self, request: Request) -> Response:
        try:
            return _json(200, await self._logs.read(request.path_params["name"]))
        except NoLog as error:
            raise HTTPException(404, str(error)) from error
        except BadName as error:
            raise HTTPException(400, str(error)) from error

    async def _scrape(self, request: Request) -> Response:
        return _answer(200, await self._metrics(), self._metrics_type)

    # What it does.

    async def _act(self, request: Request) -> Response:
        scope = self._callers.scope(request)
        if scope is None:
            raise HTTPException(401, "Give the job's token.")
        if not bearer_of(request.headers) and not self._callers.is_ours(request):
            raise HTTPException(403, "This request was sent from another site.")
        if scope is not Scope.ACT:
            raise HTTPException(403, "This link is read-only. Actions need the job's token.")
        name = request.path_params["name"]
        try:
            action, command = read_wish(name, await _body(request))
        except KeyError:
            raise HTTPException(404, f"There is no action {name}. The actions are: {', '.join(ACTIONS)}.") from None
        except BadWish as error:
            raise HTTPException(400, str(error)) from error
        try:
            await self._ask(command)
        except Rejected as error:
            raise HTTPException(409, str(error)) from error
        except Unavailable as error:
            raise HTTPException(503, str(error)) from error
        log.info("action=%s command=%s peer=%s", name, type(command).__name__, request.client and request.client.host)
        return _json(200, {"message": action.done})

    def _guarded(self, handler: Handler) -> ASGIApp:
        async def serve(scope: AsgiScope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            if self._callers.scope(request) is None:
                raise HTTPException(401, "Give the job's token, or a link that `dlrover dashboard` prints.")
            response = await handler(request)
            if isinstance(response, Response):
                response.headers.update(_HEADERS)
            await response(scope, receive, send)

        return _Endpoint(serve)


class _Endpoint:
    """Starlette takes a class instance for an ASGI application, and a function for a handler."""

    def __init__(self, serve: Callable[[AsgiScope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, "This address can only be read (GET).")
        await self._serve(scope, receive, send)


def _load_files() -> dict[str, bytes]:
    folder = resources.files("dlrover.master.web") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if PurePosixPath(file.name).suffix in _TYPES}


def _answer(status: int, body: bytes, media_type: str, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type)


def _json(status: int, value: Any) -> Response:
    return _answer(status, msgspec.json.encode(value), "application/json")


async def _body(request: Request) -> bytes:
    """Bounded while it comes, whatever its header says."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"The request is too large: the limit is {MAX_BODY} bytes.")
    except ClientDisconnect:
        raise HTTPException(400, "The request ended too early.") from None
    return bytes(body)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name}: give a number of at least 0.")
    return int(text)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {"WWW-Authenticate": "Bearer"} if error.status_code == 401 else {}
    body = msgspec.json.encode({"error": error.detail})
    return _answer(error.status_code, body, "application/json", {**headers, **(error.headers or {})})


async def _broken(request: Request, error: Exception) -> Response:
    log.error("bug in the page path=%s", request.url.path, exc_info=error)
    return _answer(500, b'{"error": "The master failed to answer; its log says why."}', "application/json")
