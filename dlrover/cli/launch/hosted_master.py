"""
The master of a job whose nodes a node host keeps: started, started again when it dies, and believed when it says how the job ended.

The host is its parent (`dlrover local`, or an actor in a Ray cluster). Nodes train on while the master is away, so what keeps it from
starting may take its time to heal, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dlrover.cli.launch import processes
from dlrover.cli.launch.children import pause_after
from dlrover.cli.launch.launcher import EXIT_MASTER_LOST, EXIT_USAGE, START_PATIENCE
from dlrover.cli.launch.runtime_dir import NodeDirectory
from dlrover.master.config import MasterConfig
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import JobEnd

NUM_QUICK_DEATHS = 5
"""Master deaths before it ever served, in a row, after which the job is given up."""
MAX_MASTER_PAUSE = 5.0
READY_FILE = "master.ready"
END_FILE = "end.json"
_TAIL_LINES = 15


class HostedMaster:
    """
    `adopt` has the wait status of a child told, once. `say` shows a line to people. `on_end` hears how the job ended, `on_lost` that no
    master will come any more, with an exit code.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        directory: NodeDirectory,
        log_file: str,
        master_grace: float,
        adopt: Callable[[int, Callable[[int], None]], None],
        say: Callable[[str], None],
        on_end: Callable[[JobEnd], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._argv = argv
        self._environ = environ
        self._directory = directory
        self._log_file = log_file
        self._limit = max(START_PATIENCE, master_grace)
        self._adopt = adopt
        self._say = say
        self._on_end = on_end
        self._on_lost = on_lost
        self._config: MasterConfig | None = None
        self.pid: int | None = None
        self._num_quick_deaths = 0
        self._restart: asyncio.TimerHandle | None = None
        self._missed_since: float | None = None
        """Since then the master could not be started again."""
        self._stop_code: int | None = None

    def start(self, config: MasterConfig) -> None:
        """Raises `DLRoverError`. `config` without the files of the directory: they are ours."""
        self._config = msgspec.structs.replace(
            config,
            ready_file=self._path(READY_FILE),
            end_file=self._path(END_FILE),
            log_file=self._log_file,
            parent_death=True,
            parent_pid=os.getpid(),
        )
        self._start()

    @property
    def has_served(self) -> bool:
        """In its present life."""
        return os.path.exists(self._path(READY_FILE))

    def end_job(self, exit_code: int) -> bool:
        """Have it end the job in good order. False: it is not there to do so. `exit_code` is told if it dies meanwhile."""
        self._stop_code = exit_code
        if self._restart is not None:
            self._restart.cancel()
        if self.pid is None or not self.has_served:
            return False
        processes.send(self.pid, signal.SIGUSR1)
        return True

    def terminate(self) -> int | None:
        """SIGTERM; the pid to wait for, if it was there. It is not started again."""
        self._stop_code = self._stop_code or 0
        if self._restart is not None:
            self._restart.cancel()
        if self.pid is not None:
            processes.send(self.pid, signal.SIGTERM)
        return self.pid

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _start(self) -> None:
        assert self._config is not None, "start() gives the configuration"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(READY_FILE))  # it speaks of one life only
        path = self._directory.write("master.json", msgspec.json.encode(self._config))
        self.pid = processes.spawn((*self._argv, "--config", path), self._environ, output=self._log_file)
        self._adopt(self.pid, self._on_exit)

    def _start_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._restart = None
        try:
            self._start()
            self._missed_since = None
        except (DLRoverError, OSError) as error:
            if self._missed_since is None:
                self._missed_since = loop.time()
                self._say(
                    f"the master cannot start now; this process tries again for up to {self._limit:.0f} s. {error}"
                )
            missed = loop.time() - self._missed_since
            if missed >= self._limit:
                self._say(f"the master could not start within {self._limit:.0f} s. {error}")
                self._on_lost(EXIT_MASTER_LOST)
            else:
                self._restart = loop.call_later(pause_after(missed), self._start_again)

    def _on_exit(self, status: int) -> None:
        self.pid = None
        end = self._read_end()
        if end is not None:
            self._on_end(end)
            return
        if self._stop_code is not None:
            self._on_lost(self._stop_code)
            return
        how = processes.describe_status(status)
        self._num_quick_deaths = 0 if self.has_served else self._num_quick_deaths + 1
        is_refused = not self.has_served and os.WIFEXITED(status) and os.WEXITSTATUS(status) == EXIT_USAGE
        if self._num_quick_deaths > NUM_QUICK_DEATHS or is_refused:
            self._say(f"the master could not start ({how}). Its log ends with:\n{self._tail()}")
            self._on_lost(EXIT_USAGE if is_refused else EXIT_MASTER_LOST)
            return
        pause = min(MAX_MASTER_PAUSE, 0.1 * 2**self._num_quick_deaths) if self._num_quick_deaths else 0.0
        self._say(f"the master ended ({how}) and is started again; workers keep training")
        self._restart = asyncio.get_running_loop().call_later(pause, self._start_again)

    def _read_end(self) -> JobEnd | None:
        try:
            with open(self._path(END_FILE), "rb") as file:
                return msgspec.json.decode(file.read(), type=JobEnd)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            self._say(f"the master's record of how the job ended cannot be read: {error}")
            return None

    def _tail(self) -> str:
        try:
            with open(self._log_file, encoding="utf-8", errors="replace") as file:
                return "".join(file.readlines()[-_TAIL_LINES:]).rstrip()
        except FileNotFoundError:
            return "(nothing)"
