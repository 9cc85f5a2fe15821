"""
What `dlrover local` shows: the nodes' output, each line with its node's name, and the state of the job.

On a terminal the state stands below the output and changes in place; elsewhere a line is written whenever it changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from dlrover.platforms.node_host import short_name
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.fleet_messages import NodeChanged, NodePhase, PlatformNode
from dlrover.protocol.identity import NodeRank, PlatformId
from dlrover.protocol.messages import AskStatus, JobStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PREFIX = "dlrover local: "
PERIOD = 1.0
"""Seconds between two questions to the master. A poll: it has no stream of states for people."""
ASK_TIMEOUT = 5.0


class Display:
    def __init__(self, address: str, token: str, *, tls: TlsConfig | None, is_terminal: bool) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._nodes: dict[PlatformId, PlatformNode] = {}
        self._status: JobStatus | None = None
        self._said: tuple[object, ...] = ()
        self._live = _live() if is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone: how the job ended counts
                self._live.update("", refresh=True)
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def say(self, text: str) -> None:
        self._write(f"{PREFIX}{text}\n", is_error=True)

    def line(self, name: str, line: bytes, is_error: bool) -> None:
        self._write(f"[{name}] {line.decode(errors='replace')}", is_error=is_error)

    def change(self, change: NodeChanged) -> None:
        node = change.node
        former = self._nodes.get(node.id)
        if node.phase is NodePhase.DELETED:
            self._nodes.pop(node.id, None)
        else:
            self._nodes[node.id] = node
        if node.phase is not NodePhase.PENDING and (former is None or former.phase is not node.phase):
            self.say(f"{short_name(node)} (node {node.id}): {_describe(node)}")
        self._refresh()

    async def run(self) -> None:
        """Until cancelled."""
        from dlrover.protocol.rpc import ask  # late: gRPC is not needed for starting anything

        while True:
            with contextlib.suppress(DLRoverError):  # it starts, or starts again; the next look will tell
                reply = await ask(self._address, AskStatus(), token=self._token, tls=self._tls, timeout=ASK_TIMEOUT)
                if isinstance(reply, JobStatus):
                    self._show(reply)
            await asyncio.sleep(PERIOD)

    def _show(self, status: JobStatus) -> None:
        self._status = status
        news = (status.stage, status.round, status.world_size, len(status.nodes))
        if news != self._said and self._live is None:
            self.say(
                f"{status.stage}, round {status.round}, {status.world_size} workers, {len(status.nodes)} nodes: "
                f"{status.verdict}"
            )
        self._said = news
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):  # as in `_write`
                self._live.update(self._table(), refresh=True)

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("node rank", "node", "platform", "address", "agent", "step", box=None, pad_edge=False)
        agents = {} if self._status is None else {node.node_rank: node for node in self._status.nodes}
        for node in sorted(self._nodes.values(), key=lambda node: (node.rank, node.id)):
            agent = agents.get(NodeRank(node.rank))
            status, step = ("", "") if agent is None else (agent.status, "" if agent.step is None else str(agent.step))
            table.add_row(str(node.rank), str(node.id), node.phase.value, node.host, status, step)
        if self._status is None:
            return Group(Text("job starting", style="bold"), table)
        state = self._status
        head = f"job {state.job_name}: {state.stage}, round {state.round}, {state.world_size} workers"
        return Group(Text(head, style="bold"), Text(state.verdict), table)

    def _write(self, text: str, *, is_error: bool) -> None:
        try:
            if self._live is not None:
                self._live.console.print(text.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
                return
            stream = sys.stderr if is_error else sys.stdout
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            return  # the terminal is gone; the log files have it


def _describe(node: PlatformNode) -> str:
    match node.phase:
        case NodePhase.RUNNING:
            return f"started at {node.host}"
        case NodePhase.DELETED:
            return f"removed ({node.message})" if node.message else "removed"
        case _:
            return f"{node.phase.value.lower()}: {node.exit_reason.value}, {node.message}"


def _live() -> Live:
    from rich.console import Console
    from rich.live import Live

    # Without its own refreshing thread: everything here is done by one task.
    return Live("", console=Console(stderr=True), auto_refresh=False, transient=True)
