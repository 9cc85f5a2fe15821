"""
Lives of containers as they stand on the disk: one folder per start, which a later kubelet finds again.

`spec.json` is what the shim is to run, `pid` names the shim, `started.json` the container, `exit.json` its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dlrover.host.processes import look_up
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.kubelet.status import Ended

_SHIM = str(Path(__file__).with_name("shim.py"))
_MAX_MESSAGE_BYTES = 4096
_MAX_LOG_BYTES = 2048
_MAX_LOG_LINES = 80
UNKNOWN = "ContainerStatusUnknown"


class Life:
    """One start of a container."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = int(folder.name)
        self._shim: subprocess.Popen[bytes] | None = None
        """Ours, if we started it."""

    @classmethod
    async def start(cls, folder: Path, spec: Body) -> Life:
        """Returns when the container runs or could not be started; `ended_nowait` tells which."""
        life = cls(folder)
        (folder / "scratch").mkdir(parents=True, exist_ok=True)
        (folder / "termination-log").touch()
        (folder / "spec.json").write_text(json.dumps(spec))
        with (folder / "shim.log").open("w") as errors:
            shim = life._shim = subprocess.Popen(  # noqa: ASYNC220 (it must outlive this loop)
                [sys.executable, "-I", "-S", _SHIM, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        (folder / "pid").write_text(json.dumps(_identity(shim.pid)))
        assert shim.stdout is not None
        with shim.stdout:
            await _readable(shim.stdout.fileno())
        return life

    @classmethod
    def newest(cls, folder: Path) -> Life | None:
        """What a kubelet before us started."""
        attempts = sorted(
            (path for path in folder.glob("[0-9]*") if (path / "pid").exists()), key=lambda p: int(p.name)
        )
        return cls(attempts[-1]) if attempts else None

    @property
    def started_at(self) -> float:
        return float(_read(self.folder / "started.json").get("started_at", 0.0))

    @property
    def pid(self) -> int:
        """Of the container's first process; 0 if it was never started."""
        return int(_read(self.folder / "started.json").get("pid", 0))

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def ended_nowait(self) -> Ended | None:
        """None while it runs."""
        end = _read(self.folder / "exit.json")
        if end:
            message = str(end["message"]) or self._termination_message(int(end["code"]))
            return Ended(
                code=int(end["code"]),
                reason=str(end["reason"]),
                message=message,
                started_at=float(end["started_at"]),
                finished_at=float(end["finished_at"]),
            )
        if _is_alive(_read(self.folder / "pid")):
            return None
        return Ended(
            code=137,
            reason=UNKNOWN,
            message="The container could not be located when the pod was terminated",
            started_at=self.started_at,
            finished_at=time.time(),
        )

    async def wait(self) -> Ended:
        while True:
            shim = int(_read(self.folder / "pid").get("pid", 0))
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(shim)
                try:
                    if _is_alive(_read(self.folder / "pid")):
                        await _readable(descriptor)
                finally:
                    os.close(descriptor)
            if self._shim is not None:
                self._shim.poll()
            end = self.ended_nowait()
            if end is not None:
                return end

    def signal(self, number: int) -> None:
        """To the container's first process, as a container runtime does."""
        if self.pid and self.ended_nowait() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, grace: float) -> Ended:
        """SIGTERM, and SIGKILL at the end of the grace."""
        self.signal(signal.SIGTERM)
        waiting = asyncio.ensure_future(self.wait())
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), grace)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await waiting

    async def execute(self, command: Sequence[str], timeout: float) -> bool:
        """Run a command inside the container, as probes and hooks do. Whether it succeeded in time."""
        environ = _read(self.folder / "spec.json")["environ"]
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "--", *command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return await asyncio.wait_for(process.wait(), timeout) == 0
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False

    def _termination_message(self, code: int) -> str:
        with contextlib.suppress(OSError):
            message = (self.folder / "termination-log").read_bytes()[-_MAX_MESSAGE_BYTES:]
            if message:
                return message.decode(errors="replace")
        if code != 0 and _read(self.folder / "spec.json").get("message_policy") == "FallbackToLogsOnError":
            with contextlib.suppress(OSError):
                lines = self.log.read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace").splitlines(keepends=True)
                return "".join(lines[-_MAX_LOG_LINES:])
        return ""


def kill_all(folder: Path) -> list[int]:
    """
    SIGKILL to every shim below the folder, and so to every container: what a machine's power switch does.

    Returns the pids of the containers.
    """
    pids = []
    for file in sorted(folder.glob("**/pid")):
        identity = _read(file)
        if _is_alive(identity):
            pids.append(int(_read(file.with_name("started.json")).get("pid", 0)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(identity["pid"]), signal.SIGKILL)
    return pids


def _identity(pid: int) -> Body:
    """A pid alone is used again."""
    process = look_up(pid)
    return {"pid": pid, "started": process.started_at_ticks if process is not None else 0}


def _is_alive(identity: Body) -> bool:
    if not identity:
        return False
    process = look_up(int(identity["pid"]))
    return process is not None and not process.is_dead and process.started_at_ticks == identity["started"]


def _read(path: Path) -> Body:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
