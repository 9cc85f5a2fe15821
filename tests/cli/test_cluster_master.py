"""What the master's command decides for a cluster by itself. (With an API server: tests/kubernetes/platform/test_master.py.)"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dlrover.cli.cluster_master import LAPSE, MAX_MESSAGE, lapse_left, leave_notice
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, ElasticJobStatus, MasterRecord
from dlrover.platforms.kubernetes.objects import Metadata
from dlrover.protocol.messages.job import ExitReason, JobEnd


def job(gone_at: str | None) -> ElasticJob:
    master = None if gone_at is None else MasterRecord(index=1, gone_at=gone_at)
    return ElasticJob(metadata=Metadata(name="j"), status=ElasticJobStatus(master=master))


@pytest.mark.parametrize(
    ("gone_at", "has_journal", "expected"),
    [
        (None, False, 0.0),
        ("", False, 0.0),
        ("1970-01-01T00:16:40Z", True, 0.0),
        ("1970-01-01T00:16:40Z", False, LAPSE - 4),
        ("1970-01-01T00:10:00Z", False, 0.0),
        ("1970-01-01T01:00:00Z", False, LAPSE),  # a clock that goes ahead of ours
        ("soon", False, LAPSE),
    ],
)
def test_a_master_without_a_journal_waits_until_the_former_ones_access_has_lapsed(gone_at, has_journal, expected):
    assert lapse_left(job(gone_at), has_journal=has_journal, now=1004.0) == expected


def written_end(directory: Path, end: JobEnd) -> str:
    path = directory / "end.json"
    path.write_bytes(msgspec.json.encode(end))
    return str(path)


def test_the_end_of_a_job_is_told_in_a_message_that_a_kubelet_does_not_cut(tmp_path):
    message = tmp_path / "termination-log"
    message.touch()
    end = JobEnd(reason=ExitReason.WORKER_ERROR, exit_code=1, message='"é\n' * 5000)
    assert leave_notice(written_end(tmp_path, end), str(message))
    text = message.read_bytes()
    assert MAX_MESSAGE // 2 < len(text) <= MAX_MESSAGE
    notice = json.loads(text)
    assert (notice["stage"], notice["reason"]) == ("Failed", "WorkerError")
    assert end.message.startswith(notice["sentence"])


def test_a_job_that_has_not_ended_and_a_cluster_that_does_not_listen_get_no_message(tmp_path):
    message = tmp_path / "termination-log"
    message.touch()
    assert not leave_notice(str(tmp_path / "no-end.json"), str(message))
    end = written_end(tmp_path, JobEnd(reason=ExitReason.COMPLETED, exit_code=0, message="done"))
    assert not leave_notice(end, str(tmp_path / "no-such-file"))
    assert not (tmp_path / "no-such-file").exists()
    assert leave_notice(end, str(message))
    assert json.loads(message.read_text()) == {"stage": "Succeeded", "reason": "Completed", "sentence": "done"}
