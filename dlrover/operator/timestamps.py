"""Instants as seconds since 1970 here, as text in objects."""

from __future__ import annotations

from datetime import UTC, datetime


def text_of(instant: float) -> str:
    """In whole seconds, as Kubernetes writes them."""
    return datetime.fromtimestamp(int(instant), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instant_of(text: str) -> float | None:
    """None: there is no instant in it."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
