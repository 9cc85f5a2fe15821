"""Starts the server: inside a test, or as a process of its own (`python -m tests.kubernetes.server`)."""

from __future__ import annotations

import asyncio
import base64
import ssl
import tempfile
from pathlib import Path
from types import TracebackType

import yaml
from aiohttp import web

from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.certificates import make_certificates
from tests.kubernetes.server.cluster import Cluster
from tests.kubernetes.server.faults import Faults
from tests.kubernetes.server.service import MAX_BODY, Service

ADMIN_TOKEN = "admin-token"


class ApiServer:
    """
    An API server on the loopback: `async with ApiServer() as server`.

    `url` and `kubeconfig` are set while it runs. `cluster` shows its objects, `faults` makes trouble and counts requests.
    After `stop()` a `start()` serves the same objects at the same address: the server was only away.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        history: int = 10_000,
        bookmark_every: float = 60.0,
        token_cache: float = 10.0,
        accounts: bool = True,
        tls: bool = False,
        directory: Path | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="api-server-") if directory is None else None
        folder = Path(self._own.name) if self._own is not None else Path(directory or "")
        self._tls: ssl.SSLContext | None = None
        self.certificate = ""
        """The authority that signed the server's certificate; empty without TLS."""
        if tls:
            self._tls, self.certificate = make_certificates(folder / "certificates")
        self.cluster = Cluster(
            history=history, token_cache=token_cache, accounts=accounts, certificate=self.certificate
        )
        self.cluster.tokens.add(ADMIN_TOKEN, User("admin", ("system:masters", "system:authenticated")))
        self.faults = Faults()
        self.port = port
        self.token = ADMIN_TOKEN
        self.kubeconfig = folder / "kubeconfig"
        self._bookmark_every = bookmark_every
        self._runner: web.AppRunner | None = None
        self._absence: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY + 1)
        app.router.add_post("/test/away", self._leave)
        Service(self.cluster, self.faults, bookmark_every=self._bookmark_every).add_routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig(self.url, self.token, certificate=self.certificate)))

    async def stop(self) -> None:
        """Closes the port and all connections. Objects stay."""
        self.faults.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _leave(self, request: web.Request) -> web.Response:
        """`POST /test/away?seconds=5`: the server answers this, then closes its port for so long."""
        seconds = float(request.query["seconds"])

        async def be_away() -> None:
            await self.stop()
            await asyncio.sleep(seconds)
            await self.start()

        self._absence = asyncio.create_task(be_away())
        return web.json_response({})

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._absence is not None:
            self._absence.cancel()
            await asyncio.wait((self._absence,))
        self.faults.withdraw()
        await self.stop()
        if self._own is not None:
            self._own.cleanup()


def kubeconfig(url: str, token: str, *, namespace: str = "default", certificate: str = "") -> dict[str, object]:
    cluster = {"server": url}
    if certificate:
        cluster["certificate-authority-data"] = base64.b64encode(certificate.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": namespace}}],
        "current-context": "test",
    }
