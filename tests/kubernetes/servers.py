"""
API servers to test against, each a process: ours, and a real one beside an etcd of its own.

`KUBEBUILDER_ASSETS` names the directory with `etcd` and `kube-apiserver`; `kube-controller-manager` is started too if it is there.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

START_WITHIN = 120.0


def _cannot() -> None:
    raise NotImplementedError("this server stays")


@dataclass
class Server:
    """An API server at an address."""

    name: str
    url: str
    token: str
    """Of a user who may do everything."""
    kubeconfig: Path
    has_controllers: bool
    """Owners, namespaces, quotas and budgets are looked after."""
    has_accounts: bool
    """Pods need a service account."""
    ssl: ssl.SSLContext | None = None
    etcd: str = ""
    stop: Callable[[], None] = _cannot
    """Its port is closed when this returns, and so are all connections. Objects stay."""
    start: Callable[[], None] = _cannot
    """It serves again, at the same address, when this returns."""

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def compact(self) -> None:
        """Makes the server forget old versions."""
        if not self.etcd:
            _post(f"{self.url}/test/compact", {})
            return
        version = _post(f"{self.etcd}/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        _post(f"{self.etcd}/v3/kv/compaction", {"revision": version, "physical": True})


def real_version() -> str:
    """The version of the real server; empty if there is none."""
    directory = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not directory or not (Path(directory) / "kube-apiserver").exists():
        return ""
    text = subprocess.run(
        [Path(directory) / "kube-apiserver", "--version"], capture_output=True, text=True, check=True
    ).stdout
    return text.split()[-1]


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Server]:
    ready = directory / "ready"
    command = [sys.executable, "-m", "tests.kubernetes.server", "--ready-file", str(ready), "--bookmark-every", "1"]
    with _process(command, directory / "server.log"):
        _wait_until(ready.exists, "our API server to listen", directory / "server.log")
        said = json.loads(ready.read_text())
        up = lambda: _is_up(f"{said['url']}/readyz", None)  # noqa: E731

        def stop() -> None:
            os.kill(said["pid"], signal.SIGUSR1)
            _wait_until(lambda: not up(), "our API server to close its port", directory / "server.log")

        def start() -> None:
            os.kill(said["pid"], signal.SIGUSR2)
            _wait_until(up, "our API server to listen again", directory / "server.log")

        yield Server(
            "ours",
            said["url"],
            said["token"],
            Path(said["kubeconfig"]),
            has_controllers=True,
            has_accounts=True,
            stop=stop,
            start=start,
        )


@contextlib.contextmanager
def real(directory: Path) -> Iterator[Server]:
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    _make_keys(directory)
    token = secrets.token_hex(16)
    with (directory / "tokens.csv").open("w", newline="") as file:
        csv.writer(file).writerow([token, "admin", "admin", "system:masters"])
    etcd_port, peer_port, port = (_free_port() for _ in range(3))
    etcd = f"http://127.0.0.1:{etcd_port}"
    controllers = assets / "kube-controller-manager"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(_etcd_command(assets, directory, etcd, peer_port), directory / "etcd.log"))
        _wait_until(lambda: _is_up(f"{etcd}/health", None), "etcd to serve", directory / "etcd.log")
        command = _server_command(assets, directory, etcd, port, accounts=controllers.exists())
        serving = stack.enter_context(_Restartable(command, directory / "server.log"))
        certificate = directory / "certs" / "apiserver.crt"
        _wait_until(certificate.exists, "kube-apiserver's certificate", directory / "server.log")
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{port}"
        _wait_until(lambda: _is_up(f"{url}/readyz", context), "kube-apiserver to be ready", directory / "server.log")
        config = directory / "kubeconfig"
        config.write_text(yaml.safe_dump(_kubeconfig(url, token, certificate)))
        if controllers.exists():
            stack.enter_context(
                _process(_controller_command(controllers, directory, config), directory / "controllers.log")
            )
            accounts = f"{url}/api/v1/namespaces/default/serviceaccounts/default"
            _wait_until(
                lambda: _is_up(accounts, context, token), "the controllers to work", directory / "controllers.log"
            )

        def start() -> None:
            serving.start()
            _wait_until(lambda: _is_up(f"{url}/readyz", context), "kube-apiserver to be back", directory / "server.log")

        yield Server(
            f"kube-apiserver {real_version()}",
            url,
            token,
            config,
            has_controllers=controllers.exists(),
            has_accounts=controllers.exists(),
            ssl=context,
            etcd=etcd,
            stop=serving.kill,
            start=start,
        )


def _etcd_command(assets: Path, directory: Path, url: str, peer_port: int) -> list[str]:
    peer = f"http://127.0.0.1:{peer_port}"
    return [
        str(assets / "etcd"),
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _server_command(assets: Path, directory: Path, etcd: str, port: int, *, accounts: bool) -> list[str]:
    command = [
        str(assets / "kube-apiserver"),
        f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={directory / 'certs'}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={directory / 'accounts.pub'}",
        f"--service-account-signing-key-file={directory / 'accounts.key'}",
        "--allow-privileged=true",
    ]
    return command if accounts else [*command, "--disable-admission-plugins=ServiceAccount"]


def _controller_command(binary: Path, directory: Path, config: Path) -> list[str]:
    wanted = "garbage-collector-controller,namespace-controller,serviceaccount-controller,resourcequota-controller,disruption-controller"
    return [
        str(binary),
        f"--kubeconfig={config}",
        f"--controllers={wanted},root-ca-certificate-publisher-controller,persistentvolumeclaim-protection-controller",
        "--leader-elect=false",
        f"--service-account-private-key-file={directory / 'accounts.key'}",
        f"--root-ca-file={directory / 'certs' / 'apiserver.crt'}",
        "--secure-port=0",
    ]


def _kubeconfig(url: str, token: str, certificate: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "real", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "admin"}}],
        "current-context": "real",
    }


def _make_keys(directory: Path) -> None:
    """A key pair that signs the tokens of service accounts."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (directory / "accounts.key").write_bytes(private)
    (directory / "accounts.pub").write_bytes(public)


class _Restartable:
    """A process that may be away for a while. What it serves is kept elsewhere."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        self._process = self._running.enter_context(_process(self._command, self._log))

    def kill(self) -> None:
        self._process.kill()
        self._running.close()

    def __enter__(self) -> _Restartable:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until(true: object, what: str, log: Path) -> None:
    assert callable(true), "a condition is a function"
    ends_at = time.monotonic() + START_WITHIN
    while not true():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"waited {START_WITHIN:g} s for {what}; the end of its log:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def _is_up(url: str, context: ssl.SSLContext | None, token: str = "") -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _post(url: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, dict[str, str]] = json.loads(answer.read() or b"{}")
        return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
