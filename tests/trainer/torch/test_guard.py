"""The guard in a process of its own, with a page that the test holds as an agent does."""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.host.shared_page.breath_words import EXIT_LAST_BREATH, BreathAnswer, BreathOrder
from dlrover.protocol.local_frames import receive_frame
from dlrover.protocol.messages.job import WorkerMessage
from dlrover.protocol.progress_page import DEATH_NOTICE_AT, ProgressPage

DEADLINE = 120.0

SCRIPT = """
    import os, sys, threading
    import torch
    import torch.distributed as dist
    import dlrover
    from dlrover.host.shared_page.breath_page import BreathPage
    from dlrover.protocol.progress_page import DEATH_NOTICE_AT
    from dlrover.trainer.torch.resilience.meeting import Meeting
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    folder, conduct = sys.argv[1:]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    if conduct == "meets":  # as if the state were cut, and the test the second worker
        Meeting.open = lambda own, models: Meeting(own, [BreathPage.open(os.environ["PEER"], DEATH_NOTICE_AT)])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = DdpCheckpointer(folder)

    def train_step(step):
        if conduct == "raises" and step == 3:
            print("raising", flush=True)
            sys.stdin.readline()
            raise ValueError("mine")
        if conduct == "steps, then breaks" and step == 3:
            optimizer.step()
        if conduct.endswith("breaks") and step == 3:
            print("broken", flush=True)
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()

    if conduct != "has no guard":
        train_step = dlrover.resilient(model, optimizer)(train_step)
    for step in range(1, 5):
        train_step(step)
        if step == 2 and conduct != "never saves":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if conduct == "saves more":
                state["epoch"] = 7
            number = 20 if conduct == "counts otherwise" else step
            checkpointer.save_checkpoint(number, state, storage_type=StorageType.MEMORY)
        print("done", step, flush=True)
        if conduct == "waits" and step == 3:
            sys.stdin.readline()
    checkpointer.close()
    print("threads", sorted(thread.name for thread in threading.enumerate()))
    """


class Worker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.socket = folder / "agent"
        """Nobody listens there, but in the test of what is said."""
        self._progress = ProgressPage()
        self.page = BreathPage(self._progress.descriptor, DEATH_NOTICE_AT)
        self._peer_progress = ProgressPage()
        self.peer = BreathPage(self._peer_progress.descriptor, DEATH_NOTICE_AT)
        self.process: subprocess.Popen[str] | None = None

    def start(self, conduct: str) -> subprocess.Popen[str]:
        environ = {
            "PATH": "/usr/bin:/bin",
            "DLROVER_AGENT_SOCKET": str(self.socket),
            "DLROVER_PROGRESS_PAGE": self._progress.path,
            "PEER": self._peer_progress.path,
            "DLROVER_SNAPSHOT_HOME": str(self._folder / "home" / "node-0"),
            "OMP_NUM_THREADS": "1",
        }
        (self._folder / "home").mkdir(mode=0o700)
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(self._folder / "checkpoints"), conduct]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environ, text=True, **pipes)
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            with self.process:
                self.process.communicate()
        for page, progress in ((self.page, self._progress), (self.peer, self._peer_progress)):
            page.close()
            progress.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.close()


class Listener:
    """Hears all that a worker says to its agent, and answers nothing."""

    def __init__(self, path: Path) -> None:
        self.heard: list[type] = []
        self._decode = msgspec.msgpack.Decoder(WorkerMessage).decode
        self._server = socketserver.ThreadingUnixStreamServer(str(path), self._listen)  # type: ignore[arg-type]
        self._server.daemon_threads = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}).start()

    def _listen(self, connection: socket.socket, *_details: object) -> None:
        while frame := receive_frame(connection):
            self.heard.append(type(self._decode(frame[0])))

    def end(self) -> list[str]:
        """After the worker: kinds of its messages, in the order of their names."""
        self._server.shutdown()
        self._server.server_close()
        return sorted(each.__name__ for each in self.heard)


def lines_until(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return
    raise AssertionError(f"it ended before {wanted!r}: {process.stderr.read() if process.stderr else ''}")


def test_a_step_that_breaks_is_undone_and_the_one_before_is_offered_and_saved(worker: Worker) -> None:
    process = worker.start("breaks")
    lines_until(process, "broken")
    assert worker.page.is_guarded
    worker.page.order = BreathOrder.OFFER
    assert worker.page.wait_for_answer(BreathAnswer.NONE, DEADLINE) is BreathAnswer.OFFERED
    step, _digest, piece, can_finish = worker.page.offer
    assert (step, piece, can_finish) == (2, None, False)
    worker.page.order = BreathOrder.SAVE
    assert worker.page.wait_for_answer(BreathAnswer.OFFERED, DEADLINE) is BreathAnswer.SAVED
    assert process.wait(DEADLINE) == EXIT_LAST_BREATH


def start_and_wait_in_the_third_step(worker: Worker) -> subprocess.Popen[str]:
    process = worker.start("meets")
    worker.peer.num_ready = 2
    lines_until(process, "done 2")
    worker.page.wait_while_ready(2, DEADLINE)
    worker.page.order = BreathOrder.OFFER
    assert worker.page.wait_for_answer(BreathAnswer.NONE, DEADLINE) is BreathAnswer.OFFERED
    step, _digest, _piece, can_finish = worker.page.offer
    assert (step, can_finish, worker.page.num_ready) == (2, True, 3)
    return process


def test_a_worker_that_waits_for_the_others_finishes_its_step_if_the_agent_wants_it(worker: Worker) -> None:
    process = start_and_wait_in_the_third_step(worker)
    before = worker.page.offer
    worker.page.order = BreathOrder.FINISH
    assert worker.page.wait_for_answer(BreathAnswer.OFFERED, DEADLINE) is BreathAnswer.FINISHED
    step, digest, _piece, can_finish = worker.page.offer
    assert (step, can_finish) == (3, False)
    assert digest != before[1]
    worker.page.order = BreathOrder.SAVE
    assert worker.page.wait_for_answer(BreathAnswer.FINISHED, DEADLINE) is BreathAnswer.SAVED
    assert process.wait(DEADLINE) == EXIT_LAST_BREATH


def test_a_worker_that_waits_for_the_others_saves_the_step_before_if_the_agent_wants_that(worker: Worker) -> None:
    process = start_and_wait_in_the_third_step(worker)
    worker.page.order = BreathOrder.SAVE
    assert worker.page.wait_for_answer(BreathAnswer.OFFERED, DEADLINE) is BreathAnswer.SAVED
    assert process.wait(DEADLINE) == EXIT_LAST_BREATH


def test_an_order_between_two_steps_is_heard_before_the_next_one(worker: Worker) -> None:
    process = worker.start("waits")
    lines_until(process, "done 3")
    worker.page.order = BreathOrder.OFFER
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert worker.page.wait_for_answer(BreathAnswer.NONE, DEADLINE) is BreathAnswer.OFFERED
    assert worker.page.offer[0] == 3
    worker.page.order = BreathOrder.LEAVE
    assert process.wait(DEADLINE) == EXIT_LAST_BREATH


def test_an_optimizer_that_stepped_in_the_broken_step_is_a_doubt(worker: Worker) -> None:
    process = worker.start("steps, then breaks")
    lines_until(process, "broken")
    worker.page.order = BreathOrder.OFFER
    assert worker.page.wait_for_answer(BreathAnswer.NONE, DEADLINE) is BreathAnswer.REFUSED
    assert process.wait(DEADLINE) == EXIT_LAST_BREATH


def test_an_error_of_the_script_is_raised_whatever_the_agent_wants(worker: Worker) -> None:
    process = worker.start("raises")
    lines_until(process, "raising")
    worker.page.order = BreathOrder.OFFER
    _out, err = process.communicate("go\n", timeout=DEADLINE)
    assert process.returncode == 1
    assert "ValueError: mine" in err
    assert worker.page.answer is BreathAnswer.NONE


@pytest.mark.parametrize("conduct", ["never saves", "saves more", "counts otherwise"])
def test_a_guard_that_could_save_nothing_is_not_announced_and_the_script_goes_on(worker: Worker, conduct: str) -> None:
    process = worker.start(conduct)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "done 4" in out
    assert not worker.page.is_guarded


def test_neither_a_script_without_a_guard_nor_one_with_it_says_more_to_its_agent(tmp_path: Path) -> None:
    heard, threads = {}, {}
    for conduct in ("has no guard", "good"):
        (tmp_path / conduct).mkdir()
        worker = Worker(tmp_path / conduct)
        worker.socket = tmp_path / f"{len(heard)}.sock"
        listener = Listener(worker.socket)
        try:
            process = worker.start(conduct)
            out, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, err
            assert worker.page.is_guarded == (conduct == "good")
            assert worker.page.answer is BreathAnswer.NONE
            assert worker.page.num_ready == 0
        finally:
            heard[conduct] = listener.end()
            worker.close()
        threads[conduct] = "last breath" in out
    assert "SnapshotSaved" in heard["good"]
    assert heard["has no guard"] == heard["good"]
    assert threads == {"has no guard": False, "good": True}
