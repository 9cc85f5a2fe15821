"""
How we prove to an API server who we are, and how that stays current for weeks.

A pod's token lives an hour and the kubelet replaces its file; a cloud's plug-in gives tokens that expire. So a
credential is fetched for each request from its source, which keeps it as long as it is good. The sources never log a
token or a key, and no message contains one.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Unavailable

TOKEN_AGE = 60.0
"""Seconds after which a token file is read again, whatever its time stamp says."""
PLUGIN_TIMEOUT = 30.0
PLUGIN_PAUSE = 5.0
"""Seconds between two runs of a plug-in whose credential is refused: a plug-in may ask a service for each."""
EARLY = 10.0
"""Seconds before its expiry at which a credential counts as expired."""


class Credential(Struct, frozen=True):
    """What one request carries. The token is a secret: never in a log."""

    token: str | None = None
    tls: ssl.SSLContext | None = None
    """With the client's certificate if there is one; None for plain http."""

    def __repr__(self) -> str:
        return f"Credential(token={'...' if self.token else None})"


class CredentialSource(Protocol):
    async def fetch(self, refused: Credential | None = None) -> Credential:
        """
        `refused` is a credential that the server answered with 401: get a fresh one, unless it is replaced already.

        Raises `Unavailable` if there is none now.
        """
        ...


class FixedCredential:
    """A token or a certificate that stays as it is."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    async def fetch(self, refused: Credential | None = None) -> Credential:
        return self._credential


class TokenFile:
    """A token that the kubelet or another program replaces from time to time."""

    def __init__(self, path: Path, tls: ssl.SSLContext | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._tls = tls
        self._clock = clock
        self._credential: Credential | None = None
        self._stamp = 0
        self._read_at = 0.0

    async def fetch(self, refused: Credential | None = None) -> Credential:
        now = self._clock()
        try:
            stamp = self._path.stat().st_mtime_ns
            kept = self._credential
            if kept is not None and kept != refused and stamp == self._stamp and now - self._read_at < TOKEN_AGE:
                return kept
            token = checked_token(self._path.read_text(encoding="utf-8"), f"the file {self._path}")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if self._credential is None or self._credential == refused:
                raise Unavailable(
                    f"The token of the API server cannot be read: {error}", code=ErrorCode.NO_CLUSTER_TOKEN
                ) from error
            return self._credential  # the file is being replaced; the last token is still good
        if self._credential is None or token != self._credential.token:
            self._credential = Credential(token, self._tls)
        self._stamp, self._read_at = stamp, now
        return self._credential


class PluginSettings(Struct, frozen=True, kw_only=True):
    """The `exec` section of a kubeconfig's user."""

    command: str
    args: tuple[str, ...] = ()
    environ: Mapping[str, str]
    api_version: str
    cluster: Mapping[str, object] | None = None
    """Told to the plug-in if it asks for it (`provideClusterInfo`)."""
    hint: str = ""
    """What the kubeconfig says about getting the plug-in."""


class CredentialPlugin:
    """A program that prints an `ExecCredential`; run when there is none yet, when it has expired, and after a 401."""

    def __init__(
        self,
        settings: PluginSettings,
        tls: Callable[[bytes | None, bytes | None], ssl.SSLContext | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._clock = clock
        self._credential: Credential | None = None
        self._expires_at: datetime | None = None
        self._ran_at = -PLUGIN_PAUSE
        self._turn = asyncio.Lock()  # requests come at once, and the plug-in may ask a person or a service

    async def fetch(self, refused: Credential | None = None) -> Credential:
        async with self._turn:
            kept = self._credential
            is_current = self._expires_at is None or _now() < self._expires_at
            is_refused = kept == refused and self._clock() - self._ran_at >= PLUGIN_PAUSE
            if kept is not None and is_current and not is_refused:
                return kept
            self._ran_at = self._clock()
            output = await self._run()
            try:
                self._credential, self._expires_at = self._read(output)
            except ConfigError as error:
                raise self._failed(f"printed something that dlrover cannot read: {error}") from error
            return self._credential

    async def _run(self) -> bytes:
        settings = self._settings
        spec = {"interactive": False} | ({"cluster": settings.cluster} if settings.cluster is not None else {})
        told = msgspec.json.encode({"apiVersion": settings.api_version, "kind": "ExecCredential", "spec": spec})
        try:
            process = await asyncio.create_subprocess_exec(
                settings.command,
                *settings.args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**settings.environ, "KUBERNETES_EXEC_INFO": told.decode()},
            )
        except OSError as error:
            raise self._failed(f"does not start: {error}. {settings.hint}".rstrip()) from error
        try:
            async with asyncio.timeout(PLUGIN_TIMEOUT):
                output, errors = await process.communicate()
        except TimeoutError as error:
            raise self._failed(f"did not end within {PLUGIN_TIMEOUT:.0f} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            tail = errors.decode("utf-8", "replace").strip()[-500:]
            raise self._failed(f"failed with exit code {process.returncode}: {tail}")
        return output

    def _read(self, output: bytes) -> tuple[Credential, datetime | None]:
        try:
            answer = msgspec.json.decode(output, type=_ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._failed(f"printed no ExecCredential: {error}") from error
        given = answer.status
        if answer.api_version != self._settings.api_version:
            raise self._failed(
                f"answered with apiVersion {answer.api_version}, but the kubeconfig says {self._settings.api_version}"
            )
        if not given.token and not (given.client_certificate_data and given.client_key_data):
            raise self._failed("printed neither a token nor a client certificate with its key")
        token = checked_token(given.token, f"the plug-in {self._settings.command}") if given.token else None
        certificate, key = (
            text.encode() if text else None for text in (given.client_certificate_data, given.client_key_data)
        )
        expires_at = given.expiration_timestamp
        if expires_at is not None and expires_at.tzinfo is None:
            expires_at = expires_at.replace(tzinfo=UTC)
        return Credential(token, self._tls(certificate, key)), expires_at

    def _failed(self, what: str) -> Unavailable:
        return Unavailable(
            f"The credential plug-in {self._settings.command} of the kubeconfig {what}", code=ErrorCode.NO_CLUSTER_TOKEN
        )


class TlsSettings(Struct, frozen=True, kw_only=True):
    """How we check the server. Without a certificate authority those of the system count."""

    authority: str | None = None
    """PEM."""
    is_verified: bool = True

    def build(self, certificate: bytes | None = None, key: bytes | None = None) -> ssl.SSLContext:
        """With the client's certificate and key (PEM) if given. Raises `ConfigError` for what does not load."""
        try:
            context = ssl.create_default_context(cadata=self.authority)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"The certificate authority of the cluster cannot be read: {error}") from error
        # Newer versions of Python refuse authorities without a key identifier, as many clusters have them.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate is not None and key is not None:
            _load_client(context, certificate, key)
        return context


def checked_token(text: str, origin: str) -> str:
    """Raises `ConfigError` for a text that does not fit into a header."""
    token = text.strip()
    if not token:
        raise ConfigError(f"The token of {origin} is empty.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"The token of {origin} contains a space or another character that is not allowed in a token. Correct it."
        )
    return token


class _CredentialStatus(Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(Struct, rename="camel"):
    status: _CredentialStatus
    api_version: str = ""


def _load_client(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The library reads certificates from files only; the key is on disk for the moment of the call."""
    with tempfile.TemporaryDirectory(prefix="dlrover-") as folder:  # mode 0700
        certificate_file, key_file = os.path.join(folder, "certificate"), os.path.join(folder, "key")
        for path, content in ((certificate_file, certificate), (key_file, key)):
            with open(path, "wb") as file:
                file.write(content)
        try:
            context.load_cert_chain(certificate_file, key_file, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(f"The client certificate and its key cannot be used: {error}") from error


def _no_password() -> str:
    """Else the library asks the terminal."""
    raise ConfigError(
        "The client key of the kubeconfig has a password, which dlrover does not support. Give a key without a "
        "password."
    )


def _now() -> datetime:
    return datetime.fromtimestamp(time.time() + EARLY, UTC)
