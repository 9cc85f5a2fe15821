"""Whether and where the master of a job shows it to people: the page and the metrics."""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.addresses import LOOPBACK
from dlrover.protocol.errors import ConfigError


class Watching(Struct, frozen=True, kw_only=True):
    """As the fields of the same names in the master's configuration."""

    dashboard_port: int = -1
    dashboard_host: str = LOOPBACK
    dashboard_url: str = ""
    metrics_port: int = -1
    metrics_host: str = LOOPBACK

    @classmethod
    def of(cls, *, is_enabled: bool, port: int, host: str, url: str, metrics_port: int, metrics_host: str) -> Watching:
        """Raises `ConfigError`. `metrics_port`: -1 for none."""
        for option, number in (("--dashboard-port", port), ("--metrics-port", max(metrics_port, 0))):
            if not 0 <= number <= 65535:
                raise ConfigError(f"{option} {number}: give a port from 0 to 65535.")
        if is_enabled:
            check_extra()
        if url:
            from dlrover.master.web.hosts import parse_urls  # here: most jobs have no proxy before their page

            parse_urls(url)
        return cls(
            dashboard_port=port if is_enabled else -1,
            dashboard_host=host,
            dashboard_url=url,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )


def check_extra() -> None:
    """Raises `ConfigError` before anything starts, where the page's framework is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The dashboard needs {' and '.join(missing)}, but this is not installed. Install it with: pip "
            "install 'dlrover[dashboard]'. Or leave out --enable-dashboard and --service-type http."
        )
