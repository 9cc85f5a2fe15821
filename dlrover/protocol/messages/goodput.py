"""
Where the time of a job went, and what happened in it: the words of the goodput accountant and of the job's events.

Time is counted in node-seconds: each second of each place in the job (a node rank) is in exactly one class. What the job decides by itself
(meeting, checking, stopping, missing) it books by itself; the time in which workers run is split by what they tell of themselves.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, NodeRank, Round

MAX_EVENTS_PER_ANSWER = 1000
MAX_LABELS = 16
"""Of an event that comes from outside; those beyond are left out."""


class TimeClass(enum.StrEnum):
    """Where a second of a node went. Each second is in exactly one."""

    START_UP = "start-up"
    RENDEZVOUS = "rendezvous"
    NODE_CHECK = "node-check"
    COMPUTE = "compute"
    """New steps. The only good one."""
    REDO = "redo"
    """Steps that were done before and lost."""
    CHECKPOINT = "checkpoint"
    """Training stood still for a save."""
    RESTORE = "restore"
    DATA_WAIT = "data-wait"
    EVALUATION = "evaluation"
    HANG = "hang"
    STRAGGLER_WAIT = "straggler-wait"
    STOPPING = "stopping"
    """Workers end after a fault or a change of membership."""
    DOWN = "down"
    """The node is gone and its replacement is not there yet."""
    IDLE = "idle"
    """Standby, or nothing to do."""


SPLIT = (
    TimeClass.START_UP,
    TimeClass.RESTORE,
    TimeClass.REDO,
    TimeClass.HANG,
    TimeClass.STRAGGLER_WAIT,
    TimeClass.CHECKPOINT,
    TimeClass.DATA_WAIT,
    TimeClass.EVALUATION,
    TimeClass.STOPPING,
    TimeClass.COMPUTE,
)
"""What the time of running workers is split into, in the order of `NodeAccount.millis`. New ones are added at the end."""


class NodeAccount(Struct, frozen=True, array_like=True):
    """What the workers of one node did since their round began. A sum, not a difference: it may be lost, late or repeated."""

    node: NodeId
    incarnation: Incarnation
    round: Round
    step: int | None
    """The greatest that any of its workers told of in this round; None: none that means the same in each life."""
    millis: tuple[int, ...]
    """Milliseconds by class, in the order of `SPLIT`; the mean over the node's workers."""
    model_step: int | None = None
    """The greatest number of steps in the model of any of its workers; None: nothing counts them."""
    is_redo_known: bool = True
    """Else the workers go on after others, and nothing tells from where: repeated steps are among the new ones."""


class AccountGoodput(Struct, tag=True, frozen=True, kw_only=True):
    """
    Journalled, for all nodes with news at once: every few seconds in a small job, every 30 s in a large one, and before a round ends.

    Changes between meeting, running, stopping and being gone need no command of their own: the job sees them itself.
    """

    accounts: tuple[NodeAccount, ...]


class AskGoodput(Struct, tag=True, frozen=True, kw_only=True):
    """Where the time went so far."""


class AskFault(Struct, tag=True, frozen=True, kw_only=True):
    """What stopped the workers of this round, as far as it is known by now."""

    round: Round


class FaultTold(Struct, tag=True, frozen=True, kw_only=True):
    kind: str = ""
    """As in `FaultCost`; empty: no fault is known in that round."""
    cause: str = ""
    node_rank: NodeRank | None = None
    global_rank: int | None = None
    """Of the worker that failed first, where one did."""


class NodeGoodput(Struct, frozen=True, kw_only=True):
    """Of one place in the job, through all nodes that held it."""

    node_rank: NodeRank
    node: NodeId
    """The newest one."""
    seconds: dict[TimeClass, float]
    lived: float
    """What they sum to."""
    doing: TimeClass | None
    """Now; None: the place is not part of the job any more."""


class FaultCost(Struct, frozen=True, kw_only=True):
    """Something that stopped the workers, and what it cost until new steps were computed again."""

    number: int
    at: Micros
    kind: str
    """`worker`, `node`, `hang` or `membership`."""
    cause: str
    round: Round
    """That it ended."""
    node_rank: NodeRank | None = None
    global_rank: int | None = None
    seconds: dict[TimeClass, float] = {}
    """Node-seconds."""
    stood_still: float | None = None
    """Seconds until the next round began; None: it has not."""
    recovered_after: float | None = None
    """Seconds until a worker was known to compute new steps; None: none was yet."""
    is_redo_known: bool = True
    """Else nothing tells from where the workers went on: `seconds` has no repeated steps, and `recovered_after` is the first step of any kind."""


class Counterfactual(Struct, frozen=True, kw_only=True):
    """What another choice would have saved, in node-seconds."""

    choice: str
    seconds: float
    text: str


class GoodputStatus(Struct, tag=True, frozen=True, kw_only=True):
    now: Micros
    wall: float
    """Seconds since the first node came."""
    seconds: dict[TimeClass, float]
    """Node-seconds of the whole job. What running workers have not told yet is counted as it looks now, and may turn out to be something else."""
    beginning: dict[TimeClass, float]
    """Those of them that were spent before the first steps and that no fault is to blame for."""
    goodput: float
    """Share of new steps in all time but idle time, from 0 to 1."""
    goodput_since_start: float
    """The same without `beginning`."""
    highest_step: int | None = None
    nodes: tuple[NodeGoodput, ...] = ()
    faults: tuple[FaultCost, ...] = ()
    """The newest ones."""
    num_faults: int = 0
    counterfactuals: tuple[Counterfactual, ...] = ()
    booked: dict[TimeClass, float] = {}
    """`seconds` without what may still turn out to be something else: each of them only grows."""
    is_redo_known: bool = True
    """Else repeated steps are counted as new ones after some of the faults: goodput is at most what it says."""


# Events: what happened, for people.


class JobEvent(Struct, frozen=True, kw_only=True):
    number: int
    """Growing from 1 in the life of a job."""
    at: Micros
    level: str
    """`info`, `warn` or `error`."""
    name: str
    """`round-started`, `worker-failed`, `hang-found`, `checkpoint-committed`, ..."""
    text: str
    node: NodeId | None = None
    rank: int | None = None
    labels: dict[str, str] = {}


class AskEvents(Struct, tag=True, frozen=True, kw_only=True):
    """What happened after an event that is known already, oldest first."""

    after: int = 0
    limit: int = 200
    """At most `MAX_EVENTS_PER_ANSWER`. The newest ones, unless `after` is given."""
    wait: float = 0.0
    """Seconds for which to wait for the first one."""


class Events(Struct, tag=True, frozen=True, kw_only=True):
    events: tuple[JobEvent, ...]
    newest: int = 0
    """Number of the newest event; ask again after the last one you have."""
    num_dropped: int = 0
    """Left out because too many came at once."""
