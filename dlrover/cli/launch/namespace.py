"""
`parse_args` and `run` for programs that start `dlrover-run` from Python, after they have changed what the command line said.

The namespace is that of the original: each option under its name, `training_script` and `training_script_args`. Values of a namespace
that was made elsewhere count as given where they differ from the defaults.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from dlrover.cli.console import say, say_block
from dlrover.cli.launch.programmatic import launch_settings
from dlrover.cli.options.parser import Parsed, ValueOrigin, convert, parse
from dlrover.cli.options.settings import check_settings
from dlrover.cli.options.table import OPTIONS, Kind, Option, Value
from dlrover.protocol.errors import ConfigError

EXIT_USAGE = 2


class Arguments(Namespace):
    """A namespace that remembers which values were given. Not in its `vars`, which programs print and store."""

    __slots__ = ("parsed",)

    parsed: Parsed


def main(args: Sequence[str] | None = None) -> None:
    """`dlrover-run` as a function: it comes back when the job has ended well, and raises `JobError` otherwise."""
    run(parse_args(args))


def parse_args(args: Sequence[str] | None = None) -> Namespace:
    """As an `argparse` parser: what is wrong, and --help, end the program."""
    try:
        parsed = parse(sys.argv[1:] if args is None else args, os.environ)
    except ConfigError as error:
        say_block(f"dlrover-run: error: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    if parsed.immediate == "--check-env":
        from dlrover.cli.launch.check_env import print_table

        raise SystemExit(print_table())
    if parsed.immediate:
        from dlrover.cli.options.help_page import describe_all, describe_common

        print(describe_all() if parsed.immediate == "--help-all" else describe_common(), end="")
        raise SystemExit(0)
    values = {option.dest: _shown(option, parsed.values[option.dest]) for option in OPTIONS}
    namespace = Arguments(**values, training_script=parsed.script, training_script_args=list(parsed.script_args))
    namespace.parsed = parsed
    return namespace


def run(args: Namespace) -> None:
    """Until the job has ended. Raises `ConfigError` if nothing could be started, `JobError` if the job failed."""
    settings = check_settings(_parsed(args), os.environ)
    for note in settings.notes:
        say(note)
    launch_settings(settings)


def _parsed(args: Namespace) -> Parsed:
    script = getattr(args, "training_script", None)
    if not script:
        raise ConfigError("The namespace names no training script. Set training_script.")
    known = getattr(args, "parsed", None)
    values: dict[str, Value] = {}
    origins: dict[str, ValueOrigin] = {}
    for option in OPTIONS:
        value = _taken(option, getattr(args, option.dest, option.default))
        is_as_read = isinstance(known, Parsed) and value == known.values[option.dest]
        values[option.dest] = value
        if is_as_read:
            origins[option.dest] = known.origins[option.dest]  # type: ignore[union-attr]
        else:
            origins[option.dest] = ValueOrigin.DEFAULT if value == option.default else ValueOrigin.FLAG
    return Parsed(values, origins, str(script), tuple(str(arg) for arg in getattr(args, "training_script_args", ())))


_INTEGERS = ("precheck",)
"""Options of the original's that it reads as numbers, and we as one of some words."""


def _shown(option: Option, value: Value) -> object:
    if option.dest in _INTEGERS:
        return int(str(value))
    return list(value) if isinstance(value, tuple) else value


def _taken(option: Option, value: object) -> Value:
    """A program may have put in a number where the command line has text, or the other way round."""
    if value is None or value == option.default:
        return option.default if value is not None else None
    match option.kind:
        case Kind.LIST if not isinstance(value, str):
            return tuple(str(item) for item in value)  # type: ignore[attr-defined]
        case Kind.FLAG if not isinstance(value, str):
            return bool(value)
        case _:
            text = str(int(value)) if isinstance(value, int) else str(value)
            return convert(option, text, f"{option.dest}={text}")
