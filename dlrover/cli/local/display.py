"""
What `dlrover local` shows: the nodes' output, each line with its node's name, and the state of the job.

On a terminal the state stands below the output and changes in place; elsewhere a line is written whenever it changes.

Nothing here waits for the console, because nodes and master have to be replaced meanwhile. As long as it takes no bytes the
nodes' output is left with them, the state is not drawn, and of our own lines the newest are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlrover.cli.console import MAX_HELD
from dlrover.host.console import HELD_BYTES, ConsoleWriter
from dlrover.host.plain_text import printable
from dlrover.platforms.hosted.starter import short_name
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.fleet import NodeChanged, NodePhase, PlatformNode
from dlrover.protocol.messages.identity import NodeRank, PlatformId
from dlrover.protocol.messages.job import AskStatus, JobStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PREFIX = "dlrover local: "
PERIOD = 1.0
"""Seconds between two questions to the master. A poll: it has no stream of states for people."""
ASK_TIMEOUT = 5.0
REFRESH_BYTES = 16 * 1024
"""The state is not drawn while the console has so much to take."""


class Display:
    """`hold` and `release` of the source of the nodes' output are set when there is one."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        tls: TlsConfig | None,
        is_terminal: bool,
        stdout: int = 1,
        stderr: int = 2,
        prefix: str = PREFIX,
    ) -> None:
        self._prefix = prefix
        self._address = address
        self._token = token
        self._tls = tls
        self._nodes: dict[PlatformId, PlatformNode] = {}
        self._status: JobStatus | None = None
        self._said: tuple[object, ...] = ()
        self._loop = asyncio.get_running_loop()
        self._stdout, self._stderr = stdout, stderr
        self._console = ConsoleWriter()
        self._encoding = sys.stderr.encoding
        self._is_full = False
        self._unsaid: deque[str] = deque(maxlen=MAX_HELD)
        """Own lines of the time in which the console was full."""
        self._live = _live(self.say_block) if is_terminal else None
        self.hold: Callable[[], None] = _nothing
        self.release: Callable[[], None] = _nothing

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._say_rest()
        if self._live is not None:
            self._live.update("", refresh=True)
            self._live.stop()

    def say(self, text: str) -> None:
        text = printable(text)
        if self._is_full:
            self._unsaid.append(text)
        else:
            self._write(f"{self._prefix}{text}\n", is_error=True)

    def move(self, address: str) -> None:
        """The master serves there now."""
        self._address = address

    def say_block(self, text: str) -> None:
        """As it is, below everything else."""
        self._console.write(self._stderr, self._encode(printable(text)))

    def line(self, name: str, line: bytes, is_error: bool) -> None:
        self._write(f"[{name}] {line.decode(errors='replace')}", is_error=is_error)

    async def drain(self, patience: float) -> None:
        """Until the console has taken everything, or has taken nothing for a while."""
        is_done = asyncio.Event()
        self._console.when_held(0, self._soon(is_done.set))
        num_written = -1
        while not is_done.is_set() and self._console.num_written > num_written:
            num_written = self._console.num_written
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await is_done.wait()

    def change(self, change: NodeChanged) -> None:
        node = change.node
        former = self._nodes.get(node.id)
        if node.phase is NodePhase.DELETED:
            self._nodes.pop(node.id, None)
        else:
            self._nodes[node.id] = node
        is_news = former is None or former.phase is not node.phase
        if node.phase is NodePhase.PENDING:
            is_news = bool(node.message) and (former is None or former.message != node.message)
        if is_news:
            self.say(f"{short_name(node)} (node {node.id}): {_describe(node)}")
        self._refresh()

    async def run(self) -> None:
        """Until cancelled."""
        from dlrover.protocol.rpc.client import ask  # late: gRPC is not needed for starting anything

        while True:
            with contextlib.suppress(DLRoverError):  # it starts, or starts again; the next look will tell
                reply = await ask(self._address, AskStatus(), token=self._token, tls=self._tls, timeout=ASK_TIMEOUT)
                if isinstance(reply, JobStatus):
                    self._show(reply)
            await asyncio.sleep(PERIOD)

    def _show(self, status: JobStatus) -> None:
        self._status = status
        num_nodes = len(status.nodes) + sum(status.left_out.nodes.values())
        news = (status.stage, status.round, status.world_size, num_nodes, status.blocked)
        if news != self._said and self._live is None:
            self.say(
                f"{status.stage_text}, round {status.round}, {status.world_size} workers, {num_nodes} nodes: "
                f"{status.reason}"
            )
        self._said = news
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            # Else later: the state is asked for again soon.
            self._live.update(self._table(), refresh=self._console.held_bytes < REFRESH_BYTES)

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("node", "id", "platform", "address", "agent", "step", box=None, pad_edge=False)
        agents = {} if self._status is None else {node.node_rank: node for node in self._status.nodes}
        for node in sorted(self._nodes.values(), key=lambda node: (node.rank, node.id)):
            agent = agents.get(NodeRank(node.rank))
            status, step = ("", "") if agent is None else (agent.status, "" if agent.step is None else str(agent.step))
            table.add_row(short_name(node), str(node.id), node.phase.value, printable(node.host), status, step)
        if self._status is None:
            return Group(Text("job starting", style="bold"), table)
        state = self._status
        head = f"job {state.job_name}: {state.stage_text}, round {state.round}, {state.world_size} workers"
        return Group(Text(head, style="bold"), Text(printable(state.reason)), table)

    def _write(self, text: str, *, is_error: bool) -> None:
        if self._live is not None:
            self._live.console.print(text.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
        else:
            self._console.write(self._stderr if is_error else self._stdout, self._encode(text))
        if not self._is_full and self._console.held_bytes > HELD_BYTES:
            self._is_full = True
            self.hold()
            self._console.when_held(HELD_BYTES // 2, self._soon(self._on_room))

    def _encode(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")

    def _on_room(self) -> None:
        self._is_full = False
        self.release()
        self._say_rest()

    def _say_rest(self) -> None:
        while self._unsaid:
            self._write(f"{self._prefix}{self._unsaid.popleft()}\n", is_error=True)

    def _soon(self, function: Callable[[], None]) -> Callable[[], None]:
        """The same for another thread."""

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(function)

        return tell


def _nothing() -> None:
    """No node prints anything yet."""


def _describe(node: PlatformNode) -> str:
    match node.phase:
        case NodePhase.PENDING:
            return f"pending: {node.message}"
        case NodePhase.RUNNING:
            return f"started at {node.host}"
        case NodePhase.DELETED:
            return f"removed ({node.message})" if node.message else "removed"
        case _:
            return f"{node.phase.value.lower()}: {node.exit_reason.value}, {node.message}"


def _live(write: Callable[[str], None]) -> Live:
    from rich.console import Console
    from rich.live import Live

    # Without its own refreshing thread: everything here is done by one task.
    shown = Console(file=_Stream(write), force_terminal=True)
    return Live("", console=shown, auto_refresh=False, transient=True)


class _Stream(io.StringIO):
    """A file for a library that writes to one."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def write(self, text: str) -> int:
        self._write(text)
        return len(text)
