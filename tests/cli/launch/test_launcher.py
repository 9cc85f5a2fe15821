"""The launcher with real processes: who is started again, who is told to stop, and that nothing remains."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time

import pytest

from tests.cli.conftest import DEADLINE, StandinJob, is_alive


def test_a_job_that_ends_well_gives_zero_and_leaves_nothing(job: StandinJob) -> None:
    job.start(behaviour="ok")
    _, is_session_leader, signals = job.event("agent")
    assert is_session_leader == "True"
    assert signals == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert job.finish() == (0, "")
    assert job.files_left() == []


@pytest.mark.parametrize(("option", "expected"), [("one", 1), ("worker", 7)])
def test_a_failed_job_is_reported_and_gives_the_exit_code_asked_for(
    job: StandinJob, option: str, expected: int
) -> None:
    job.start("--exit-code", option, behaviour="fail")
    exit_code, said = job.finish()
    assert exit_code == expected
    assert "worker 3 had enough" in said
    assert "global rank 3, exit code 7" in said
    assert job.files_left() == []


def test_a_killed_master_comes_back_at_once_on_the_same_port_and_journal(job: StandinJob) -> None:
    """Twenty times, as fast as they come."""
    job.start(behaviour="wait")
    job.event("waiting")
    pid, port, journal = job.event("master")
    for _ in range(20):
        os.kill(int(pid), signal.SIGKILL)
        pid, next_port, next_journal = job.event("master")
        assert (next_port, next_journal) == (port, journal)
    job.open_gate()
    exit_code, said = job.finish()
    assert exit_code == 0
    assert said.count("the master ended (killed by SIGKILL)") == 20
    assert not is_alive(int(pid))
    assert job.files_left() == []


def test_a_master_that_refuses_its_configuration_ends_the_job_with_its_words(job: StandinJob) -> None:
    process = job.start(behaviour="wait", STANDIN_MASTER="refuse")
    exit_code, said = job.finish()
    assert exit_code == 2, "a plug-in that does not exist is a mistake on the command line"
    assert "could not start (exit code 2)" in said
    assert "nonsense" in said
    assert process.returncode == 2
    assert job.files_left() == []


def test_a_free_port_that_was_taken_after_all_is_replaced_for_both(job: StandinJob) -> None:
    job.start(behaviour="wait", STANDIN_MASTER="port-in-use-once")
    [first_port] = job.event("master-port")
    _, port, _ = job.event("master")
    assert port != first_port
    address = f"127.0.0.1:{port}"
    while job.event("waiting") != [address]:
        pass
    job.open_gate()
    assert job.finish()[0] == 0


def test_an_agent_that_is_killed_is_started_again_and_its_orphans_are_swept(job: StandinJob) -> None:
    job.start(behaviour="crash-once")
    first, *_ = job.event("agent")
    [orphan] = job.event("orphan")
    second, *_ = job.event("agent")
    assert first != second
    assert not is_alive(int(orphan))
    exit_code, said = job.finish()
    assert exit_code == 0
    assert "the agent ended (killed by SIGKILL)" in said


@pytest.mark.parametrize("session", ["", "setsid "])
def test_a_process_that_was_there_before_outlives_crashes_and_the_job(job: StandinJob, session: str) -> None:
    """`helper & exec dlrover-run`: it is a child of the launcher, and no part of the job."""
    helper = f"{session}sleep 300 >/dev/null 2>&1 & echo helper $! >$STANDIN_EVENTS"
    job.start(behaviour="crash-once", shell=helper)
    [neighbour] = job.event("helper")
    try:
        [orphan] = job.event("orphan")
        assert job.finish()[0] == 0
        assert is_alive(int(neighbour))
        assert not is_alive(int(orphan))
    finally:
        os.kill(int(neighbour), signal.SIGKILL)


def test_an_agent_that_cannot_be_started_again_at_once_is_started_later(job: StandinJob) -> None:
    job.start(behaviour="wait")
    agent, *_ = job.event("agent")
    job.event("waiting")
    obstacle = job.spoil("agent.json")
    os.kill(int(agent), signal.SIGKILL)
    job.says("the agent cannot start now")
    obstacle.rmdir()
    job.event("waiting")
    job.open_gate()
    assert job.finish()[0] == 0
    assert job.files_left() == []


def test_an_agent_that_cannot_be_started_again_at_all_is_a_failure_and_no_wrong_use(job: StandinJob) -> None:
    job.start(behaviour="wait", STANDIN_RESTART_PATIENCE="0.3")
    agent, *_ = job.event("agent")
    job.event("waiting")
    job.spoil("agent.json")
    os.kill(int(agent), signal.SIGKILL)
    exit_code, said = job.finish()
    assert exit_code == 1
    assert "The agent could not start within 0 s" in said
    assert job.files_left() == []


def test_a_signal_ends_a_launcher_that_cannot_start_its_agent(job: StandinJob) -> None:
    process = job.start(behaviour="wait")
    agent, *_ = job.event("agent")
    job.event("waiting")
    job.spoil("agent.json")
    os.kill(int(agent), signal.SIGKILL)
    job.says("the agent cannot start now")
    process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
    assert job.files_left() == []


def test_the_end_of_the_job_ends_a_launcher_that_cannot_start_its_agent(job: StandinJob) -> None:
    job.start(behaviour="wait", STANDIN_MASTER="end-at-gate")
    agent, *_ = job.event("agent")
    job.event("waiting")
    job.event("master")
    job.spoil("agent.json")
    os.kill(int(agent), signal.SIGKILL)
    job.says("the agent cannot start now")
    job.open_gate()
    assert job.finish()[0] == 0
    assert job.files_left() == []


def test_a_master_that_cannot_be_started_again_at_once_is_started_later(job: StandinJob) -> None:
    job.start(behaviour="wait")
    job.event("waiting")
    master, *_ = job.event("master")
    obstacle = job.spoil("master.json")
    os.kill(int(master), signal.SIGKILL)
    job.says("the master cannot start now")
    obstacle.rmdir()
    job.event("master")
    job.open_gate()
    assert job.finish()[0] == 0
    assert job.files_left() == []


def test_an_agent_that_always_crashes_is_given_up(job: StandinJob) -> None:
    job.start(behaviour="crash")
    for _ in range(4):
        job.event("agent")
    exit_code, said = job.finish()
    assert exit_code == 1
    assert "ended 4 times in a row without a result" in said
    assert job.files_left() == []


def test_orphans_that_changed_their_session_end_with_the_job(job: StandinJob) -> None:
    job.start(behaviour="orphan")
    [orphan] = job.event("orphan")
    assert job.finish()[0] == 0
    assert not is_alive(int(orphan))


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_stops_the_agent_in_good_order(job: StandinJob, number: int, expected: int) -> None:
    process = job.start(behaviour="wait")
    agent, *_ = job.event("agent")
    job.event("waiting")
    process.send_signal(number)
    job.event("stopped")
    assert job.finish()[0] == expected
    assert not is_alive(int(agent))
    assert job.files_left() == []


def test_an_agent_that_does_not_know_the_signal_yet_gets_one_that_it_knows(job: StandinJob) -> None:
    """What was asked for with --signals-to-handle may end it without a word, stop it, or go unnoticed."""
    process = job.start("--signals-to-handle=SIGTERM,SIGUSR1", behaviour="wait")
    job.event("waiting")
    process.send_signal(signal.SIGUSR1)
    job.event("stopped")
    assert job.finish()[0] == 128 + signal.SIGUSR1
    assert job.files_left() == []


def test_an_interrupt_in_the_first_moments_ends_the_job_without_a_traceback(job: StandinJob) -> None:
    """The agent still imports, and Python has a handler of its own for Ctrl-C."""
    process = job.start(behaviour="newborn")
    job.event("waiting")
    process.send_signal(signal.SIGINT)
    exit_code, errors = job.finish()
    assert exit_code == 130
    (line,) = errors.splitlines()
    assert " was interrupted. " in line
    assert job.files_left() == []


def test_a_second_interrupt_kills_an_agent_that_does_not_listen(job: StandinJob) -> None:
    process = job.start(behaviour="stubborn")
    agent, *_ = job.event("agent")
    job.event("waiting")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    exit_code, _ = job.finish()
    assert exit_code in (130, 143)  # two signals that are pending together arrive in the kernel's order
    assert not is_alive(int(agent))
    assert job.files_left() == []


def test_an_agent_that_does_not_listen_is_killed_after_its_time(job: StandinJob) -> None:
    process = job.start("--shutdown-timeout", "0", behaviour="stubborn")
    agent, *_ = job.event("agent")
    job.event("waiting")
    process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
    assert not is_alive(int(agent))


def test_an_agent_that_still_writes_a_checkpoint_gets_the_time_it_named(job: StandinJob) -> None:
    process = job.start("--shutdown-timeout", "0", behaviour="stubborn")
    job.event("agent")
    job.event("waiting")
    [config] = job.runtime.rglob("agent.json")
    until = time.monotonic() + 1.5
    (config.parent / "saving").write_text(f"{until:.3f}")
    process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
    assert time.monotonic() >= until


def test_signals_that_are_not_asked_for_keep_their_meaning(job: StandinJob) -> None:
    process = job.start("--signals-to-handle", "SIGUSR1", behaviour="wait")
    job.event("waiting")
    process.send_signal(signal.SIGUSR1)
    job.event("stopped")
    assert job.finish()[0] == 128 + signal.SIGUSR1


def test_the_journal_is_kept_where_it_was_asked_for(job: StandinJob) -> None:
    directory = job.tmp_path / "journals"
    job.start("--journal", str(directory), "--rdzv-id", "my-job", behaviour="wait")
    job.event("waiting")
    _, _, journal = job.event("master")
    job.open_gate()
    assert job.finish()[0] == 0
    assert os.path.dirname(journal) == str(directory)
    assert os.path.basename(journal).startswith("my-job-")


def test_a_master_elsewhere_that_never_answers_ends_the_wait_with_what_to_check(job: StandinJob) -> None:
    job.start("--nnodes=2", "--rdzv-endpoint=192.0.2.1:29400", "--rdzv-id=x", behaviour="wait")
    exit_code, said = job.finish()
    assert exit_code == 23
    assert "No master answered at 192.0.2.1:29400" in said
    assert job.files_left() == []


def test_a_master_whose_name_nobody_knows_is_told_in_the_resolvers_words(job: StandinJob) -> None:
    """spec 05 §3: `Name or service not known`, or what this machine's resolver says instead."""
    with pytest.raises(socket.gaierror) as unknown:
        socket.create_connection(("no-such-host.invalid", 29400), timeout=1.0)
    job.start("--nnodes=2", "--rdzv-endpoint=no-such-host.invalid:29400", "--rdzv-id=x", behaviour="wait")
    exit_code, said = job.finish()
    assert exit_code == 23
    assert unknown.value.strerror
    assert f"s ({unknown.value.strerror}). This host" in said


def test_two_launchers_on_one_host_share_one_master_and_its_token(job: StandinJob, reserved_port: int) -> None:
    """The second sees that the seat is taken, and waits for its master."""
    endpoint = ["--nnodes=1:2", f"--rdzv-endpoint=localhost:{reserved_port}"]
    first = job.start(*endpoint, behaviour="wait")
    job.event("waiting")
    assert job.event("master")[1] == str(reserved_port)
    second = job.start(*endpoint, behaviour="ok", STANDIN_FIND_MASTER="60")  # which this one does not look for
    _, said = second.communicate(timeout=DEADLINE)
    assert (second.returncode, said) == (0, "")
    assert (job.tmp_path / "master-lives").stat().st_size == 1
    job.process = first
    job.open_gate()
    first.send_signal(signal.SIGTERM)
    assert job.finish()[0] in (0, 143)
    assert job.files_left() == []


def test_a_launcher_whose_node_was_scaled_away_stays_for_the_master_of_the_others(
    job: StandinJob, reserved_port: int
) -> None:
    job.start(
        "--nnodes=1:2",
        f"--rdzv-endpoint=localhost:{reserved_port}",
        behaviour="dismissed",
        STANDIN_MASTER="end-at-gate",
    )
    agent, *_ = job.event("agent")
    master, *_ = job.event("master")
    wait_for_end(int(agent))
    assert is_alive(int(master))
    job.open_gate()
    exit_code, said = job.finish()
    assert exit_code == 0
    assert "it hosts the master for the other nodes" in said
    assert not is_alive(int(master))
    assert job.files_left() == []


def test_such_a_launcher_still_listens_to_signals(job: StandinJob, reserved_port: int) -> None:
    process = job.start("--nnodes=1:2", f"--rdzv-endpoint=localhost:{reserved_port}", behaviour="dismissed")
    agent, *_ = job.event("agent")
    job.event("master")
    wait_for_end(int(agent))
    process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == 143
    assert job.files_left() == []


def test_a_node_without_a_place_says_so_without_a_report_of_failure(job: StandinJob) -> None:
    job.start(behaviour="pended")
    exit_code, said = job.finish()
    assert exit_code == 22
    assert "no room" in said
    assert "failed" not in said


def wait_for_end(pid: int) -> None:
    """Gone, not only a zombie: then the launcher has seen its end."""
    until = time.monotonic() + DEADLINE
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, "the agent did not end"
        select.select([], [], [], 0.01)


def test_closed_standard_descriptors_are_replaced_for_us_and_our_children(job: StandinJob) -> None:
    """`dlrover-run ... <&- >&- 2>&-`: else the first socket of a child gets their numbers."""
    job.start(behaviour="descriptors", shell="exec <&- >&- 2>&-")
    assert job.event("descriptors") == ["/dev/null"] * 3
    assert job.finish()[0] == 0


def test_agent_and_master_are_started_again_and_signals_heard_while_nobody_reads_the_console(job: StandinJob) -> None:
    process = job.start(behaviour="wait")
    agent, *_ = job.event("agent")
    job.event("waiting")
    master, *_ = job.event("master")
    fill_console(process.pid)
    os.kill(int(master), signal.SIGKILL)
    job.event("master")
    os.kill(int(agent), signal.SIGKILL)
    job.event("waiting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 143
    assert set(job.finish()[1]) == {"."}
    assert job.files_left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_launcher_whose_report_nobody_reads(job: StandinJob, number: int) -> None:
    process = job.start(behaviour="wait-and-fail")
    agent, *_ = job.event("agent")
    job.event("waiting")
    fill_console(process.pid)
    job.open_gate()
    wait_for_end(int(agent))
    # Again, because the agent is gone before the report begins; not at once, because an interpreter that ends has no handlers.
    for _ in range(6):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break
    else:
        raise AssertionError("the signal went unheard")
    assert job.finish()[0] == 7
    assert job.files_left() == []


def test_a_report_waits_for_a_console_that_is_read_late(job: StandinJob) -> None:
    process = job.start(behaviour="wait-and-fail")
    agent, *_ = job.event("agent")
    job.event("waiting")
    fill_console(process.pid)
    job.open_gate()
    wait_for_end(int(agent))
    exit_code, said = job.finish()
    assert exit_code == 7
    assert "worker 3 had enough" in said


def fill_console(pid: int) -> None:
    """Until it takes nothing more, and nobody reads it."""
    console = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(console, b"." * 4096)
    os.close(console)


def test_what_is_said_to_a_closed_terminal_changes_nothing(job: StandinJob) -> None:
    job.start("--exit-code=worker", behaviour="fail", shell="exec <&- >&- 2>&-")
    assert job.finish() == (7, "")
    assert job.files_left() == []


def test_a_full_disk_is_one_clear_sentence_and_leaves_nothing(job: StandinJob) -> None:
    """A limit on the size of files fails the same writes as a full disk."""
    job.start(behaviour="ok", shell="ulimit -f 0")
    exit_code, said = job.finish()
    assert exit_code == 2
    assert len(said.splitlines()) == 1
    assert str(job.runtime) in said
    assert "TMPDIR" in said
    assert job.files_left() == []


def test_a_runtime_directory_that_vanished_does_not_change_the_exit_code(job: StandinJob) -> None:
    job.start(behaviour="ok", STANDIN_MASTER="log-out")
    assert job.finish() == (0, "")


def test_trouble_at_clearing_up_does_not_change_the_exit_code(job: StandinJob) -> None:
    job.start("--exit-code=worker", behaviour="fail", STANDIN_SWEEP="fail")
    exit_code, said = job.finish()
    assert exit_code == 7
    assert "Too many open files" in said
    assert "Traceback" not in said
    assert job.files_left() == []
