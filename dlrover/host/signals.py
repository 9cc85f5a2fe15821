"""Signals as people call them; for every layer, and without importing anything larger than the standard `signal`."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
