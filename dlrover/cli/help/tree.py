"""
Every command with its options, in one form.

The commands are made in three ways (the table of `dlrover-run`, typer, argparse). Completion, the reference page and the tests of the documents need
to know all of them alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import typer

from dlrover.cli.options.help_page import text_of
from dlrover.cli.options.table import OPTIONS


class OptionEntry(NamedTuple):
    names: tuple[str, ...]
    value: str
    """What stands for its value in the help. Empty: a flag."""
    text: str
    choices: tuple[str, ...] = ()


class CommandEntry(NamedTuple):
    words: tuple[str, ...]
    """The program and the names of its commands: `("dlrover", "job", "list")`."""
    text: str
    arguments: tuple[tuple[str, str], ...]
    """Name and meaning."""
    options: tuple[OptionEntry, ...]
    commands: tuple[str, ...] = ()
    """Names of the commands below it."""
    is_hidden: bool = False
    """A short form of another command."""

    @property
    def name(self) -> str:
        return " ".join(self.words)


def all_commands(app: typer.Typer) -> Iterator[CommandEntry]:
    """`dlrover-run`, then `app`, which is `dlrover`, and what is below it."""
    yield _run_command()
    yield from _typer_commands(typer.main.get_command(app), ("dlrover",), is_hidden=False)


def _run_command() -> CommandEntry:
    flags = (("--help", "-h"), ("--help-all",), ("--check-env",))
    texts = ("Print the options that most jobs need.", "Print every option.", "Print what is installed.")
    options = [OptionEntry(names, "", text) for names, text in zip(flags, texts, strict=True)]
    for option in OPTIONS:
        names = option.names + ((option.short,) if option.short else ())
        value = "" if option.is_flag else option.metavar or option.dest.upper()
        options.append(OptionEntry(names, value, text_of(option), option.choices))
    arguments = (("SCRIPT", "The training script."), ("ARGUMENTS", "Arguments of the script."))
    return CommandEntry(
        ("dlrover-run",), "Run a script as torchrun does, and keep it running.", arguments, tuple(options)
    )


def _typer_commands(command: Any, words: tuple[str, ...], *, is_hidden: bool) -> Iterator[CommandEntry]:
    text = " ".join((command.help or "").split())
    if words in _ARGPARSE:
        yield _argparse_command(_ARGPARSE[words](), words, text)
        return
    options, arguments = [], []
    for each in command.params:
        if not each.opts[0].startswith("-"):
            arguments.append((each.name.upper(), each.help or ""))
        elif not each.hidden:
            options.append(OptionEntry((*each.opts, *each.secondary_opts), _value_of(each), _with_default(each)))
    inner = getattr(command, "commands", {})
    shown = tuple(name for name, each in inner.items() if not each.hidden)
    options.append(OptionEntry(("--help",), "", "Show the help of this command."))
    yield CommandEntry(words, text, tuple(arguments), tuple(options), shown, is_hidden)
    for name, each in inner.items():
        yield from _typer_commands(each, (*words, name), is_hidden=is_hidden or each.hidden)


def _value_of(option: Any) -> str:
    if option.is_flag:
        return ""
    kind = option.type_descriptor.annotation
    return str(option.metavar or {int: "N", float: "NUMBER"}.get(kind, "TEXT"))


def _with_default(option: Any) -> str:
    text = " ".join((option.help or "").split())
    is_told = option.default in (None, "", -1, (), []) or option.is_flag or callable(option.default)
    return text if is_told else f"{text} Default: {option.default}."


def _local() -> argparse.ArgumentParser:
    from dlrover.cli.local.command import build_parser

    return build_parser()


def _master() -> argparse.ArgumentParser:
    from dlrover.cli.master_command import build_parser

    return build_parser("dlrover master")


def _replay() -> argparse.ArgumentParser:
    from dlrover.cli.show.replay import build_parser

    return build_parser()


def _ray_run() -> argparse.ArgumentParser:
    from dlrover.cli.ray.plan import build_parser

    return build_parser()


_ARGPARSE: dict[tuple[str, ...], Callable[[], argparse.ArgumentParser]] = {
    ("dlrover", "local"): _local,
    ("dlrover", "master"): _master,
    ("dlrover", "replay"): _replay,
    ("dlrover", "ray", "run"): _ray_run,
}
"""Commands that read their words by themselves."""


def _argparse_command(parser: argparse.ArgumentParser, words: tuple[str, ...], text: str) -> CommandEntry:
    options, arguments = [], []
    for action in parser._actions:
        told = "" if action.help is None else _expanded(action)
        if action.help == argparse.SUPPRESS:
            continue
        if not action.option_strings:
            arguments.append((str(action.metavar or action.dest.upper()), told))
            continue
        is_flag = action.nargs == 0
        choices = tuple(map(str, action.choices or ()))
        value = "" if is_flag else str(action.metavar or "|".join(choices) or action.dest.upper())
        names = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        options.append(OptionEntry(tuple(names), value, told, choices))
    if words in (("dlrover", "local"), ("dlrover", "ray", "run")):
        arguments += [("SCRIPT", "Options of dlrover-run and the training script, after `--`.")]
    return CommandEntry(words, text.partition(";")[0].rstrip(".") + ".", tuple(arguments), tuple(options))


def _expanded(action: argparse.Action) -> str:
    return " ".join(str(action.help).replace("%%", "%").split())
