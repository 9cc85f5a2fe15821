from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.agent.config import AgentResult
from dlrover.cli.launch.last_words import failure_report, goodput_line
from dlrover.protocol.messages.goodput import GoodputStatus, TimeClass
from dlrover.protocol.messages.job import (
    ExitReason,
    FailureKind,
    FirstFailure,
    JobEnd,
    Micros,
    NodeRank,
    Round,
    WorkerFailure,
)


def report_of(**fields: object) -> str:
    failure = WorkerFailure(
        **{
            "global_rank": 5,
            "local_rank": 1,
            "pid": 77,
            "kind": FailureKind.EXCEPTION,
            "exited_at": Micros(0),
            **fields,
        }
    )  # type: ignore[arg-type]
    first = FirstFailure(failure=failure, node_rank=NodeRank(2), host="n2", round=Round(4), step=120)
    end = JobEnd(
        reason=ExitReason.CODE_ERROR,
        exit_code=1,
        message="The same crash 3 times.",
        first_failure=first,
        num_restarts=3,
    )
    return failure_report("my-job", AgentResult(exit_code=1, end=end))


def test_the_report_names_culprit_cause_and_where_to_look() -> None:
    text = report_of(
        exit_code=1, message="ValueError: no", traceback="Traceback ...\nValueError: no", log_file="/l/stderr.log",
        error_file="/l/error.json",
    )  # fmt: skip
    for part in (
        "Job my-job failed: CodeError", "The same crash 3 times.", "Restarts before that: 3", "global rank 5 (local rank 1",
        "rank 2 on n2", "exit code 1, an exception: ValueError: no", "120", "/l/stderr.log", "/l/error.json", "  Traceback",
    ):  # fmt: skip
        assert part in text


def test_a_signal_is_said_once() -> None:
    text = report_of(kind=FailureKind.SIGNAL, signal=9, message="ended by SIGKILL")
    assert text.count("SIGKILL") == 1
    assert "signal 11 (SIGSEGV): core dumped" in report_of(
        kind=FailureKind.SIGNAL, signal=11, message="ended by SIGSEGV, core dumped"
    )


def test_what_a_job_reached_since_its_first_step_is_said_only_if_it_did_one() -> None:
    status = GoodputStatus(
        now=Micros(0), wall=20.0, seconds={TimeClass.START_UP: 20.0}, beginning={}, goodput=0.0,
        goodput_since_start=0.0, num_faults=1,
    )  # fmt: skip
    assert goodput_line(status) == "goodput 0.0% of 20.0 s, 1 fault; start-up 100.0%"
    assert "0.0% since the first step" in goodput_line(replace(status, highest_step=3))


def test_a_signal_has_its_name_and_the_log_is_shown_where_there_is_no_traceback() -> None:
    text = report_of(kind=FailureKind.OUT_OF_MEMORY, signal=9, log_tail="\n".join(f"line {n}" for n in range(100)))
    assert "signal 9 (SIGKILL), killed by the kernel: out of memory" in text
    assert "line 99" in text
    assert "line 69" not in text
    assert "70 lines left out" in text


def test_an_exit_code_that_is_all_there_is_to_say_is_said_once() -> None:
    assert "cause         exit code 3\n" in report_of(kind=FailureKind.EXIT_CODE, exit_code=3, message="exit code 3")


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_its_last_words(kind: FailureKind) -> None:
    assert "it was so: and so" in report_of(kind=kind, message="it was so: and so")


def test_a_hang_is_told_as_what_the_diagnosis_found() -> None:
    text = report_of(kind=FailureKind.DIAGNOSED, message="stopped: the round stood still for 6.0 s.")
    assert (
        "no exit status, the diagnosis found it at fault while it ran: stopped: the round stood still for 6.0 s."
        in text
    )


def test_without_any_trace_the_report_says_how_to_get_one() -> None:
    assert "--log-dir" in report_of(kind=FailureKind.SIGNAL, signal=11)


def test_a_node_that_never_heard_of_the_end_still_reports() -> None:
    text = failure_report("j", AgentResult(exit_code=23, message="The master is gone."))
    assert "Job j failed on this node" in text, "what became of the job on others is not known here"
    assert "The master is gone." in text


def test_files_that_go_with_the_job_are_not_offered() -> None:
    text = report_of(
        kind=FailureKind.SIGNAL, signal=11, error_file="/tmp/dlrover-0/job/node-0a1b2c3d/attempts/error.json"
    )
    assert "error.json" not in text
