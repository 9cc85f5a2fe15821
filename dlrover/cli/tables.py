"""Where commands print their tables. Not in `console`: launchers import that, and do without `rich`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table_console() -> Console:
    """Wide enough for names also where the output is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
