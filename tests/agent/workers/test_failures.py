from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.agent.config import LogAction
from dlrover.agent.workers.failures import (
    Evidence,
    could_not_start,
    count_oom_kills,
    describe_failure,
    keep_tail,
    last_traceback,
    read_error_file,
)
from dlrover.agent.workers.log_patterns import LogVerdict
from dlrover.agent.workers.process_tree import Exit
from dlrover.protocol.messages.job import MAX_FAILURE_BYTES, FailureKind, Micros, WorkerFailure


def evidence(*, exit_code: int | None = None, number: int | None = None, **changes: Any) -> Evidence:
    ended = Exit(pid=77, exit_code=exit_code, signal=number, has_core=False, at=0.0)
    return Evidence(global_rank=5, local_rank=1, exit=ended, exited_at=Micros(123), **changes)


def traceback_of(line: str) -> str:
    return f'warming up\nTraceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n{line}\nbye\n'


GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17294: Connection reset by peer. GLHF!"


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("ValueError: bad", FailureKind.EXCEPTION),
        ("my.MemoryHog: connection closed by peer", FailureKind.EXCEPTION),
        (f"RuntimeError: {GLOO}", FailureKind.PEER_LOST),
        ("RuntimeError: [pair.cc:1] Connection closed by peer [10.0.0.1]:4", FailureKind.PEER_LOST),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", FailureKind.PEER_LOST),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed", FailureKind.PEER_LOST),
        (
            "torch.distributed.DistNetworkError: Connection was likely closed. Did the server crash?",
            FailureKind.PEER_LOST,
        ),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms", FailureKind.PEER_LOST),
        ("ConnectionRefusedError: [Errno 111] Connection refused", FailureKind.PEER_LOST),
        ("MemoryError", FailureKind.MEMORY_ERROR),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 TiB", FailureKind.MEMORY_ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", FailureKind.MEMORY_ERROR),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", FailureKind.MEMORY_ERROR),
        ("ModuleNotFoundError: No module named 'x'", FailureKind.BAD_SCRIPT),
        ("SyntaxError: invalid syntax", FailureKind.BAD_SCRIPT),
        ("RuntimeError: shape mismatch", FailureKind.EXCEPTION),
        ("ValueError: the docs say MemoryError here", FailureKind.EXCEPTION),
    ],
)
def test_kinds_by_the_exception(last_line: str, expected: FailureKind) -> None:
    failure = describe_failure(evidence(exit_code=1, log_tail=traceback_of(last_line)))
    assert failure.kind is expected
    assert failure.message == last_line
    assert failure.traceback.startswith("Traceback")
    assert failure.traceback.endswith(f"{last_line}\n")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["KeyError: 'lr'"], ("KeyError", "LookupError", "Exception", "BaseException", "object")),
        (["FileNotFoundError: [Errno 2]"], ("FileNotFoundError", "OSError", "Exception", "BaseException", "object")),
        (["torch.distributed.DistNetworkError: no"], ("DistNetworkError",)),
        (["my.package.Failure: no"], ()),
        (["KeyError: 'lr'", "my.Failure"], ()),
        (["OSError: no", "ValueError"], ("OSError", "Exception", "BaseException", "ValueError")),
    ],
)
def test_what_a_traceback_tells_of_the_types(lines: list[str], expected: tuple[str, ...]) -> None:
    """Of one that our own worker entry did not write: torch's `@record`, or a program."""
    between = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text = between.join(
        f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{line}' for line in lines
    )
    failure = describe_failure(evidence(exit_code=1, log_tail=text + "\n"))
    assert failure.exceptions == tuple(name for name in expected if name != "object")


PORT = "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE"


def test_a_taken_port_counts_only_where_the_coordinator_binds() -> None:
    tail = traceback_of(PORT)
    assert describe_failure(evidence(exit_code=1, log_tail=tail, hosts_coordinator=True)).kind is FailureKind.PORT_TAKEN
    assert describe_failure(evidence(exit_code=1, log_tail=tail)).kind is FailureKind.EXCEPTION


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"exit_code": 3}, FailureKind.EXIT_CODE, "exit code 3"),
        ({"exit_code": 86}, FailureKind.PEER_LOST, "exit code 86"),  # a survivor that has told its last step
        ({"number": signal.SIGSEGV}, FailureKind.SIGNAL, "ended by SIGSEGV"),
        ({"number": 41}, FailureKind.SIGNAL, "ended by signal 41"),
        ({"number": signal.SIGKILL}, FailureKind.SIGNAL, "ended by SIGKILL"),
        (
            {"number": signal.SIGKILL, "num_oom_kills": 1},
            FailureKind.OUT_OF_MEMORY,
            "killed by the kernel (SIGKILL): the memory limit of the container was reached",
        ),
        ({"number": signal.SIGSEGV, "num_oom_kills": 1}, FailureKind.SIGNAL, "ended by SIGSEGV"),
        (
            {"number": signal.SIGTERM, "was_signalled": True},
            FailureKind.STOPPED_BY_US,
            "stopped by the agent with SIGTERM",
        ),
        (
            {"number": signal.SIGABRT, "log_tail": "terminate called: Connection reset by peer"},
            FailureKind.PEER_LOST,
            "ended by SIGABRT",
        ),
        (
            {"number": signal.SIGABRT, "log_tail": "what():  std::bad_alloc"},
            FailureKind.MEMORY_ERROR,
            "ended by SIGABRT",
        ),
        (
            {"exit_code": 2, "log_tail": "python: can't open file '/x.py': [Errno 2] No such file or directory\n"},
            FailureKind.BAD_SCRIPT,
            "python: can't open file '/x.py': [Errno 2] No such file or directory",
        ),
        (
            {"exit_code": 1, "log_tail": "/usr/bin/python: No module named pkg\n"},
            FailureKind.BAD_SCRIPT,
            "/usr/bin/python: No module named pkg",
        ),
    ],
)
def test_kinds_by_what_the_kernel_says(changes: dict[str, Any], kind: FailureKind, message: str) -> None:
    failure = describe_failure(evidence(**changes))
    assert (failure.kind, failure.message) == (kind, message)
    assert (failure.global_rank, failure.local_rank, failure.pid, failure.exited_at) == (5, 1, 77, 123)


def test_torchs_error_file_is_preferred_to_the_log(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    details = {"py_callstack": "Traceback…\nKeyError: 'x'\n", "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "KeyError: 'x'", "extraInfo": details}}))
    failure = describe_failure(
        evidence(
            exit_code=1, error_file=str(path), log_tail=traceback_of("ValueError: older"), log_file="/l/stderr.log"
        )
    )
    assert (failure.kind, failure.message) == (FailureKind.EXCEPTION, "KeyError: 'x'")
    assert failure.traceback == details["py_callstack"]
    assert (failure.error_file, failure.log_file) == (str(path), "/l/stderr.log")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"message": 3}', '{"other": 1}', "\x00\xff", '{"message": {}}', "[" * 100_000],
    ids=lambda content: content[:20],
)
def test_a_corrupt_error_file_is_a_failure_without_details(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    failure = describe_failure(evidence(exit_code=1, error_file=str(path)))
    assert (failure.kind, failure.message, failure.traceback) == (FailureKind.EXIT_CODE, "exit code 1", "")


def error_file(message: str) -> str:
    details = {"py_callstack": traceback_of(message), "timestamp": "1"}
    return json.dumps({"message": {"message": message, "extraInfo": details}})


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_an_error_file_that_was_not_finished_does_not_hide_what_the_log_says(tmp_path: Path, part: float) -> None:
    path = tmp_path / "error.json"
    text = error_file("KeyError: 'x'")
    path.write_text(text[: int(part * len(text))])
    tail = "before\n" + traceback_of("KeyError: 'x'")
    failure = describe_failure(evidence(exit_code=1, error_file=str(path), log_tail=tail))
    assert (failure.kind, failure.message) == (FailureKind.EXCEPTION, "KeyError: 'x'")
    assert failure.traceback == last_traceback(tail)


def test_the_cause_is_found_in_a_long_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    keys = " ".join(f"store.layers.{key}.weight" for key in range(20_000))
    path.write_text(error_file(f"RuntimeError: Missing keys: {keys}"))
    failure = describe_failure(evidence(exit_code=1, error_file=str(path), log_tail=keys[-MAX_FAILURE_BYTES:]))
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.message.startswith("RuntimeError: Missing keys: store.layers.0.weight")
    assert "layers.19999.weight" in failure.traceback


def test_an_endless_error_file_does_not_hide_what_the_log_says(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(error_file("RuntimeError: " + "x" * 5_000_000))
    failure = describe_failure(evidence(exit_code=1, error_file=str(path), log_tail=traceback_of("MemoryError")))
    assert (failure.kind, failure.message) == (FailureKind.MEMORY_ERROR, "MemoryError")


def test_an_error_file_with_a_text_only_leaves_the_traceback_to_the_log(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "went wrong", "timestamp": "1"}')
    failure = describe_failure(evidence(exit_code=1, error_file=str(path), log_tail=traceback_of("ValueError: older")))
    assert (failure.kind, failure.message, failure.traceback) == (FailureKind.EXCEPTION, "went wrong", "")


def test_an_error_file_with_a_bare_text(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "went wrong", "timestamp": "1"}')
    recorded = read_error_file(str(path))
    assert recorded is not None
    assert recorded.message == "went wrong"


def test_a_module_that_is_missed_only_after_some_steps_says_nothing_against_the_script() -> None:
    tail = traceback_of("ModuleNotFoundError: No module named 'late'")
    assert describe_failure(evidence(exit_code=1, log_tail=tail, has_stepped=True)).kind is FailureKind.EXCEPTION


def test_chained_tracebacks_stay_together_and_older_ones_are_dropped() -> None:
    chain = (
        'Traceback (most recent call last):\n  File "a", line 1\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a", line 2\nValueError: 2\n'
    )
    text = traceback_of("OldError: 0") + chain + "[W] something else\n"
    assert last_traceback(text) == chain
    assert last_traceback("nothing here") == ""


def test_tracebacks_with_torchs_rank_prefix_are_found() -> None:
    prefixed = "".join(f"[rank3]: {line}\n" for line in traceback_of(f"RuntimeError: {GLOO}").splitlines())
    failure = describe_failure(evidence(exit_code=1, log_tail=prefixed))
    assert (failure.kind, failure.message) == (FailureKind.PEER_LOST, f"RuntimeError: {GLOO}")


def test_an_error_in_the_script_itself_has_no_headline() -> None:
    text = "note\n  File \"/s.py\", line 2\n    x = (1,\n        ^\nSyntaxError: '(' was never closed\n"
    failure = describe_failure(evidence(exit_code=1, log_tail=text))
    assert (failure.kind, failure.message) == (FailureKind.BAD_SCRIPT, "SyntaxError: '(' was never closed")


def test_texts_are_bounded_and_keep_their_tail() -> None:
    long = traceback_of("ValueError: " + "ä" * 200_000)
    failure = describe_failure(evidence(exit_code=1, log_tail=long))
    total = sum(len(text.encode()) for text in (failure.message, failure.traceback, failure.log_tail))
    assert total <= MAX_FAILURE_BYTES
    assert len(failure.message) == 500
    assert failure.log_tail.endswith("bye\n")
    assert keep_tail("xä", 2) == "ä"
    assert keep_tail("xä", 1) == ""


def test_a_worker_that_never_began() -> None:
    failure = could_not_start(global_rank=1, local_rank=0, message="no\nsuch thing", at=Micros(4))
    assert (failure.kind, failure.message, failure.exit_code) == (FailureKind.START_FAILED, "no such thing", None)


@pytest.mark.parametrize(
    ("membership", "file", "content", "expected"),
    [
        ("0::/job\n", "job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("0::/\n", "memory.events", "oom_kill 1\n", 1),
        ("4:memory:/a/b\n0::/\n", "memory/a/b/memory.oom_control", "under_oom 0\noom_kill 4\n", 4),
        ("4:cpu,memory:/docker/x\n", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill 5\n", 5),
        ("4:memory:/a\n", "memory/a/memory.oom_control", "oom_kill_disable 0\n", 0),
        ("", "nothing", "", 0),
    ],
    ids=["v2", "v2 root", "v1", "v1 in a container", "old kernel", "none"],
)
def test_oom_kills_are_counted_in_both_cgroup_versions(
    tmp_path: Path, membership: str, file: str, content: str, expected: int
) -> None:
    (tmp_path / "self").write_text(membership)
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert count_oom_kills(str(tmp_path / "self"), str(tmp_path / "fs")) == expected
    assert count_oom_kills(str(tmp_path / "absent")) == 0


def test_what_the_user_says_of_a_line_counts_before_what_we_know_ourselves(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("well\nXid (PCI:0): 79, pid 1\n")

    def describe(verdict: LogVerdict | None) -> tuple[str, str]:
        found = describe_failure(evidence(exit_code=1, training_log=str(log), pattern_verdict=verdict))
        return found.node_error, found.stop_line

    assert describe(None) == ("Xid (PCI:0): 79, pid 1", "")
    assert describe(LogVerdict(LogAction.RESTART, "Xid")) == ("", "")
    assert describe(LogVerdict(LogAction.ABORT, "tokens")) == ("", "tokens")
    assert describe(LogVerdict(LogAction.RELAUNCH, "well")) == ("well", "")


@pytest.mark.parametrize(
    "word",
    ["store", "store time", "can't open file ", "  File \n", "Xid ", "error code is ", "[rank0]: ", "a.", "Error\n"],
)
def test_no_output_of_a_worker_is_searched_for_longer_than_in_proportion_to_its_length(word: str) -> None:
    """A search whose time grows with the square of a line would take most of an hour for one of these."""
    tail = word * (1_000_000 // len(word))
    assert describe_failure(evidence(exit_code=1, log_tail=tail)).kind is FailureKind.EXIT_CODE
    assert describe_failure(evidence(number=signal.SIGABRT, log_tail=tail)).kind is FailureKind.SIGNAL


HALF = "caf\udce9.png"
"""The name of a file that is no UTF-8, as Python gives it."""


@pytest.mark.parametrize("message", [HALF, {"message": f"ValueError: {HALF}", "extraInfo": {"py_callstack": HALF}}])
def test_half_a_character_in_an_exception_can_be_reported(tmp_path: Path, message: object) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": message}))
    ended = evidence(exit_code=1, error_file=str(path), log_tail=f"loading {HALF}\n", log_file=f"/logs/{HALF}")
    failure = describe_failure(ended)
    assert "caf?.png" in failure.message
    started = could_not_start(global_rank=0, local_rank=0, message=f"cannot run {HALF}", at=Micros(1))
    for each in (failure, started):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=WorkerFailure) == each
