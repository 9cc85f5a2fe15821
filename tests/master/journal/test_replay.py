"""`dlrover replay` over journals that real masters wrote."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.cli.show.replay import main, replay
from dlrover.core.commit_order import replay as replay_records
from dlrover.core.job import DECISION_VERSION
from dlrover.master.journal.journal import Journal
from dlrover.protocol.messages.job import JobTerms, LeaveJob, LeaveReason, ReportFinished, Round, Run
from tests.master.conftest import Connect, MakeMaster, StartMaster, status_of


async def a_short_job(start_master: StartMaster, connect: Connect) -> str:
    """Gives the digest at its end."""
    master = await start_master()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    finished = ReportFinished(node=agent.node, incarnation=agent.incarnation, round=Round(1))
    await agent.channel.call(finished, timeout=10)
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.JOB_ENDED, message="bye")
    await agent.channel.call(leave, timeout=10)
    await agent.leave()
    digest = (await master.status()).digest
    await master.stop()
    return digest


async def test_the_timeline_tells_what_was_decided_and_why(
    start_master: StartMaster, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = await a_short_job(start_master, connect)
    assert replay(tmp_path / "journal.sqlite") == 0
    printed = capsys.readouterr().out
    for words in (
        "master started, epoch 1",
        "host-l0 attaches for the first time",
        "node 1.1 joins round 1",
        "> node 1: run round 1 as group rank 0 of 1, global ranks 0-0 of 1",
        "node 1.1 finished in round 1",
        "node 1.1 leaves (job-ended): bye",
        "the job ended: Completed, exit code 0",
        "because: ",
        "5 records replayed; all digests match",
        f"digest {digest}",
    ):
        assert words in printed, printed


async def test_programs_get_a_line_each(
    start_master: StartMaster, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = await a_short_job(start_master, connect)
    assert main([str(tmp_path / "journal.sqlite"), "--json"]) == 0
    first, *steps, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {"job_name": "job", "first_number": 1}
    assert [step["number"] for step in steps] == [1, 2, 3, 4, 5]
    assert steps[2]["command"]["type"] == "JoinRendezvous"
    assert last == {"verified": True, "num_records": 5, "digest": digest}


async def test_another_process_with_another_hash_seed_comes_to_the_same_digest(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    digest = await a_short_job(start_master, connect)
    code = (
        "import sys, pathlib; from dlrover.cli.show.replay import replay; sys.exit(replay(pathlib.Path(sys.argv[1])))"
    )
    for seed in ("1", "2"):
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code, str(tmp_path / "journal.sqlite")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert digest in ended.stdout


async def test_the_journal_of_a_running_master_can_be_read(
    make_master: MakeMaster, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    master = make_master()
    master.start()
    agent = connect(master.address)
    await agent.attached()
    await agent.join()
    assert replay(master.journal) == 0
    assert (await status_of(master.address)).digest in capsys.readouterr().out
    master.kill(signal.SIGKILL)
    assert replay(master.journal) == 0


async def test_snapshots_and_the_archive_are_verified_too(
    start_master: StartMaster, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await a_short_job(start_master, connect)
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, job_name="job", decision_version=DECISION_VERSION)
    stored = journal.load()
    journal.save_snapshot(4, replay_records(None, stored.records[:3]).job.encode())
    journal.close()
    assert replay(path) == 0
    journal = Journal(path, job_name="job", decision_version=DECISION_VERSION)
    journal.save_snapshot(4, replay_records(None, stored.records[:2]).job.encode())
    journal.close()
    assert replay(path) == 1
    assert "the snapshot after record 3 differs from the state that the records lead to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE records SET data = x'c1' WHERE number = 3", "cannot be read"),
        ("DELETE FROM records WHERE number = 2", "record 2 is missing"),
        ("UPDATE records SET data = (SELECT data FROM records WHERE number = 4) WHERE number = 3", "record 2"),
        ("UPDATE meta SET value = 99 WHERE key = 'decision_version'", "decision version 99"),
        ("UPDATE meta SET value = 99 WHERE key = 'format_version'", "format 99"),
        ("DROP TABLE records", "not a journal"),
    ],
)
async def test_a_changed_journal_is_not_believed(
    start_master: StartMaster,
    connect: Connect,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    says: str,
) -> None:
    await a_short_job(start_master, connect)
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    assert replay(path) == 1
    assert says in capsys.readouterr().err


def test_what_is_no_journal_is_said_clearly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path / "missing") == 1
    assert "There is no journal" in capsys.readouterr().err
    (tmp_path / "diary").write_text("dear diary " * 100)
    assert replay(tmp_path / "diary") == 1
    assert "not a journal" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert replay(tmp_path / "empty") == 1
    assert "not a journal" in capsys.readouterr().err
