"""The one list of all commands: what completion and the documents are made from."""

from __future__ import annotations

import pytest

from dlrover.cli.help.tree import CommandEntry, all_commands
from dlrover.cli.main import app
from dlrover.cli.options.table import OPTIONS


@pytest.fixture(scope="module")
def commands() -> dict[str, CommandEntry]:
    return {command.name: command for command in all_commands(app)}


def names_of(command: CommandEntry) -> set[str]:
    return {name for option in command.options for name in option.names}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("dlrover-run", "--help-all"),
        ("dlrover scale", "--why"),
        ("dlrover local", "--nodes"),
        ("dlrover master", "--fleet"),
        ("dlrover replay", "--json"),
        ("dlrover ray run", "--placement"),
        ("dlrover job submit", "--help"),
        ("dlrover doctor", "--need"),
    ],
)
def test_commands_of_each_making_are_there_with_their_options(
    command: str, option: str, commands: dict[str, CommandEntry]
) -> None:
    assert option in names_of(commands[command])


def test_every_spelling_of_every_option_of_dlrover_run_is_there(commands: dict[str, CommandEntry]) -> None:
    spelled = {name for option in OPTIONS for name in (*option.names, option.short) if name}
    assert spelled <= names_of(commands["dlrover-run"])


def test_every_command_and_option_says_what_it_is_for(commands: dict[str, CommandEntry]) -> None:
    silent = [name for name, command in commands.items() if not command.text.endswith((".", "`"))]
    silent += [
        f"{name} {option.names[0]}"
        for name, command in commands.items()
        for option in command.options
        if not option.text
    ]
    assert silent == []


def test_old_spellings_and_short_forms_are_marked(commands: dict[str, CommandEntry]) -> None:
    assert "--workers" not in names_of(commands["dlrover restart"])
    assert commands["dlrover ls"].is_hidden
    assert not commands["dlrover job list"].is_hidden
    assert "ls" not in commands["dlrover"].commands
