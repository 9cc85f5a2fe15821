"""
Under which names a browser may open the page.

A site of a stranger can let its own name point to this machine, and its scripts are then of the same origin as our page (DNS rebinding). The browser still
sends that name as `Host`, so other names than ours are refused. An address needs no name server: every address is accepted.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from dlrover.protocol.errors import ConfigError


class Hosts:
    def __init__(self, served_on: str = "", urls: str = "") -> None:
        """`urls` are those of reverse proxies, separated by commas. Raises ConfigError."""
        self.origins = parse_urls(urls)
        """Where our page may come from although it was asked for under another name or without TLS."""
        given = {_name(origin.partition("//")[2]) for origin in self.origins}
        self._names = {"localhost", served_on.lower(), socket.gethostname().lower(), *given} - {""}

    def is_known(self, host: str) -> bool:
        """`host` is the header of that name."""
        name = _name(host)
        return name in self._names or _is_address(name)

    def is_encrypted(self, host: str) -> bool:
        """Whether a proxy speaks HTTPS with those who ask under this name."""
        return f"https://{host.lower()}" in self.origins


def parse_urls(urls: str) -> tuple[str, ...]:
    """Raises ConfigError."""
    origins = []
    for url in filter(None, (each.strip() for each in urls.split(","))):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
            raise ConfigError(
                f"--dashboard-url {url}: give a URL without a path, such as https://jobs.example.com. The page needs a name of its own."
            )
        origins.append(f"{parts.scheme}://{parts.netloc.lower()}")
    return tuple(origins)


def _name(host: str) -> str:
    """Without the port; empty if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
