"""Text from outside cannot steer a terminal."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from dlrover.cli.console import say, say_block
from dlrover.cli.local.display import Display
from dlrover.host.console import ConsoleHandler
from dlrover.host.plain_text import printable

EVIL = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\re\x7f\u202ef"
SPELLED = "a\\u001b[2Jb\\u001b]0;title\\u0007c\\u009b31md\\u000de\\u007f\\u202ef"


def test_control_characters_are_spelled_out_and_the_rest_stays() -> None:
    assert printable(EVIL) == SPELLED
    plain = "Größe 100 %\n\tin Zeilen, 中文, 🙂"
    assert printable(plain) == plain


def test_json_means_the_same_afterwards() -> None:
    encoded = msgspec.json.encode({"text": EVIL}).decode()
    assert "\x9b" in encoded, "msgspec leaves it as it is"
    assert json.loads(printable(encoded)) == {"text": EVIL}


def test_what_launchers_and_logs_say_is_plain(capfd: pytest.CaptureFixture[str]) -> None:
    say(f"one {EVIL}")
    say_block(f"two {EVIL}\n")
    handler = ConsoleHandler(patience=30.0)
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "three %s", (EVIL,), None))
    handler.flush()
    said = capfd.readouterr().err
    for number in ("one", "two", "three"):
        assert f"{number} {SPELLED}" in said


async def test_what_a_local_job_says_is_plain_and_its_workers_may_print_what_they_like(
    capfd: pytest.CaptureFixture[str],
) -> None:
    display = Display("127.0.0.1:1", "token", tls=None, is_terminal=False)
    display.say(EVIL)
    display.say_block(EVIL)
    display.line("worker-0", f"{EVIL}\n".encode(), True)
    await display.drain(30.0)
    said = capfd.readouterr().err
    assert said.count(SPELLED) == 2
    assert f"[worker-0] {EVIL}" in said
