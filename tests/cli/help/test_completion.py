"""What a shell offers when Tab is pressed."""

from __future__ import annotations

import re
import subprocess

import pytest

from dlrover.cli.help.completion import SHELLS, script_for
from dlrover.cli.help.tree import all_commands
from dlrover.cli.main import app
from dlrover.protocol.errors import ConfigError


def offered(line: str) -> list[str]:
    """By a real bash, for the last word of the line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _dlrover_complete; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"{script_for('bash', app)}\n{ask}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dlrover-run --nn", ["--nnodes"]),
        ("dlrover-run --nproc-per-node 2 --stand", ["--standalone", "--standby"]),
        ("dlrover st", ["status", "stop"]),
        ("dlrover scale --wh", ["--why"]),
        ("dlrover checkpoint v", ["verify"]),
        ("dlrover job submit --names", ["--namespace"]),
        ("dlrover local --nod", ["--nodes", "--nodes-start"]),
        ("dlrover nonsense --addr", []),
        ("/usr/bin/dlrover ver", ["version"]),
    ],
)
def test_bash_offers_what_may_come_next(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_zsh_takes_the_functions_of_bash() -> None:
    script = script_for("zsh", app)
    assert "bashcompinit" in script
    assert script.endswith(script_for("bash", app).partition("\n")[2])


def test_fish_gets_every_command_with_every_option() -> None:
    lines = script_for("fish", app).splitlines()
    for command in all_commands(app):
        if command.is_hidden:
            continue
        mine = [line for line in lines if f"'__dlrover_at {command.name}'" in line]
        assert len(mine) == len(command.commands) + len(command.options), command.name
    assert any(re.search(r"-l start-method -x -a 'spawn fork forkserver'", line) for line in lines)


def test_another_shell_is_refused_with_the_names_of_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"csh.*bash, zsh, fish"):
        script_for("csh", app)
    assert all(script_for(shell, app).startswith("# Completion") for shell in SHELLS)
