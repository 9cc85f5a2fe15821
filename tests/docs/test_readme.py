"""The README is short, and its session is what the terminal shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_tutorial import plain
from tools.record_recovery import BEGIN, COMMAND, END, KILL, in_readme, record

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST_WORDS = 900


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_the_readme_has_its_parts_in_their_order() -> None:
    titles = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert titles == [
        "Try it",
        "Move a torchrun job over",
        "Claims",
        "How it works",
        "How it differs",
        "Limits",
        "More",
    ]
    claims = README.partition("## Claims")[2].partition("## How it works")[0]
    rows = [line for line in claims.splitlines() if line.startswith("| ") and "Claim" not in line]
    assert len(rows) == 5
    assert all(re.search(r"\| `[^`]+` \|$", row) for row in rows), "each with a command"
    assert len(re.findall(r"\bBrain\b", README)) == 1, "one place says whether there is a Brain"


@pytest.mark.slow
def test_the_session_in_the_readme_is_what_the_terminal_shows() -> None:
    pytest.importorskip("torch")
    recorded = in_readme()
    assert README.count(BEGIN) == README.count(END) == 1
    assert [line for line in recorded if line.startswith("$")][1:] == [
        f"$ {COMMAND}",
        f"$ {KILL}            # in a second terminal",
    ]
    now = " ".join(record())
    steps = [line for line in recorded if line.startswith("step")]
    assert [line for line in steps if plain(line) not in plain(now)] == []
    for said in ("failed at step", "killed by signal 9 (SIGKILL)", "All 2 workers were started again", "goodput"):
        assert said in " ".join(recorded)
        assert said in now
