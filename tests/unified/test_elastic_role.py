"""What a job says of an elastic role that failed: the cause of its first failure, in one line."""

from __future__ import annotations

import pytest

from dlrover.cli.ray.messages import JobOver
from dlrover.unified.shell.ray_cluster import say_end
from tests.cli.launch.test_last_words import report_of


def test_an_elastic_role_that_fails_names_the_cause_of_its_first_failure():
    report = report_of(exit_code=1, message="ValueError: no", traceback="Traceback ...\nOSError: another line")
    assert say_end(JobOver(3, report)) == "exit code 3: first failure: exit code 1, an exception: ValueError: no"


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        ("", "exit code 3"),
        (
            "=====\nJob a failed: JoinTimeout\n3 of at least 4 nodes joined.\n=====\n",
            "exit code 3: 3 of at least 4 nodes joined.",
        ),
    ],
)
def test_without_a_failed_worker_the_last_line_is_told(report: str, sentence: str):
    assert say_end(JobOver(3, report)) == sentence
