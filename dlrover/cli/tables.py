"""Where commands print for people. Not in `console`: launchers import that, and do without `rich`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from dlrover.host.plain_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def table_console() -> Console:
    """Wide enough for names also where the output is no terminal."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=160)


def plain_console(**options: Any) -> Console:
    """A console of `rich` on which no text can steer the terminal, whatever it holds."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # What has a control is an order of `rich` itself, and no text.
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return PlainConsole(**options)


def echo(text: str, *, err: bool = False) -> None:
    """The same for plain lines and JSON."""
    typer.echo(printable(text), err=err)
