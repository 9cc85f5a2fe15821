"""What `dlrover brain serve` is started with, and where its database is."""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.addresses import TlsConfig

DAY = 86_400.0


class RetentionTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how many days the store keeps things."""

    run_days: float = 90.0
    """Runs and ends of nodes."""
    job_days: float = 400.0
    """Jobs, since their end, or since they were last heard of."""
    plan_days: float = 400.0


class RateTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one job may send in the mean of a second. A job may save up two seconds' worth."""

    messages: float = 10.0
    size_bytes: float = 1024 * 1024


class ServiceTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses of the service, and what it keeps."""

    host: str = "127.0.0.1"
    port: int = 50001
    """Of masters and commands (gRPC); 0: a free one."""
    http_port: int | None = 8000
    """Of people and of the historical HTTP forms; 0: a free one; None: no such port."""
    tls: TlsConfig | None = None
    retention: RetentionTerms = RetentionTerms()
    rate: RateTerms = RateTerms()
    start_patience: float = 0.5
    """Seconds that a start plan waits for its job to be stored. The job waits two seconds for the plan."""
    prune_every: float = 3600.0
    """Seconds."""
    gather: float = 0.02
    """Seconds for which the writer waits for more before it commits; at most 0.2. While it commits, more gathers."""
