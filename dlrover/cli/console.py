"""What the launcher itself says to a person: on stderr, one line per event, always with the same beginning."""

from __future__ import annotations

import sys

PREFIX = "dlrover-run: "


def say(text: str) -> None:
    _write(f"{PREFIX}{text}\n")


def say_block(text: str) -> None:
    """Several lines in one write, so that workers' output does not fall between them."""
    _write(text if text.endswith("\n") else text + "\n")


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the terminal is gone (SIGHUP); there is nobody left to tell
