"""`dlrover data audit`: a proof, or the records that spoil it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.core.job import DECISION_VERSION
from dlrover.master.journal.journal import Journal
from dlrover.protocol.errors import DLRoverError
from tests.core.data.test_books import Reading
from tests.core.scene import terms


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a job whose two nodes read a dataset, one of them dying in the middle."""
    scene = Reading(terms(2)).begin("a", "b")
    one, two = scene.take("a", 2)
    scene.consume("a", one, step=1)
    scene.consume("a", two, step=2)
    scene.new_round("a", "b")
    scene.restored("a", 1)
    while shards := scene.take("b", 4):
        for shard in shards:
            scene.consume("b", shard, step=2)
    path = tmp_path / "journal.sqlite"
    book = Journal(path, job_name="a-job", decision_version=DECISION_VERSION)
    book.append(1, scene.journal)
    book.close()
    return path


def test_a_clean_job_is_proved_clean(journal: Path) -> None:
    told = CliRunner().invoke(app, ["data", "audit", str(journal)])
    assert told.exit_code == 0, told.output
    assert "clean" in told.output
    assert "NOT" not in told.output
    [finding] = json.loads(CliRunner().invoke(app, ["data", "audit", "--json", str(journal)]).output)
    assert (finding["num_seen"], finding["is_complete"], finding["repeated"]) == (100, True, [])


def test_a_reader_leaves_nothing_beside_the_journal(journal: Path) -> None:
    content = journal.read_bytes()
    for command in (["data", "audit"], ["events"], ["report"], ["replay"]):
        assert CliRunner().invoke(app, [*command, str(journal)]).exit_code == 0
        assert [path.name for path in journal.parent.iterdir()] == [journal.name], command
    assert journal.read_bytes() == content


def test_a_journal_in_use_is_read_with_what_is_in_its_log_only(journal: Path) -> None:
    book = Journal(journal, job_name="a-job", decision_version=DECISION_VERSION)
    beside = sorted(path.name for path in journal.parent.iterdir())
    assert f"{journal.name}-wal" in beside
    told = CliRunner().invoke(app, ["data", "audit", str(journal)])
    assert told.exit_code == 0, told.output
    assert sorted(path.name for path in journal.parent.iterdir()) == beside
    book.close()


def test_a_journal_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["data", "audit", str(tmp_path / "none")])
    assert isinstance(told.exception, DLRoverError)
    assert "There is no journal" in str(told.exception)
