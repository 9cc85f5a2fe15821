from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEADLINE = 60.0
STANDINS = Path(__file__).parent / "standins"


class StandinJob:
    """A launcher whose agent and master are stand-ins. They tell what they do through a pipe."""

    def __init__(self, tmp_path: Path, runtime: Path) -> None:
        self.tmp_path = tmp_path
        self.runtime = runtime
        self.script = tmp_path / "train.py"
        self.script.touch()
        self.events = tmp_path / "events"
        self.gate = tmp_path / "gate"
        os.mkfifo(self.events)
        os.mkfifo(self.gate)
        # Read and write: the pipe never ends, whoever comes and goes.
        self._reader = os.open(self.events, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._unread: list[list[str]] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self, *args: str, behaviour: str, shell: str = "", **environ: str) -> subprocess.Popen[str]:
        """
        `shell` is what a shell does to itself before it becomes the launcher. Not a function of ours between fork and exec: this process has
        threads, and a fork of it may find their locks taken for ever.
        """
        launch = [sys.executable, str(STANDINS / "launch.py"), *args, str(self.script), behaviour]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'{shell}; exec "$@"', "sh", *launch] if shell else launch,
            env={
                **kept,
                "TMPDIR": str(self.runtime),
                "STANDIN_EVENTS": str(self.events),
                "STANDIN_GATE": str(self.gate),
                **environ,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def event(self, kind: str) -> list[str]:
        """The next event of this kind; others keep their turn."""
        until = time.monotonic() + DEADLINE
        while True:
            for position, words in enumerate(self._unread):
                if words[0] == kind:
                    return self._unread.pop(position)[1:]
            assert select.select([self._reader], [], [], max(0.0, until - time.monotonic()))[0], f"no event {kind}"
            *lines, self._rest = (self._rest + os.read(self._reader, 4096)).split(b"\n")
            self._unread += [line.decode().split() for line in lines]

    def spoil(self, name: str) -> Path:
        """Have the launcher fail to write this file, as on a full disk, until what stands in its way is removed."""
        [path] = self.runtime.rglob(name)
        path.unlink()
        path.mkdir()
        return path

    def says(self, words: str) -> None:
        """Until the launcher has said that."""
        assert self.process is not None
        until_said(self.process, words)

    def finish(self) -> tuple[int, str]:
        """Exit code and what was said."""
        assert self.process is not None
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors

    def open_gate(self) -> None:
        with open(self.gate, "w", encoding="utf-8"):
            pass

    def files_left(self) -> list[str]:
        return [str(path) for path in self.runtime.rglob("*") if path.name not in (".lock", f"dlrover-{os.getuid()}")]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=5)
            self.process.kill()
            self.process.communicate()
        os.close(self._reader)  # last: whoever opens a pipe without a reader waits


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own directories are too deep for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="dlr-") as path:
        yield Path(path)


@pytest.fixture
def job(tmp_path: Path, short_dir: Path) -> Iterator[StandinJob]:
    standin = StandinJob(tmp_path, short_dir)
    yield standin
    standin.close()


def until_said(process: subprocess.Popen[str], *words: str) -> list[str]:
    """For each of them the first line that has it. A command and its master have one console, and nobody says who speaks first."""
    assert process.stderr is not None
    lines: list[str] = []
    while not all(any(each in line for line in lines) for each in words):
        line = process.stderr.readline()
        assert line, f"it ended without saying {words}: {lines}"
        lines.append(line)
    return [next(line for line in lines if each in line) for each in words]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
