"""
What the launcher tells an agent, once, as JSON.

The launcher has read flags and environment and checked them; nothing below it reads either again. The agent gets one frozen
struct through a file in its runtime directory, so that a restarted agent of the same launcher sees exactly the same.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterable

from msgspec import Struct

from dlrover.host.log_root import LogRoot
from dlrover.protocol.addresses import TlsConfig as TlsConfig
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job import JobEnd, JobTerms


class EntryKind(enum.StrEnum):
    SCRIPT = "script"
    """A Python file, as `python script.py` would run it."""
    MODULE = "module"
    """As `python -m module`."""
    RUN_PATH = "run-path"
    """torchrun's --run-path: executed by runpy in the worker's own interpreter."""
    PROGRAM = "program"
    """--no-python: any executable."""
    FUNCTION = "function"
    """Programmatic launch: `target` is a file with the pickled function and arguments, written by the user's own process."""


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    What a worker runs.

    Byte strings, because neither the name of a file nor an argument need be valid text, and JSON knows only such.
    """

    kind: EntryKind
    target: bytes
    args: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, kind: EntryKind, target: str, args: Iterable[str] = ()) -> Entry:
        """From Python's form of file names and arguments."""
        return cls(kind=kind, target=os.fsencode(target), args=tuple(map(os.fsencode, args)))

    @property
    def name(self) -> str:
        """The target in Python's form."""
        return os.fsdecode(self.target)


class Streams(enum.IntFlag):
    """torchrun's Std: which of a worker's streams are meant."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class WorkerLogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """torchrun's log options, already parsed: one value per local rank, missing ranks mean NONE."""

    log_dir: str = ""
    """Directory that the user named; empty: a temporary one inside the runtime directory, used for error files only."""
    redirects: dict[int, int] = {}
    redirect_default: int = 0
    tee: dict[int, int] = {}
    tee_default: int = 0
    local_ranks_filter: tuple[int, ...] = ()
    """Only these local ranks may write to the console; empty: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix: str = ""
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE with ${role_name}, ${rank}, ${local_rank}; empty: `[${role_name}${local_rank}]:`."""


class LogAction(enum.StrEnum):
    """What shall follow a line in the log of a failed worker."""

    RESTART = "restart"
    """As usual, even if the line looks like a broken node to us."""
    RELAUNCH = "relaunch"
    """Another node, where a platform can."""
    ABORT = "abort"
    """The job ends."""


class LogPattern(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pattern: str
    """A regular expression, searched for in each line."""
    action: LogAction


class WatchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the workers of a node, and the node itself, are watched."""

    has_hooks: bool = True
    """What workers are doing is found out by hooks in torch; without them only by what they report."""
    dump_signal: int = int(signal.SIGRTMIN) + 6
    """Makes a worker write its stacks; 0: none does. torch and Python use none of the real-time signals."""
    canary_every: int = 0
    """--canary: a digest of the parameters each so many steps; 0: none."""
    log_file: str = ""
    """TRAINING_LOG_FILE: where the script logs, if not to its streams."""
    node_errors: tuple[str, ...] = ()
    """FAILURE_NODE_ERRORS: what in a log says that the node is broken, beside what we know ourselves."""
    log_patterns: tuple[LogPattern, ...] = ()
    """--log-patterns: what in a log calls for what. The first that is found counts, before all that we know ourselves."""
    scrapes: tuple[str, ...] = ()
    """--scrape: HTTP addresses whose numbers go to the diagnosis."""
    xpu_timer_port: int | None = None
    """XPU_TIMER_PORT: where the kernel profiler serves its metrics; None: there is none."""
    has_step_file: bool = True
    """MONITOR_ENABLED: steps are also read from the file of RUNTIME_METRICS_PATH."""


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job_name: str
    run_id: str
    """TORCHELASTIC_RUN_ID of the workers."""
    launch: str
    """Unique per launcher start; tells a restarted agent from another node."""
    master_addr: str
    """host:port; IPv6 hosts in brackets."""
    master_file: str = ""
    """File with the master's newest address, where it may move to another machine. Empty: it stays at `master_addr`."""
    token_file: str
    """0600 file with the job token; empty: a master that asks for none (loopback only)."""
    runtime_dir: str
    """0700 directory of this node: sockets, error files, the agent's result. Removed by the launcher."""
    host: str
    """Address of this node as other nodes reach it: becomes MASTER_ADDR if it hosts global rank 0."""
    terms: JobTerms
    local_world_size: int | str
    """A number, or "auto", "gpu", "xpu": answered by a throw-away child of the zygote, which has torch."""
    entry: Entry
    node_rank: int | None = None
    role: str = "default"
    interpreter: str = ""
    """Python to run scripts with; empty: the one we run under."""
    is_warm: bool = True
    preload: tuple[str, ...] = ()
    """Modules to import in the zygote beside those of the framework."""
    framework: str = "torch"
    """What the zygote imports: `torch` or `tensorflow`."""
    log: WorkerLogConfig = WorkerLogConfig()
    watch: WatchConfig = WatchConfig()
    is_tuned: bool = False
    """--auto-tuning: the master may change the batches and loaders of the workers."""
    tls: TlsConfig | None = None
    signals: tuple[int, ...] = ()
    """--signals-to-handle: each of them ends the node's part of the job and goes on to the workers, as the usual four do."""
    shutdown_timeout: float = 30.0
    master_grace: float = 600.0
    """Seconds workers train on without a master."""
    host_ports: tuple[int, ...] = ()
    """Ports usable for the coordinator (HOST_PORTS on host networks); empty: any free one."""
    coordinator_port: int = 0
    """--master-port: the port of the coordinator in every round, because the script may name it. 0: a fresh one each time."""
    is_virtual_local_rank: bool = False
    """torchrun's --virtual-local-rank: LOCAL_RANK is 0 and the device is chosen by visibility."""
    preemption_file: str = ""
    """When it appears, this machine will be taken away: leave in good order. Empty: no report says so."""
    failover_extension: str = ""
    """`module::Class` of the user's that is asked what shall follow a failure; empty: no class is."""
    failover_dir: str = ""
    """Where its module is found, beside the usual path."""
    place: tuple[str, ...] = ()
    """Where this node is in the network, outermost switch first; empty: unknown here."""
    group: int = -1
    """Scheduling group (rack) of the node; -1: none."""
    platform_node: int = -1
    """What the platform knows this node by; -1: started by hand."""
    node_type: NodeType = NodeType.WORKER
    node_name: str = ""
    """What the platform calls this node: POD_NAME."""
    node_ip: str = ""
    """Of the machine below: NODE_IP."""
    foreign_node: int = -1
    """NODE_ID of a platform that is none of ours; -1: it has none."""
    snapshot_root: str = ""
    """Directory of this user's snapshot segments; empty: the agent keeps none, and trainers see to themselves."""
    is_saving_at_break_points: bool = False
    """--save-at-breakpoint: what is in memory goes to storage when workers fail or the node leaves."""
    snapshot_write_limit: float = 0.0
    """--snapshot-write-limit: megabytes per second with which snapshots are written to storage; 0: no limit."""
    snapshot_copies: int = 0
    """--snapshot-replicas: so many other nodes keep a copy of this node's snapshots."""
    snapshot_parity: tuple[int, int] = (0, 0)
    """--snapshot-parity: k and m of groups whose members keep parity of each other's snapshots; zeros: none."""
    snapshot_bandwidth: float = 0.0
    """Megabytes per second that copies may use in the background; 0: no limit."""
    log_level: str = "WARNING"
    """Of the agent's own log on stderr; quiet by default, as torchrun."""
    log_root: LogRoot | None = None
    """Where the log goes beside stderr; None: nowhere."""

    def find_master(self) -> str:
        """Its newest address. The file appears whole; without one the master is where it was at the start."""
        try:
            with open(self.master_file, encoding="ascii") as file:
                return file.read().strip() or self.master_addr
        except OSError:
            return self.master_addr


class AgentResult(Struct, frozen=True, kw_only=True):
    """Written by the agent to `result.json` in its runtime directory just before it exits."""

    exit_code: int
    message: str = ""
    worker_exit_code: int | None = None
    """Of the first failed worker: what --exit-code=worker passes on (128+n for signal n)."""
    first_failed_rank: int | None = None
    num_restarts: int = 0
    is_job_alive: bool = False
    """This node has left, for whatever reason, and the job goes on: there is no failure to report."""
    end: JobEnd | None = None
    """How the job ended, if the master told; the launcher prints its report from it."""
