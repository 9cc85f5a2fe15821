"""
The HTTP door: health, metrics, read-only JSON for people, and the historical forms `POST /optimize` and `POST /job_config` (spec 07 §13.2).

The same tokens open it, as `Authorization: Bearer TOKEN`. Without tokens it serves this machine alone, and only requests that name this machine: so no page in a browser can read it through
a name of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dlrover.brain.metrics import BrainMetrics
from dlrover.brain.planning import history_of, settings_for, settings_of
from dlrover.brain.store.reading import find_job, find_settings
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import Doorkeeper, TokenHolder, TokenRole
from dlrover.core.scaling.history.conversion import historical_form, within
from dlrover.core.scaling.history.selection import HTTP_OPTIMIZER, OPTIMIZER_KEY
from dlrover.protocol.addresses import TlsConfig, is_loopback
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    BrainQuestion,
    BrainReply,
    JobAsked,
    JobRef,
    JobsAsked,
    PlanAsked,
    PlansAsked,
    stage_of,
)
from dlrover.protocol.messages.scaling import ScaleTerms
from dlrover.protocol.rpc.door import Door

log = logging.getLogger(__name__)

MAX_BODY = 256 * 1024
MAX_CONNECTIONS = 256
MAX_STRANGERS = 128
STOP_TIMEOUT = 1
MAX_HEAD = 16 * 1024
READ_SECONDS = 10.0

Ask = Callable[[TokenHolder, BrainQuestion], Any]


class _HistoricalJob(msgspec.Struct, kw_only=True):
    uuid: str = ""
    cluster: str = ""
    namespace: str = ""
    user: str = ""
    app: str = ""


class _HistoricalConfig(msgspec.Struct, kw_only=True):
    optimizer_name: str = ""
    customized_config: dict[str, str] = {}


class _HistoricalQuestion(msgspec.Struct, kw_only=True):
    type: str = ""
    config: _HistoricalConfig = msgspec.field(default_factory=_HistoricalConfig)
    job: _HistoricalJob = msgspec.field(default_factory=_HistoricalJob)


class HttpDoor:
    """Routes and their answers. `ask` is the desk's."""

    def __init__(self, store: BrainStore, doorkeeper: Doorkeeper, metrics: BrainMetrics, ask: Ask) -> None:
        self._store = store
        self._doorkeeper = doorkeeper
        self._metrics = metrics
        self._ask = ask
        self.app = Starlette(
            routes=[
                Route("/healthz", self._health),
                Route("/metrics", self._show_metrics),
                Route("/jobs", self._jobs),
                Route("/jobs/{uid}", self._job),
                Route("/plans", self._plans),
                Route("/optimize", self._optimize, methods=["POST"]),
                Route("/job_config", self._job_config, methods=["POST"]),
            ],
            exception_handlers={Rejected: _refused, Unavailable: _away},
        )

    def caller_of(self, headers: Mapping[str, str]) -> TokenHolder | None:
        if self._doorkeeper.is_open and not _is_this_machine(headers.get("host", "")):
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        return self._doorkeeper.caller_of(token.strip() if kind.lower() == "bearer" else "")

    async def _health(self, _: Request) -> Response:
        """Whether the store can be read: 200, or 503."""
        await self._store.read(lambda connection: connection.exec_driver_sql("SELECT 1").scalar())
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        if self.caller_of(request.headers) is None:
            return _stranger()
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _jobs(self, request: Request) -> Response:
        told = request.query_params
        return await self._answer(
            request,
            lambda: JobsAsked(name=told.get("name", ""), tenant=told.get("tenant", ""), most=_most(told, default=50)),
        )

    async def _job(self, request: Request) -> Response:
        told, uid = request.query_params, request.path_params["uid"]
        return await self._answer(
            request, lambda: JobAsked(uid=uid, tenant=told.get("tenant", ""), most=_most(told, default=100))
        )

    async def _plans(self, request: Request) -> Response:
        told = request.query_params
        return await self._answer(
            request, lambda: PlansAsked(tenant=told.get("tenant", ""), most=_most(told, default=50))
        )

    async def _answer(self, request: Request, make: Callable[[], BrainQuestion]) -> Response:
        caller = self.caller_of(request.headers)
        if caller is None:
            return _stranger()
        reply: BrainReply = await self._ask(caller, make())
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _optimize(self, request: Request) -> Response:
        """No plan is an answer, too. A job that Brain does not know, and an unknown stage, are errors in the answer, as they were."""
        caller = self.caller_of(request.headers)
        if caller is None:
            return _stranger()
        _check_role(caller, (TokenRole.JOB, TokenRole.ADMIN))
        asked = await _read(request)
        now = self._store.clock()
        found: tuple[bool, str, dict[str, object]] = await self._store.read(
            lambda connection: _historical_plan(connection, caller.tenant, asked, now)
        )
        is_good, reason, resource = found
        answer = {
            "response": {"success": is_good, "reason": reason},
            "job_opt_plan": {
                "timestamp": int(time.time()),
                "job_resource": resource,
                "job_meta": msgspec.to_builtins(asked.job),
            },
        }
        return JSONResponse(answer, status_code=201)

    async def _job_config(self, request: Request) -> Response:
        caller = self.caller_of(request.headers)
        if caller is None:
            return _stranger()
        _check_role(caller, (TokenRole.JOB, TokenRole.ADMIN))
        asked = await _read(request)
        values = await self._store.read(lambda connection: _historical_settings(connection, caller.tenant, asked.job))
        return JSONResponse({"response": {"success": True, "reason": ""}, "job_configs": values})


class HttpServer:
    """Serves the door in the event loop of the service."""

    def __init__(self, door: HttpDoor, tls: TlsConfig | None) -> None:
        self._http = door
        self._door: Door | None = None
        self._watching: asyncio.Future[None] | None = None
        self._serving: asyncio.Future[None] | None = None
        config = uvicorn.Config(
            self._enter,
            log_config=None,
            log_level="error",
            access_log=False,
            interface="asgi3",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT,
            timeout_keep_alive=15,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD,
            http="h11",
            ws="none",
            ssl_certfile=tls.cert if tls is not None else None,
            ssl_keyfile=tls.key if tls is not None else None,
        )
        self._server = _QuietServer(config)

    def start(self, host: str, port: int) -> int:
        """Gives the port. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"Brain cannot listen for HTTP on port {port} of {host}: {error.strerror}. Choose another with --http-port, or `none`."
            ) from error
        listener.setblocking(False)
        bound = int(listener.getsockname()[1])
        self._door = Door(bound, max_outside=MAX_STRANGERS)
        self._watching = asyncio.ensure_future(self._door.run())
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        return bound

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT + 1)
            self._serving.cancel()

    async def _enter(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._door is not None, "served before start"
        client = scope.get("client")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        is_known = client is not None and self._http.caller_of(headers) is not None
        with self._door.inside(client) if is_known else contextlib.nullcontext():
            await self._http.app(scope, receive, send)


class _QuietServer(uvicorn.Server):
    """One that leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _historical_plan(
    connection: Any, tenant: str, asked: _HistoricalQuestion, now: float
) -> tuple[bool, str, dict[str, object]]:
    """Success, reason, `job_resource`."""
    nothing: dict[str, object] = {"node_group_resources": {}, "node_resources": {}}
    stage = stage_of(asked.type)
    if stage is None:
        return False, f"invalid event type {asked.type!r}", nothing
    row = find_job(connection, tenant, asked.job.uuid)
    if row is None:
        return False, f"Brain does not know the job {asked.job.uuid!r}.", nothing
    options = dict(asked.config.customized_config)
    if asked.config.optimizer_name and asked.config.optimizer_name != HTTP_OPTIMIZER:
        options[OPTIMIZER_KEY] = asked.config.optimizer_name
    question = PlanAsked(job=JobRef(uid=asked.job.uuid), stage=stage, options=options)
    found, bounds, _ = history_of(connection, row, question, now)
    if found.error or found.plan is None:
        return not found.error, found.sentence, nothing
    terms = ScaleTerms(
        smallest=bounds.smallest,
        largest=bounds.largest,
        most_workers=bounds.most_workers,
        most_servers=bounds.most_servers,
    )
    return True, found.sentence, historical_form(within(found.plan, terms, bounds.limits))


def _historical_settings(connection: Any, tenant: str, job: _HistoricalJob) -> dict[str, str]:
    row = find_job(connection, tenant, job.uuid) if job.uuid else None
    if row is not None:
        return settings_for(connection, row).values
    scopes = {"tenant": tenant, **{name: getattr(job, name) for name in ("user", "namespace", "cluster", "app")}}
    return settings_of(find_settings(connection), scopes).values


async def _read(request: Request) -> _HistoricalQuestion:
    """Raises Rejected."""
    data = b""
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY:
                    raise Rejected(f"The body has more than {MAX_BODY} bytes.")
        return msgspec.json.decode(data, type=_HistoricalQuestion)
    except TimeoutError:
        raise Rejected(f"The body did not arrive within {READ_SECONDS:g} s.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(f"The body is not a valid question: {error}") from error


def _check_role(caller: TokenHolder, roles: tuple[TokenRole, ...]) -> None:
    if caller.role not in roles:
        raise Rejected(
            f"This request needs a token with the role `{roles[0]}`; your token has the role `{caller.role}`."
        )


def _most(told: Mapping[str, str], *, default: int) -> int:
    text = told.get("most", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 500):
        raise Rejected(f"`most` must be a number from 1 to 500 (got {text[:20]!r}).")
    return int(text[:6])


def _is_this_machine(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]")
    return name == "localhost" or (name.replace(".", "").replace(":", "").isalnum() and _is_literal_loopback(name))


def _is_literal_loopback(name: str) -> bool:
    """Without asking a name server: a name could be anything tomorrow."""
    return (name == "::1" or name.startswith("127.")) and is_loopback(name)


def _stranger() -> Response:
    text = "Give the token of a tenant as `Authorization: Bearer TOKEN`. Without tokens, ask from this machine by its address 127.0.0.1."
    return JSONResponse({"error": text}, status_code=401, headers={"WWW-Authenticate": "Bearer"})


async def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


async def _away(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=503)
