"""Locks, queues, dictionaries and memory that processes share by name, as scripts of the original use them."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import numpy
import pytest

from dlrover.compat.client import shared_objects
from dlrover.compat.client.shared_objects import (
    SharedDict,
    SharedLock,
    SharedMemory,
    SharedObjectFailed,
    SharedQueue,
    SocketResponse,
    clear_sock_dir,
    create_shared_memory,
    retry_socket,
)

HOLDER = """
import sys
import tempfile
from dlrover.compat.client import shared_objects
shared_objects.SOCKET_TMP_DIR = sys.argv[1]
lock = shared_objects.SharedLock("l")
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """Sockets have short names, and pytest's own folders long ones."""
    with tempfile.TemporaryDirectory(prefix="dlrover-") as folder:
        monkeypatch.setattr(shared_objects, "SOCKET_TMP_DIR", f"{folder}/s")
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        yield Path(folder) / "s"


@pytest.fixture
def pair():
    """Makes a server and two clients of one object; ends them all."""
    made = []

    def make(kind, name="l", **options):
        made.extend([kind(name, create=True, **options), kind(name, create=False), kind(name, create=False)])
        return made[-3:]

    yield make
    for each in reversed(made):
        each.close()


def test_a_lock_is_released_only_by_its_holder(pair):
    server, one, other = pair(SharedLock)
    assert one.acquire()
    assert server.locked()
    assert not other.acquire(blocking=False)
    assert not other.release()
    assert not server.release()
    assert one.locked()
    assert one.release()
    assert other.acquire(timeout=5)


def test_waiting_for_a_lock_ends_when_it_is_free(pair):
    server, one, other = pair(SharedLock)
    assert server.acquire()
    got = []
    waiter = threading.Thread(target=lambda: got.append(one.acquire(timeout=20)))
    waiter.start()
    assert not other.acquire(timeout=0.05)
    server.release()
    waiter.join(20)
    assert got == [True]


def test_a_killed_holder_loses_the_lock(pair, place):
    server, one, _ = pair(SharedLock)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "True"
        assert server.locked()
        holder.kill()
        assert one.acquire(timeout=20)
    finally:
        holder.kill()
        holder.communicate(timeout=20)


def test_a_client_reads_the_answer_from_an_attribute_too(pair):
    server, one, other = pair(SharedLock, owner="trainer 0")
    assert (one.locked().locked, bool(one.locked()), server.locked()) == (False, False, False)
    assert one.acquire()
    for asker in (one, other):
        assert isinstance(asker.locked(), SocketResponse)
        assert (asker.locked().locked, asker.locked().status, bool(asker.locked())) == (True, "OK", True)
    assert server.locked() is True


@pytest.fixture
def hangs_up(place):
    """A server of that name that ends every connection at once."""
    place.mkdir(mode=0o700)

    def serve(name):
        listener.bind(str(place / f"{name}.sock"))
        listener.listen(8)
        thread.start()

    def end_each():
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    listener, thread = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), threading.Thread(target=end_each)
    yield serve
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(20)


def test_a_lock_whose_server_does_not_answer_is_not_acquired(hangs_up, caplog):
    hangs_up("sharedlock_l")
    lock = SharedLock("l")
    assert lock.acquire() is False
    assert "the lock l was not acquired" in caplog.text
    lock.close()


@pytest.mark.parametrize("retry", [0, 1])
def test_a_call_is_tried_again_as_often_as_its_argument_says(retry):
    tried = []

    class Asking:
        @retry_socket
        def ask(self, what, retry):
            tried.append((what, retry))
            raise FileNotFoundError(what)

    with pytest.raises(FileNotFoundError, match="socket"):
        Asking().ask("socket", retry=retry)
    assert tried == [("socket", retry)] * (1 + retry)


def test_a_call_that_succeeds_later_is_not_tried_again():
    answers = [ConnectionRefusedError(), 7]

    @retry_socket
    def ask():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert ask() == 7


def test_a_queue_keeps_the_order_and_its_size(pair):
    server, one, other = pair(SharedQueue, maxsize=2)
    one.put({"step": 1, "paths": {"a": "b"}})
    other.put([2])
    for side in (one, server):
        with pytest.raises(queue.Full):
            side.put(3, timeout=0.05)
    assert (one.qsize(), one.empty()) == (2, False)
    assert server.get() == {"step": 1, "paths": {"a": "b"}}
    assert one.get() == [2]
    assert one.get(block=False) is None
    with pytest.raises(queue.Empty):
        server.get(block=False)
    assert server.empty()


def test_a_dictionary_is_never_older_than_the_last_set(pair):
    server, one, other = pair(SharedDict)
    one.set({"step": 5, 7: [1.5, None]})
    assert server.get() == other.get() == {"step": 5, 7: [1.5, None]}
    server.set({"step": 6})
    assert one.get(local=True)["step"] == 5
    assert one.get() == {"step": 6}


def test_only_plain_data_is_shared_and_nothing_is_unpickled(pair):
    _server, one, _ = pair(SharedDict)
    with pytest.raises(SharedObjectFailed, match="only plain data"):
        one.set({"thing": object()})
    with pytest.raises(RuntimeError):  # what a script of the original catches
        one.set({"thing": object()})
    one.set({"fine": 1})
    assert one.get() == {"fine": 1}


def test_a_client_keeps_what_it_has_when_the_server_cannot_send_its_own(pair, caplog):
    server, one, other = pair(SharedDict)
    one.set({"fine": 1})
    server.set({"thing": object()})
    assert one.get() == {"fine": 1}
    assert other.get() == {}
    assert "may be out of date" in caplog.text
    server.set({"fine": 2})
    assert one.get() == {"fine": 2}


def test_nonsense_on_the_socket_harms_nobody(pair, place):
    _server, one, _ = pair(SharedQueue)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(place / "sharedqueue_l.sock"))
        stranger.sendall(b"\xff\xff\xff\xffgarbage")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    one.put(1)
    assert one.get() == 1


def test_sockets_are_private_and_long_names_work(pair, place, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run/" + "x" * 200)
    server, one, _ = pair(SharedDict, "ckpt_meta_0")
    one.set({"a": 1})
    assert server.get() == {"a": 1}
    assert place.stat().st_mode & 0o077 == 0
    clear_sock_dir()
    assert list(place.iterdir()) == []


def test_a_client_finds_a_server_that_was_started_anew(pair):
    server, one, _ = pair(SharedQueue)
    one.put(1)
    server.close()
    again = SharedQueue("l", create=True)
    try:
        one.put(2)
        assert again.get() == 2
    finally:
        again.close()


def test_shared_memory_stays_until_it_is_unlinked():
    name = f"dlrover-test-{uuid.uuid4().hex}"
    memory = SharedMemory(name, create=True, size=100)
    try:
        memory.buf[:3] = b"abc"
        code = f"from dlrover.compat.client.shared_objects import SharedMemory; m = SharedMemory({name!r}); print(bytes(m.buf[:3])); m.close()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
        assert done.stdout.strip() == "b'abc'"
        assert os.path.exists(f"/dev/shm/{name}")
        with pytest.raises(FileExistsError):
            SharedMemory(name, create=True, size=100)
        same = create_shared_memory(name, True, 100)
        assert bytes(same.buf[:3]) == b"abc"
        same.close()
        other = create_shared_memory(name, True, 200)
        assert (other.size, bytes(other.buf[:3]), bytes(memory.buf[:3])) == (200, b"\0\0\0", b"abc")
        other.close()
    finally:
        memory.close()
        memory.unlink()
        memory.unlink()
    assert create_shared_memory(name, False) is None
    assert create_shared_memory(name, True, 0) is None


def test_a_view_outlives_the_close_of_its_memory():
    memory = SharedMemory(create=True, size=100)
    try:
        array = numpy.frombuffer(memory.buf, dtype=numpy.uint8)
        memory.buf[5] = 7
        memory.close()
        assert array[5] == 7
    finally:
        memory.close()
        memory.unlink()


def test_memory_to_open_needs_a_name():
    with pytest.raises(ValueError, match="name can only be None"):
        SharedMemory()


@pytest.mark.parametrize(("create", "size"), [(True, 0), (True, -1), (False, -1)])
def test_impossible_sizes_are_refused(create, size):
    with pytest.raises(ValueError, match="cannot have a size"):
        SharedMemory("dlrover-test-none", create=create, size=size)
