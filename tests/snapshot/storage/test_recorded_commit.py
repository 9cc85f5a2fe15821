"""
Commits as the kernel saw them: every write, sync, rename and removal of real saves is a point where the power may go.

`test_commit` cuts a storage that is written for it. Here the system calls of the real one (direct I/O, renames, exchanges) are recorded with their bytes and played
to the same disk that forgets what was not synced, so that a sync which is missing in the real code cannot hide.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover.snapshot.storage.commit import committed_checkpoints, find_damage, locate
from tests.snapshot.storage.power_cut import Disk, File, _drop, _move, _put, _swap

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,mkdir,rename,renameat2,unlink,rmdir,unlinkat"
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(?P<rest>.*)")
_LINE = re.compile(r"^(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(?:\d+|AT_FDCWD)<([^>]*)>")


class Tape:
    """A disk on which recorded calls are played, one step each."""

    def __init__(self, root: str) -> None:
        self.disk = Disk()
        self._root = root
        self._places: dict[str, int] = {}

    def play(self, call: str, arguments: str, result: int) -> bool:
        """False: it was not about our directory, or changed nothing."""
        texts = [bytes.fromhex(found.replace("\\x", "")) for found in _TEXT.findall(arguments)]
        match = _DESCRIPTOR.match(arguments)
        at = bytes.fromhex(match[1].replace("\\x", "")).decode() if match else ""
        return self._OF[call](self, arguments, texts, at, result)

    def _inside(self, path: str) -> str | None:
        if path == self._root or path.startswith(self._root + "/"):
            return "/ckpt" + path.removeprefix(self._root)
        return None

    def _open(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        path = self._inside(texts[0].decode())
        if path is None or "O_CREAT" not in arguments:
            return False
        directory, name = self.disk._parent(path)
        node = directory.now.get(name)
        if isinstance(node, File):
            assert not node.content or "O_TRUNC" not in arguments, "a file that counts is never opened for overwriting"
            return False
        directory.change(_put(name, File()))
        self._places[path] = 0
        return True

    def _write(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        path = self._inside(at)
        if path is None:
            return False
        explicit = re.search(r", (\d+)$", arguments) if arguments.count(", ") >= 3 else None
        start = int(explicit[1]) if explicit else self._places[path]
        file = self._file(path)
        content = texts[-1][:result]
        file.content = file.content[:start].ljust(start, b"\0") + content + file.content[start + len(content) :]
        self._places[path] = start + len(content)
        return True

    def _truncate(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        path = self._inside(at)
        if path is None:
            return False
        file = self._file(path)
        size = int(arguments.rpartition(", ")[2])
        file.content = file.content[:size].ljust(size, b"\0")
        return True

    def _sync(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        path = self._inside(at)
        if path is None:
            return False
        directory, name = self.disk._parent(path) if path != "/ckpt" else (self.disk.root, "ckpt")
        node = directory.now[name]
        if isinstance(node, File):
            node.durable = node.content
        else:
            node.durable, node.log = dict(node.now), []
        return True

    def _mkdir(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        path = self._inside(texts[0].decode())
        if path is None:
            return False
        self.disk.make_directory(path)
        if path == "/ckpt":  # the directory of all checkpoints is made once, long before
            self.disk.sync(["/"])
        return True

    def _rename(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        source, target = (self._inside(text.decode()) for text in texts[:2])
        if source is None or target is None:
            return False
        directory, name = self.disk._parent(source)
        other, new_name = self.disk._parent(target)
        assert directory is other, "renamed from one directory into another"
        change = _swap if "RENAME_EXCHANGE" in arguments else _move
        directory.change(change(name, new_name))
        return True

    def _unlink(self, arguments: str, texts: list[bytes], at: str, result: int) -> bool:
        name = texts[0].decode()
        path = self._inside(name if name.startswith("/") else f"{at}/{name}")
        if path is None:
            return False
        directory, last = self.disk._parent(path)
        directory.change(_drop(last))
        return True

    def _file(self, path: str) -> File:
        directory, name = self.disk._parent(path)
        file = directory.now[name]
        assert isinstance(file, File)
        return file

    _OF: dict[str, Callable[[Tape, str, list[bytes], str, int], bool]] = {  # noqa: RUF012
        "openat": _open, "write": _write, "pwrite64": _write, "ftruncate": _truncate, "fsync": _sync, "fdatasync": _sync,
        "mkdir": _mkdir, "rename": _rename, "renameat2": _rename, "unlink": _unlink, "rmdir": _unlink, "unlinkat": _unlink,
    }  # fmt: skip


def record(home: Path, tmp_path: Path) -> Iterator[tuple[str, str, int]]:
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-xx", "-s", "4000000", "-e", f"trace={CALLS}", "-o", str(trace)]
    command += [sys.executable, "-m", "tests.snapshot.storage.record_commit", str(home), str(tmp_path / "ckpt")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=100, check=False
    )
    if "ptrace" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("tracing is not allowed here")
    assert done.returncode == 0, done.stderr[-2000:]
    begun: dict[str, str] = {}
    with trace.open() as lines:
        for line in lines:
            pid, _, text = line.partition(" ")
            if text.endswith("<unfinished ...>\n"):  # another thread came in between: it counts when it returns
                begun[pid] = text.removesuffix("<unfinished ...>\n").strip()
                continue
            if resumed := _RESUMED.match(text.strip()):
                text = begun.pop(pid) + resumed["rest"]
            match = _LINE.match(text.strip())
            if match is not None and int(match["result"]) >= 0:
                yield match["call"], match["arguments"], int(match["result"])


def check(disk: Disk, what: str) -> int:
    """The step that the tracker names, whole in every byte; -1 without a tracker."""
    found = locate(disk, "/ckpt")  # type: ignore[arg-type]
    if found is None:
        return -1
    assert find_damage(disk, found) == [], what  # type: ignore[arg-type]
    assert found.path == f"/ckpt/{found.manifest.step}", (
        f"{what}: whoever reads the tracker without us looks nowhere else"
    )
    for checkpoint in committed_checkpoints(disk, "/ckpt"):  # type: ignore[arg-type]
        assert find_damage(disk, checkpoint) == [], what  # type: ignore[arg-type]
    native = disk.read("/ckpt/latest") if any(each.name == "latest" for each in disk.list("/ckpt")) else b""
    assert not native or locate(disk, "/ckpt", int(native)) is not None, what  # type: ignore[arg-type]
    return found.manifest.step


def test_a_cut_after_any_system_call_of_real_saves_leaves_a_whole_checkpoint(home: Path, tmp_path: Path) -> None:
    tape = Tape(str(tmp_path / "ckpt"))
    calls: dict[str, int] = {}
    reached = set()
    durable = -1
    for number, (call, arguments, result) in enumerate(record(home, tmp_path)):
        if not tape.play(call, arguments, result):
            continue
        calls[call] = calls.get(call, 0) + 1
        for fate in (True, False, random.Random(number), random.Random(-number)):
            step = check(tape.disk.after_cut(fate), f"cut after call {number}, {call}, fate {fate}")
            assert step >= durable, f"cut after call {number}, {call}: what was durable is lost"
            reached.add(step)
            durable = step if fate is False else durable
    assert check(tape.disk.after_cut(False), "at the end") == 30
    assert reached == {-1, 10, 20, 30}
    assert calls["pwrite64"] >= 8, calls
    assert calls["fsync"] >= 20, calls
    assert calls["rename"] + calls["renameat2"] >= 15, calls
