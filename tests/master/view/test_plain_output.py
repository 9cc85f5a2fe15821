"""A node that sends escape sequences, and what people see of it in a terminal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from dlrover.protocol.messages.job import (
    FailureKind,
    JobTerms,
    LeaveJob,
    LeaveReason,
    Micros,
    ReportFailure,
    Round,
    Run,
    WorkerFailure,
)
from tests.master.conftest import TOKEN, Connect, MakeMaster

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
STEERING = ("\x1b", "\x07", "\x9b", "\u202e", "\r")


async def test_no_command_prints_what_would_steer_the_terminal(
    make_master: MakeMaster, connect: Connect, tmp_path: Path
) -> None:
    master = make_master()
    master.start()
    agent = connect(master.address, terms=JobTerms(), launch=f"node {EVIL}")
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    failure = WorkerFailure(
        global_rank=0,
        local_rank=0,
        pid=1,
        kind=FailureKind.EXCEPTION,
        exited_at=Micros(1),
        exit_code=1,
        message=f"ValueError: {EVIL}",
        traceback=f"Traceback {EVIL}",
        log_tail=EVIL,
    )
    report = ReportFailure(node=agent.node, incarnation=agent.incarnation, round=Round(1), failures=(failure,))
    await agent.channel.call(report, timeout=30)
    address = ("--addr", master.address)
    seen = [
        await printed(*command, *address)
        for command in (
            ("status",),
            ("status", "--json"),
            ("top", "--once"),
            ("events",),
            ("events", "--json"),
            ("diagnosis",),
            ("report",),
        )
    ]
    leave = LeaveJob(
        node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.JOB_ENDED, message=f"bye {EVIL}"
    )
    await agent.channel.call(leave, timeout=30)
    await agent.leave()
    master.kill(15)
    seen += [
        await printed(*command, str(tmp_path / "journal.sqlite"))
        for command in (("replay",), ("replay", "--json"), ("events",), ("report",), ("data", "audit"))
    ]
    assert not [(text, each) for text in seen for each in STEERING if each in text]
    assert "\\u001b" in seen[0], "it is shown, and spelled out"
    assert not any(each in master.log() for each in STEERING)


async def printed(*arguments: str) -> str:
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "dlrover.cli.main", *arguments],
        env={**os.environ, "DLROVER_JOB_TOKEN": TOKEN, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 0, (arguments, ended.stderr)
    return (ended.stdout + ended.stderr).decode()
