"""Which log file there is besides the console; `log_file` writes it. Apart from that, because the launcher does without `logging`."""

from __future__ import annotations

from msgspec import Struct

MIN_BYTES = 1024 * 1024
DEFAULT_BYTES = 200 * 1024 * 1024
DEFAULT_BACKUPS = 5


class LogRoot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DLROVER_LOG_ROOT_DIR: where `dlrover.log` is, and when it is rotated."""

    directory: str
    level: str = "INFO"
    """Of what goes into the file; the console has its own."""
    max_bytes: int = DEFAULT_BYTES
    num_backups: int = DEFAULT_BACKUPS
    """`dlrover.log.1` is the newest."""
