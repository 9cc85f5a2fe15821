"""Where the master of this launch keeps its files, and what it left in them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from dlrover.cli.console import say
from dlrover.cli.launch.runtime_dir import job_directory_name
from dlrover.cli.options.settings import Settings
from dlrover.protocol.messages.job import JobEnd

if TYPE_CHECKING:
    from dlrover.protocol.messages.goodput import GoodputStatus


class MasterFiles:
    """Of one launch; each life of its master uses the same."""

    def __init__(self, settings: Settings, directory: str, *, job_name: str, launch_id: str) -> None:
        self.ready = os.path.join(directory, "master.ready")
        """Made by a master that serves."""
        self.end = os.path.join(directory, "end.json")
        self.log = os.path.join(directory, "master.log")
        log_dir = settings.log.log_dir
        self.reports = (log_dir if log_dir != os.devnull else "") or settings.journal or directory
        self._journal_dir = settings.journal
        # One file per launch: a journal of an ended job of the same name must not be taken for ours.
        name = f"{job_directory_name(job_name)}-{launch_id}.sqlite" if settings.journal else "journal.sqlite"
        self._journal = os.path.join(settings.journal or directory, name)

    def journal(self) -> str:
        """Its directory exists."""
        if self._journal_dir:
            os.makedirs(self._journal_dir, exist_ok=True)
        return self._journal

    def is_ready(self) -> bool:
        """Whether the newest life of the master has served."""
        return os.path.exists(self.ready)

    def begin_life(self) -> None:
        """Before a master starts: `ready` speaks of one life only."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.ready)

    def read_end(self) -> JobEnd | None:
        """The master's last word. None: the job is not over."""
        try:
            with open(self.end, "rb") as file:
                return msgspec.json.decode(file.read(), type=JobEnd)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            say(f"the master's record of how the job ended cannot be read: {error}")
            return None

    def read_goodput(self) -> GoodputStatus | None:
        """None: the job is not over, or its master is elsewhere."""
        from dlrover.master.config import goodput_file
        from dlrover.protocol.messages.goodput import GoodputStatus

        try:
            with open(goodput_file(self.end), "rb") as file:
                return msgspec.json.decode(file.read(), type=GoodputStatus)
        except (OSError, msgspec.MsgspecError):
            return None

    def log_tail(self) -> str:
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return "".join(file.readlines()[-15:]).rstrip()
        except FileNotFoundError:
            return "(nothing)"
