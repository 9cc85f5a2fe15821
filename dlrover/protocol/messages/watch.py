"""
What watching a job is told in: progress of workers, resources of nodes, looks at a job that stands still, and what follows.

Observations and orders are volatile: they travel beside the heartbeats, are dropped where there is no stream, and nothing may depend on them after
a restart of the master. What shall change the job is a finding, an ordinary journalled command that carries its evidence.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType

from dlrover.protocol.messages.goodput import AccountGoodput as AccountGoodput
from dlrover.protocol.messages.goodput import JobEvent as JobEvent
from dlrover.protocol.messages.goodput import TimeClass as TimeClass
from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, Round
from dlrover.protocol.units import take_megabytes

MAX_FRAMES = 64
"""Of one thread's stack; the innermost ones."""
MAX_THREADS = 32
"""Of one process in a dump; the main thread is always among them."""
MAX_METRICS = 32
"""Numbers that a worker may report besides its step."""
MAX_SERIES = 512
"""Numbers of one sample."""
MAX_SAMPLE_TEXT = 65536
MAX_TEXT = 2048
"""Characters of any sentence, evidence or label that is shown to people."""


# Progress: what a worker does now.


class Phase(enum.StrEnum):
    """What a worker's main thread does. Exactly one at a time; the innermost counts."""

    START = "start"
    """From the fork of the worker to its first batch or step: imports, building the model."""
    RESTORE = "restore"
    """Reading the state of a former life from memory or storage."""
    COMPILE = "compile"
    """torch.compile at work."""
    DATA = "data"
    """Waiting for the next batch."""
    FORWARD = "forward"
    """Between batch and backward. What cannot be told apart is counted here: it is the user's own code."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    """In a collective that was called from Python; those inside backward are counted as backward."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    END = "end"
    """The script is over; the interpreter shuts down."""


class Collective(Struct, frozen=True, kw_only=True):
    """The newest collective that a worker called, or is in."""

    sequence: int
    """Of its process group, growing from 1."""
    operation: str
    """`allreduce`, `broadcast`, ..."""
    group: str = ""
    """Name of the process group."""
    shape: str = ""
    """Of the first tensor, as `float32[128,64]`."""
    is_inside: bool = False
    """Not yet returned."""
    backend: str = ""
    """`gloo`, `nccl`, ...; empty: called from Python, of whichever backend."""
    has_started: bool = True
    """On a device: false while what was queued before it still runs."""


class Reach(Struct, frozen=True, kw_only=True):
    """How far the workers of one life came, by each count there is beside the step that they reported. `agreed/reach.py` says what it means."""

    model_step: int = 0
    """Steps in the model: those that the life found in what it restored, as far as that is known, and those that it took."""
    model_start: int = -1
    """Steps that were in the model when the life began. 0: it restored nothing. -1: unknown."""
    checkpoint_step: int = -1
    """Greatest step of a checkpoint that was restored or taken (Flash Checkpoint); -1: none was."""
    data: tuple[int, int] = (0, 0)
    """Where the sampler began or went on last: the data epoch, and the records of it that were done."""
    has_whole_epoch: bool = False
    """The life trained a pass over the data to its end."""
    is_counting_anew: bool = False
    """The script counts its steps from 0 again, in each epoch for example: they cannot be compared with those of other lives."""


class StepShape(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step of a worker consists of, as far as the libraries in it know."""

    micro_batch: int = 0
    """Records of one forward pass; 0: unknown."""
    accumulation: int = 1
    """Forward passes of one step."""
    total_batch: int = 0
    """Records of all workers in one step, where that number is the same for any number of workers; 0: it is not."""
    loader_workers: int = -1
    """Processes that read ahead for the worker; -1: unknown."""


class WorkerProgress(Struct, frozen=True, kw_only=True):
    local_rank: int
    global_rank: int
    pid: int = 0
    step: int | None = None
    num_steps: int = 0
    """Steps done since the worker started; 0 where only the step itself is known. With it, steps that are done again can be told from new ones."""
    is_step_comparable: bool = True
    """Whether `step` means the same in each life: not where hooks count it, or where the script counts anew in each epoch."""
    model_step: int | None = None
    """Steps in the model, as in `Reach`; None: no hooks count them, or none was taken yet."""
    model_start: int | None = None
    """Those of them that the model had when the worker began; None: unknown."""
    num_plain_steps: int = 0
    """Of these, the ones in which nothing was saved or evaluated; 0 where they are not told apart."""
    plain_seconds: float = 0.0
    """Computing time in the plain steps."""
    num_timed_steps: int = 0
    """Whole steps since the worker started."""
    timed_seconds: float = 0.0
    """All the time of these, waits included, but for saving and evaluating."""
    shape: StepShape = StepShape()
    phase: Phase = Phase.START
    phase_seconds: float = 0.0
    """How long it has been in this phase."""
    seconds: dict[Phase, float] = {}
    """By phase, since the worker started, on its own monotonic clock. Sums to its age."""
    has_hooks: bool = True
    """Else nothing tells when its start is over, unless its script reports."""
    step_seconds: float = 0.0
    """Of the newest whole step."""
    collective: Collective | None = None
    metrics: dict[str, float] = {}
    """What the script reported with its step: loss, grad_norm, ... May be NaN or infinite: that is news too."""
    is_stalled: bool = False
    """In this phase for longer than the look threshold it has learned."""
    digest: str = ""
    """Of parameters or gradients at `digest_step`, where the canary is on."""
    digest_step: int | None = None


class ProgressReport(Struct, tag=True, frozen=True, kw_only=True):
    """With each heartbeat, and at once when a worker is found stalled or moves again."""

    node: NodeId
    incarnation: Incarnation
    round: Round
    workers: tuple[WorkerProgress, ...]


# Resources. Amounts are in bytes. Names that end in `_mb` or `_mb_s` are those of former senders, who told megabytes (10^6 bytes).


class DeviceSample(Struct, frozen=True, kw_only=True):
    index: int
    name: str = ""
    used_memory_bytes: int = 0
    total_memory_bytes: int = 0
    utilization: float = 0.0
    """Percent."""
    temperature: float | None = None
    health: str = ""
    """Empty when well; else what the driver says."""
    used_memory_mb: float | UnsetType = UNSET
    total_memory_mb: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        take_megabytes(self)


class ProcessSample(Struct, frozen=True, kw_only=True):
    global_rank: int
    """-1: the agent and its helpers."""
    cpu: float = 0.0
    """Cores in use."""
    memory_bytes: int = 0
    """Resident, of the worker and its children."""
    processes: int = 1
    memory_mb: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        take_megabytes(self)


class ResourceReport(Struct, tag=True, frozen=True, kw_only=True):
    """Of a node, at an adaptive period. What could not be read is absent and named in `troubles`."""

    node: NodeId
    incarnation: Incarnation
    cpu: float = 0.0
    """Cores in use by this job's processes."""
    cores: float = 0.0
    """Allowed, by cgroup and affinity."""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    shm_bytes: int = 0
    shm_limit_bytes: int = 0
    disk_free_bytes: int | None = None
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0
    network_in_bytes_per_second: float = 0.0
    network_out_bytes_per_second: float = 0.0
    workers: tuple[ProcessSample, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    has_devices: bool = False
    """There are some; without the vendor's library they cannot be read, and `devices` is empty."""
    troubles: tuple[str, ...] = ()
    """`GPU is lost`, a driver call that does not return, ..."""
    clock_jump: float = 0.0
    """Seconds by which the wall clock moved against the monotonic one since the last report."""
    memory_mb: float | UnsetType = UNSET
    memory_limit_mb: float | UnsetType = UNSET
    shm_mb: float | UnsetType = UNSET
    shm_limit_mb: float | UnsetType = UNSET
    disk_free_mb: float | UnsetType | None = UNSET
    disk_read_mb_s: float | UnsetType = UNSET
    disk_write_mb_s: float | UnsetType = UNSET
    network_in_mb_s: float | UnsetType = UNSET
    network_out_mb_s: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        take_megabytes(self)


# A look: everybody tells what its workers are doing; harmless.


class ThreadStack(Struct, frozen=True, kw_only=True):
    name: str
    frames: tuple[str, ...]
    """Innermost first: `file:line function`."""
    is_main: bool = False


class UnansweredLink(Struct, frozen=True, kw_only=True):
    """A connection on which something was sent that the other side has not acknowledged yet."""

    local: str
    """Address, without the port."""
    remote: str
    times: int
    """How often it was sent again so far. Not at all: it is on its way, or does not even leave this machine."""


class WorkerDump(Struct, frozen=True, kw_only=True):
    """What one worker is doing. Empty stacks: the process did not answer; the rest needs no help from it."""

    local_rank: int
    global_rank: int
    pid: int
    state: str
    """The letter of `/proc/PID/stat`: R, S, D, T, t, Z; X for gone."""
    wait_channel: str = ""
    kernel_stack: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    """Of the worker, its threads and its children: a rank whose data loader computes is not standing still."""
    io_bytes: int = 0
    major_faults: int = 0
    switches: int = 0
    """How often its main thread went to sleep by itself: one that waits for good does so once."""
    threads: tuple[ThreadStack, ...] = ()
    native: tuple[str, ...] = ()
    """Native frames of the main thread, where a sampler is allowed."""
    progress: WorkerProgress | None = None
    recorded: tuple[Collective, ...] = ()
    """The newest collectives that torch's own recorder knows, oldest first, those inside backward included. The numbers are torch's: not to be
    compared with that of `progress`."""
    data_cursor: str = ""
    children: tuple[str, ...] = ()
    """Its own processes (data loading): pid, state and wait channel, one line each."""
    source: str = "faulthandler"
    """Where the stacks come from; `none` when there are none."""
    addresses: tuple[str, ...] = ()
    """Of its ends of connections to elsewhere."""
    unanswered: tuple[UnansweredLink, ...] = ()


class LookTaken(Struct, tag=True, frozen=True, kw_only=True):
    """A node's answer to `TakeLook`, once for each of its dumps."""

    node: NodeId
    incarnation: Incarnation
    look: int
    number: int
    """0 for the first dump, 1 for the second."""
    workers: tuple[WorkerDump, ...]


class NodeEvent(Struct, tag=True, frozen=True, kw_only=True):
    """Something that happened on a node and that people may want to know: goes into the job's events."""

    node: NodeId
    incarnation: Incarnation
    level: str
    """`info`, `warn` or `error`."""
    name: str
    """`snapshot`, `worker-exit`, `log-pattern`, ..."""
    text: str
    rank: int | None = None
    labels: dict[str, str] = {}


class TailSent(Struct, tag=True, frozen=True, kw_only=True):
    """The answer to `SendTail`."""

    node: NodeId
    incarnation: Incarnation
    request: int
    text: str
    note: str = ""
    """Where it comes from, or why there is none."""


class SampleTaken(Struct, tag=True, frozen=True, kw_only=True):
    """What a collector of a node has measured, for diagnosticians; kept by the master for ten minutes."""

    node: NodeId
    incarnation: Incarnation
    kind: str
    """Name of the collector: `xpu-timer`, ..."""
    numbers: dict[str, float] = {}
    """By series, as `NAME{label="value"}`."""
    text: str = ""
    """What is no number."""
    trouble: str = ""
    """Why there is nothing."""


WatchObservation = ProgressReport | ResourceReport | LookTaken | NodeEvent | TailSent | SampleTaken


# Terms of watching.


class HangStrategy(enum.IntEnum):
    """What follows a hang, by the historical numbers."""

    LOG = 0
    NOTIFY = 1
    ACT = 2


class WatchTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a job that stands still is looked at, and when something is done about it."""

    strategy: HangStrategy = HangStrategy.ACT
    hang_timeout: float = 300.0
    """Seconds without progress after which workers are restarted though there is no proof that they hang."""
    longest_timeout: float = 7200.0
    """The same for phases that are known to take long: start, first step, compilation, evaluation."""
    pause: float = 5.5
    """Seconds that a rank may rest, however it looks: shorter pauses without any activity are normal. With evidence of a
    hang it is acted upon after that; a stopped or dead process needs no such patience."""
    hangs_per_hour: int = 6
    """So many times an hour hung workers are restarted; then the job ends, because something else is wrong."""
    hangs_per_node: int = 2
    """After so many hangs by the same node within an hour the node is replaced, where the platform can."""

    def __post_init__(self) -> None:
        for name in ("hang_timeout", "longest_timeout", "pause"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name):g}: give a finite number of seconds above 0")
        if self.hangs_per_hour < 1 or self.hangs_per_node < 1:
            raise ValueError("hangs_per_hour and hangs_per_node: give numbers of at least 1")


# Orders: what the master asks of an agent now. Run once; the master waits for an answer until they expire.


class TakeLook(Struct, tag=True, frozen=True, kw_only=True):
    """Dump all workers of this round now, and again after `again_after` seconds."""

    look: int
    round: Round
    again_after: float = 2.0


class SendTail(Struct, tag=True, frozen=True, kw_only=True):
    """A person wants to see the last that a worker printed."""

    request: int
    global_rank: int
    max_bytes: int = 65536


class ShowNotice(Struct, tag=True, frozen=True, kw_only=True):
    """A line for people at the console of the node; no sender waits for an answer."""

    text: str


class WatchOrder(Struct, frozen=True, kw_only=True):
    """`id` is unique in the life of one master; an agent that has seen it does nothing."""

    id: int
    expires_in: float
    """Seconds after `at`: then the answer is not awaited any more, and an agent that was held up leaves it alone."""
    order: TakeLook | SendTail | ShowNotice
    at: Micros = Micros(0)
    """The master's clock when it was sent; 0: not told."""


# Findings and verdicts.


class FaultClass(enum.StrEnum):
    """What is wrong, in one word."""

    STOPPED = "stopped"
    """A process is stopped (SIGSTOP, a debugger)."""
    DEAD = "dead"
    DEADLOCK = "deadlock"
    """A rank waits for something of its own (a lock, a queue) while the others wait for it."""
    SKIPPED_COLLECTIVE = "skipped-collective"
    """A rank went past a collective the others are in."""
    MISMATCHED_COLLECTIVE = "mismatched-collective"
    """Ranks are in different operations or shapes."""
    CONCURRENT_COLLECTIVES = "concurrent-collectives"
    """Two threads of a rank are inside collectives of one process group, whose order then differs between ranks."""
    BUSY = "busy"
    """A rank computes on (an endless loop, the interpreter lock held) while the others wait for it."""
    DATA_STALL = "data-stall"
    STORAGE_STALL = "storage-stall"
    """Uninterruptible sleep, or a read or write that does not return."""
    NETWORK = "network"
    STRAGGLER = "straggler"
    NUMERICS = "numerics"
    """NaN or infinite loss or gradients."""
    LOSS_SPIKE = "loss-spike"
    CORRUPTION = "corruption"
    """A replica's digest differs from the majority's."""
    OUT_OF_MEMORY = "out-of-memory"
    MEMORY_LEAK = "memory-leak"
    DISK_FULL = "disk-full"
    PROCESS_LIMIT = "process-limit"
    CRASH_LOOP = "crash-loop"
    EXCEPTION = "exception"
    """The script raised, or ended with a code of its own."""
    CLOCK_JUMP = "clock-jump"
    DEVICE = "device"
    """An accelerator is lost or sick."""
    NODE_INCONSISTENCY = "node-inconsistency"
    UNKNOWN = "unknown"


class ActionKind(enum.StrEnum):
    """From cheap to dear."""

    NONE = "none"
    NOTIFY = "notify"
    RESTART_WORKERS = "restart-workers"
    RELAUNCH_NODE = "relaunch-node"
    STOP_JOB = "stop-job"


class Culprit(Struct, frozen=True, kw_only=True):
    node: NodeId
    global_rank: int
    """-1: the node as a whole."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a diagnostician concludes, with what it saw and how sure it is."""

    fault: FaultClass
    diagnostician: str
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[str, ...] = ()
    """One sentence each."""
    confidence: float = 0.0
    """0 to 1."""
    action: ActionKind = ActionKind.NOTIFY
    reasoning: str = ""
    """Why this action and not a cheaper or a dearer one, in one sentence."""


class HangFound(Struct, tag=True, frozen=True, kw_only=True):
    """Journalled: the round stands still, and the verdict says to act. Workers start again (or their node is replaced)."""

    round: Round
    verdict: Verdict
    stalled_for: float
    """Seconds since the newest progress of any worker."""


class FaultFound(Struct, tag=True, frozen=True, kw_only=True):
    """Journalled: something is wrong although the round makes progress, and the verdict says to act."""

    round: Round
    verdict: Verdict


WatchCommand = HangFound | FaultFound
"""Findings of the master's own shell; no client may send them."""


class PastVerdict(Struct, frozen=True, kw_only=True):
    """A verdict as it is remembered. An episode has one, however long it lasts; `count` says how often it was found again."""

    at: Micros
    round: Round
    verdict: Verdict
    count: int = 1
    last_at: Micros = Micros(0)
    """When it was last found; 0: only once."""
    has_acted: bool = False


class Autopsy(Struct, frozen=True, kw_only=True):
    """One page about a job that stood still, for people."""

    at: Micros
    round: Round
    stalled_for: float
    verdict: Verdict
    text: str
    """Markdown."""
    file: str = ""
    """Where the master wrote it; empty if it could not."""


class AskDiagnosis(Struct, tag=True, frozen=True, kw_only=True):
    """The newest verdicts, and the newest autopsy."""

    last: int = 50


class Diagnosis(Struct, tag=True, frozen=True, kw_only=True):
    verdicts: tuple[PastVerdict, ...] = ()
    """Oldest first."""
    autopsy: Autopsy | None = None
    now: Micros = Micros(0)
    """The master's clock when it answered; 0: not told."""


# What nodes are doing right now, for people.


class AskActivity(Struct, tag=True, frozen=True, kw_only=True):
    """The newest that nodes told of themselves."""


class NodeActivity(Struct, frozen=True, kw_only=True):
    node: NodeId
    phase: Phase | None = None
    """Of the worker that has been in its phase for longest."""
    step: int | None = None
    step_seconds: float = 0.0
    is_stalled: bool = False
    cpu: float | None = None
    """Cores in use; None: not told."""
    memory_bytes: int | None = None
    memory_limit_bytes: int = 0
    metrics: dict[str, float] = {}
    """Of its first worker that reports any."""
    memory_mb: float | UnsetType | None = UNSET
    memory_limit_mb: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        take_megabytes(self)


class Activity(Struct, tag=True, frozen=True, kw_only=True):
    nodes: tuple[NodeActivity, ...] = ()
