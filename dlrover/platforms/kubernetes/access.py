"""
Where the API server is and how we prove who we are: from a kubeconfig, or from the pod's service account.

An explicit path or `KUBECONFIG` wins, as with kubectl; else a pod uses its service account; else `~/.kube/config`.
What we do not understand about authentication is an error that names it: to go on without it would be to ask as another
user than the one that was meant.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from dlrover.platforms.kubernetes.credentials import (
    Credential,
    CredentialPlugin,
    CredentialSource,
    FixedCredential,
    PluginSettings,
    TlsSettings,
    TokenFile,
    checked_token,
)
from dlrover.protocol.errors import ConfigError

__all__ = ["SERVICE_ACCOUNT", "ClusterAccess", "Credential", "find_access", "plain_access"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


class ClusterAccess:
    """One API server and the credential for it."""

    def __init__(
        self,
        server: str,
        source: CredentialSource,
        *,
        namespace: str = "default",
        origin: str = "from the program",
        server_name: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.server = server
        """`https://host:port`, without a slash at the end."""
        self.namespace = namespace
        """Of the pod or of the context; `default` if neither gives one."""
        self.origin = origin
        """For messages: where all this was read."""
        self.server_name = server_name
        """The name that the server's certificate must have, if it is not that of the address."""
        self.proxy = proxy
        self._source = source

    async def credential(self, *, refused: Credential | None = None) -> Credential:
        """`refused`: the server answered 401 to it; we fetch a fresh one unless that has happened meanwhile."""
        return await self._source.fetch(refused)


def find_access(
    environ: Mapping[str, str],
    *,
    kubeconfig: Path | None = None,
    context: str | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterAccess:
    """Raises `ConfigError` with what is missing or not understood."""
    if kubeconfig is not None:
        return _from_kubeconfig([kubeconfig], context, environ)
    if environ.get("KUBECONFIG"):
        return _from_kubeconfig(
            [Path(each) for each in environ["KUBECONFIG"].split(os.pathsep) if each], context, environ
        )
    if environ.get("KUBERNETES_SERVICE_HOST") and context is None:
        return _from_pod(environ, service_account)
    usual = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    if usual.exists():
        return _from_kubeconfig([usual], context, environ)
    raise ConfigError(
        f"No cluster is configured: KUBECONFIG is not set, {usual} does not exist, and this is not a pod "
        "(KUBERNETES_SERVICE_HOST is not set). Set KUBECONFIG to the file that kubectl uses."
    )


def plain_access(server: str, *, namespace: str = "default", token: str | None = None) -> ClusterAccess:
    """To an address without a file, for tests and `kubectl proxy`."""
    tls = TlsSettings().build() if server.startswith("https:") else None
    return ClusterAccess(
        _checked_server(server, "the address"), FixedCredential(Credential(token, tls)), namespace=namespace
    )


class _Cluster(Struct, frozen=True, rename="kebab"):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _Context(Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class _NamedCluster(Struct, frozen=True):
    name: str
    cluster: _Cluster


class _NamedContext(Struct, frozen=True):
    name: str
    context: _Context


class _NamedUser(Struct, frozen=True):
    name: str
    user: dict[str, Any] | None = None
    """Undecoded: each key that we do not know must be an error."""


class _KubeConfig(Struct, frozen=True, rename="kebab"):
    current_context: str | None = None
    clusters: tuple[_NamedCluster, ...] | None = None
    contexts: tuple[_NamedContext, ...] | None = None
    users: tuple[_NamedUser, ...] | None = None


class _User(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """Every way to authenticate that we know. What else a file has is an error."""

    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = field(default=None, name="tokenFile")
    exec: dict[str, Any] | None = None
    extensions: Any = None


class _Variable(Struct, frozen=True):
    name: str
    value: str = ""


class _Exec(Struct, frozen=True, rename="camel"):
    command: str
    api_version: str = ""
    args: tuple[str, ...] | None = None
    env: tuple[_Variable, ...] | None = None
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False
    install_hint: str = ""


def _from_pod(environ: Mapping[str, str], folder: Path) -> ClusterAccess:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    if not (folder / "token").exists():
        raise ConfigError(
            f"This pod has no token of a service account ({folder / 'token'}). Set automountServiceAccountToken: true "
            f"and a serviceAccountName with the rights that are needed, or set KUBECONFIG."
        )
    tls = TlsSettings(
        authority=_read(folder / "ca.crt", "the pod's service account").decode("utf-8", "replace")
    ).build()
    try:
        namespace = (folder / "namespace").read_text().strip() or "default"
    except OSError:
        namespace = "default"
    source = TokenFile(folder / "token", tls)
    return ClusterAccess(
        _checked_server(server, "the variables KUBERNETES_SERVICE_HOST and _PORT"),
        source,
        namespace=namespace,
        origin=f"from the pod's service account ({folder})",
    )


class _Origin(Struct, frozen=True):
    """An entry of a kubeconfig and the file that has it: relative paths are relative to that file."""

    file: Path
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} in {self.file}"

    def read(self, path: str | None, inline: str | None, what: str) -> bytes | None:
        if inline is not None:
            try:
                return base64.b64decode(inline, validate=True)
            except binascii.Error as error:
                raise ConfigError(f"{what}-data of {self} is not valid base64: {error}") from error
        if path is None:
            return None
        return _read(self.resolve(path), f"{what} of {self}")

    def resolve(self, path: str) -> Path:
        return self.file.parent / Path(path).expanduser()


def _from_kubeconfig(files: list[Path], wanted: str | None, environ: Mapping[str, str]) -> ClusterAccess:
    configs = [(path, _load(path)) for path in files if path.exists()]
    if not configs:
        raise ConfigError(
            f"There is no kubeconfig at {', '.join(map(str, files))}. Set KUBECONFIG to the file that kubectl uses."
        )
    shown = ", ".join(str(path) for path, _ in configs)
    name = wanted or next((config.current_context for _, config in configs if config.current_context), None)
    contexts = {each.name: each.context for _, config in reversed(configs) for each in config.contexts or ()}
    if name is None:
        raise ConfigError(
            f"{shown} sets no current-context. Choose one: kubectl config use-context NAME. Known are: "
            f"{_listed(contexts)}."
        )
    if name not in contexts:
        raise ConfigError(f"{shown} has no context {name!r}. Known are: {_listed(contexts)}.")
    context = contexts[name]
    clusters = {
        each.name: (_Origin(path.absolute(), each.name), each.cluster)
        for path, config in reversed(configs)
        for each in config.clusters or ()
    }
    users = {
        each.name: (_Origin(path.absolute(), each.name), each.user or {})
        for path, config in reversed(configs)
        for each in config.users or ()
    }
    if context.cluster not in clusters:
        raise ConfigError(
            f"The context {name!r} of {shown} names the cluster {context.cluster!r}, which the file does not define. "
            "Correct the file."
        )
    if context.user and context.user not in users:
        raise ConfigError(
            f"The context {name!r} of {shown} names the user {context.user!r}, which the file does not define. "
            "Correct the file."
        )
    origin, cluster = clusters[context.cluster]
    return ClusterAccess(
        _checked_server(cluster.server, f"the cluster {origin}"),
        _source_of(*users[context.user], cluster, origin, environ)
        if context.user
        else FixedCredential(Credential(None, _tls_of(cluster, origin))),
        namespace=context.namespace or "default",
        origin=f"from {shown} (context {name!r})",
        server_name=cluster.tls_server_name,
        proxy=_checked_proxy(cluster.proxy_url, origin),
    )


def _source_of(
    origin: _Origin, entries: dict[str, Any], cluster: _Cluster, cluster_origin: _Origin, environ: Mapping[str, str]
) -> CredentialSource:
    known = {field.encode_name for field in msgspec.structs.fields(_User)}
    unknown = sorted(entries.keys() - known)
    if unknown:
        raise ConfigError(
            f"The user {origin} authenticates with {', '.join(unknown)}, which dlrover does not support. "
            f"Supported are: {', '.join(sorted(known - {'extensions'}))}. Most clusters offer an exec plug-in."
        )
    user = _convert(entries, _User, f"the user {origin}")
    certificate = origin.read(user.client_certificate, user.client_certificate_data, "client-certificate")
    key = origin.read(user.client_key, user.client_key_data, "client-key")
    if (certificate is None) != (key is None):
        raise ConfigError(f"The user {origin} has only one of client-certificate and client-key. Give both.")
    tls = _tls_of(cluster, cluster_origin, certificate, key)
    if user.exec is not None:
        if user.token or user.token_file:
            raise ConfigError(f"The user {origin} has both exec and a token. Keep only one of them.")
        settings = _plugin_of(origin, user.exec, cluster, cluster_origin, environ)

        def tls_for(given_certificate: bytes | None, given_key: bytes | None) -> ssl.SSLContext | None:
            if given_certificate is None:
                return tls
            return _tls_of(cluster, cluster_origin, given_certificate, given_key)

        return CredentialPlugin(settings, tls_for)
    if user.token_file is not None:  # kubectl prefers it to a token, too
        path = origin.resolve(user.token_file)
        if not path.exists():
            raise ConfigError(f"The tokenFile {path} of {origin} does not exist.")
        return TokenFile(path, tls)
    token = checked_token(user.token, str(origin)) if user.token else None
    return FixedCredential(Credential(token, tls))


def _plugin_of(
    origin: _Origin, entries: dict[str, Any], cluster: _Cluster, cluster_origin: _Origin, environ: Mapping[str, str]
) -> PluginSettings:
    plugin = _convert(entries, _Exec, f"exec of the user {origin}")
    if plugin.api_version not in PLUGIN_VERSIONS:
        raise ConfigError(
            f"exec of the user {origin} has the apiVersion {plugin.api_version!r}. Supported are "
            f"{' and '.join(PLUGIN_VERSIONS)}. Update the plug-in."
        )
    if plugin.interactive_mode == "Always":
        raise ConfigError(
            f"exec of the user {origin} needs a terminal (interactiveMode: Always), and dlrover runs it "
            "without one. Use another user or plug-in."
        )
    told: dict[str, object] | None = None
    if plugin.provide_cluster_info:
        authority = cluster_origin.read(
            cluster.certificate_authority, cluster.certificate_authority_data, "certificate-authority"
        )
        told = {
            "server": cluster.server,
            "tls-server-name": cluster.tls_server_name,
            "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
            "certificate-authority-data": base64.b64encode(authority).decode() if authority is not None else None,
            "proxy-url": cluster.proxy_url,
        }
        told = {name: value for name, value in told.items() if value}
    is_path = "/" in plugin.command
    return PluginSettings(
        command=str(origin.resolve(plugin.command)) if is_path else plugin.command,
        args=plugin.args or (),
        environ={**environ, **{each.name: each.value for each in plugin.env or ()}},
        api_version=plugin.api_version,
        cluster=told,
        hint=plugin.install_hint.strip(),
    )


def _tls_of(
    cluster: _Cluster, origin: _Origin, certificate: bytes | None = None, key: bytes | None = None
) -> ssl.SSLContext | None:
    if not cluster.server.startswith("https:"):
        return None
    authority = origin.read(cluster.certificate_authority, cluster.certificate_authority_data, "certificate-authority")
    text = authority.decode("utf-8", "replace") if authority is not None else None
    try:
        return TlsSettings(authority=text, is_verified=not cluster.insecure_skip_tls_verify).build(certificate, key)
    except ConfigError as error:
        raise ConfigError(f"The cluster {origin}: {error}") from error


def _checked_server(server: str, origin: str) -> str:
    try:
        parts = urlsplit(server)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{origin} has the server {server!r}. Give an address such as https://10.0.0.1:6443.")
    return server.rstrip("/")


def _checked_proxy(proxy: str | None, origin: _Origin) -> str | None:
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise ConfigError(
            f"The cluster {origin} has the proxy-url {proxy!r}. Only http and https proxies are supported."
        )
    return proxy or None


def _load(path: Path) -> _KubeConfig:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"A kubeconfig needs PyYAML: pip install 'dlrover[k8s]' ({error})") from error
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The kubeconfig {path} cannot be read: {error}") from error
    return _convert(content, _KubeConfig, f"the kubeconfig {path}")


V = TypeVar("V")


def _convert(content: object, kind: type[V], what: str) -> V:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} has the wrong form: {error}") from error


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The file {path} ({what}) cannot be read: {error.strerror}.") from error


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"
