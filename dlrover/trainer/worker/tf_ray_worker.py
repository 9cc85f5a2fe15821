"""
`TFRayWorker`: one process of a TensorFlow job as an object, for scripts that make it in an actor of their own.

It starts its work at once in a thread. In a process of a job's node that thread is the task itself. Elsewhere it is the parent of the starter, which
becomes the agent of a node if the surroundings name a master. Jobs of `dlrover master --platform ray` need none of this: their host makes the nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from dlrover.host.edges import contained

_FLAGS = ("conf", "ps_num", "worker_num", "evaluator_num", "task_type", "task_id", "enable_auto_scaling")
_TAIL = 20
"""Lines of the process that its failure shows."""


class TFRayWorker:
    def __init__(self, args: Any) -> None:
        """`args`: the starter's flags, as a dictionary or as it parses them. With `mock` nothing starts."""
        self.args = dict(args) if isinstance(args, Mapping) else dict(vars(args or object))
        self._failure = ""
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._thread = threading.Thread(target=self._run, name="task", daemon=True)
        if not self.args.get("mock"):
            self._thread.start()

    def health_check(self) -> str:
        """`OK` while it works, and when it has ended well. Raises RuntimeError if it has failed."""
        if self._failure:
            raise RuntimeError(self._failure)
        return "OK"

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contained(self._note_failure):
            if os.environ.get("DLROVER_AGENT_SOCKET"):
                self._work()
            else:
                self._start()

    def _note_failure(self, error: Exception) -> None:
        """The next health check tells of it."""
        self._failure = f"{type(error).__name__}: {error}"

    def _work(self) -> None:
        from dlrover.trainer.tensorflow.process import run_task

        run_task(str(self.args.get("conf") or ""))

    def _start(self) -> None:
        flags = [f"--{name}={self.args[name]}" for name in _FLAGS if self.args.get(name) not in (None, "")]
        command = [sys.executable, "-m", "dlrover.trainer.entry.local_entry", "--platform=RAY", *flags]
        given = {"NODE_TYPE": self.args.get("task_type"), "NODE_RANK": self.args.get("task_id")}
        own = {name: str(value) for name, value in given.items() if value not in (None, "")}
        with subprocess.Popen(
            command, env={**own, **os.environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._lines.append(line.rstrip())
                print(line, end="", flush=True)
        if process.returncode:
            raise RuntimeError(f"its process ended with {process.returncode}:\n" + "\n".join(self._lines))
