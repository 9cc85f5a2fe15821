"""
What the variables of a parameter-server job have learned from, and what has to be true of it (I3).

Variables live in the parameter-server processes of one version, and each update of a worker lands there at once, whether or not it is ever
heard of. A checkpoint holds what had landed when it was written. Its *cut* divides that: what was confirmed to its reader before the
chief asked for the cut is in the checkpoint for sure; the rest may be in it and unknown to the books, and is read again after a restore.

So whenever a chief has restored a model: what it contains for sure and what the books still have to give out share nothing, and together with
the doubtful rest they are the epochs so far. A save of a planned change has no doubt but for processes that the master had given up.
"""

from __future__ import annotations

from dlrover.core.data.dataset import Dataset
from dlrover.core.data.ranges import Range, overlapping, said, subtract, united
from dlrover.protocol.messages.cluster import ClusterPhase, VersionView
from dlrover.protocol.messages.data import Consumption, DatasetSpec, LeasedShard
from dlrover.protocol.messages.fleet import NodeType
from dlrover.simulator.parts import AgentPart, VirtualGroup
from dlrover.simulator.truth.invariants import Violation

PARKED = (ClusterPhase.PARKING, ClusterPhase.SAVING)


class Update:
    """One step of one process: these records are in the variables from now on."""

    __slots__ = ("is_confirmed", "place")

    def __init__(self, place: Range) -> None:
        self.place = place
        self.is_confirmed = False
        """The master has told its reader that it is booked."""


class Variables:
    """In the memory of the parameter servers of one version. They are gone with the first of these processes."""

    def __init__(self, servers: tuple[VirtualTask, ...], updates: list[Update]) -> None:
        self.servers = servers
        self.updates = updates
        self.num_restored = len(updates)
        """Of the checkpoint that they began with."""
        self.is_frozen = False
        """All are parked and the chief writes."""

    @property
    def are_there(self) -> bool:
        return all(server.is_running for server in self.servers)

    def learn(self, shard: LeasedShard, start: int, count: int, *, by: VirtualTask, is_current: bool) -> Update:
        if self.is_frozen and is_current:
            raise Violation("cluster", f"{by.label} trains while the chief saves for a planned change")
        update = Update(Range(shard.epoch, start, start + count, shard.partition, shard.listing))
        self.updates.append(update)
        return update


class StoredModel:
    """A complete checkpoint, and what lies beside it."""

    def __init__(self, sure: list[Range], doubtful: list[Range], cut: int, text: str) -> None:
        self.sure = sure
        self.doubtful = doubtful
        self.cut = cut
        self.text = text

    @property
    def step(self) -> int:
        return len(self.sure) + len(self.doubtful)


class ModelStorage:
    """The model directory. The newest checkpoint is the one that was written last, no matter which process wrote it."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self.newest: StoredModel | None = None

    def check_restored(self, stored: StoredModel | None, books: Dataset) -> list[Update]:
        """The books have gone back with a model. Gives what it contains; what is read again counts as not in it."""
        sure, doubtful = ([], []) if stored is None else (stored.sure, stored.doubtful)
        left = unread(books)
        if twice := list(overlapping(_sorted([*sure, *left]))):
            raise Violation("I3", f"the restored model and what is left to read have records twice: {said(twice[0])}")
        if missing := subtract(self._owed(books), [*sure, *doubtful, *left]):
            raise Violation(
                "I3", f"neither the restored model nor what is left to read has these records: {said(missing[0])}"
            )
        updates = []
        for place in (*sure, *united(subtract(doubtful, [*left, *sure]))):  # it may have been learned twice
            updates.append(Update(place))
            updates[-1].is_confirmed = True
        return updates

    def check_complete(self, books: Dataset) -> None:
        """The job has completed: the last checkpoint has seen everything."""
        stored = self.newest
        seen = [] if stored is None else [*stored.sure, *stored.doubtful]
        if missing := subtract(self._owed(books), [*seen, *(each.range for each in books.set_aside)]):
            raise Violation("I3", f"the job has completed, and its last checkpoint has not seen {said(missing[0])}")

    def _owed(self, books: Dataset) -> list[Range]:
        return [Range(epoch, 0, self._spec.size) for epoch in range(books.epoch + 1)]


def unread(books: Dataset) -> list[Range]:
    held = [each.range for each in books.held.values()]
    return [*books.returned, *held, *(each.range for each in books.set_aside), *books.fresh_ranges()]


def _sorted(ranges: list[Range]) -> list[Range]:
    return sorted(ranges, key=lambda each: (each.key, each.start))


class VirtualTask:
    """One process."""

    def __init__(self, agent: AgentPart, group: VirtualGroup) -> None:
        task = group.world.task
        assert task is not None, "of a world"
        self.agent, self.group = agent, group
        self.kind, self.version = task.node_type, task.version
        self.label = f"{task.node_type.value}-{task.rank}"
        self.address = "" if self.kind is NodeType.EVALUATOR else f"host-{agent.node.number}"
        self.view = VersionView()
        self.variables: Variables | None = None
        self.restored: StoredModel | None = None
        self.restored_into: Variables | None = None
        """Of a chief that restores, and has perhaps not been heard yet."""
        self.is_opening = False
        """A session is being opened."""
        self.is_over = False
        """It was told so."""
        self.parked_for = 0
        """Number of the park that it has told of."""
        self.asked_for = -1
        """Number of the last park when it asked for one."""
        self.wants_save = False
        """Of a chief: it reads no further until what it has read is told, and saves then."""
        self.is_saving = False
        self.is_busy = False
        """In a step that takes long."""
        self.is_finishing = False
        """All data are read, or the last save is under way."""
        self.has_registered = False
        self.has_read_all = False
        self.shards: list[LeasedShard] = []
        self.done: dict[int, int] = {}
        self.untold: list[tuple[Consumption, Update]] = []
        self.telling: list[Update] | None = None
        """Of an exchange whose answer is awaited."""

    @property
    def is_running(self) -> bool:
        group = self.group
        return self.agent.is_alive and self.agent.workers.group is group and group.is_up and not group.is_stopping

    @property
    def can_act(self) -> bool:
        return self.is_running and not self.is_over and self.agent.sleep.since is None

    def reaches(self, other: VirtualTask) -> bool:
        is_cut = self.agent.node.num_deep_cuts or other.agent.node.num_deep_cuts
        return other.is_running and other.agent.sleep.since is None and not (is_cut and other.agent is not self.agent)

    @property
    def is_parked(self) -> bool:
        return self.view.phase in PARKED and self.parked_for == self.view.num_parks

    @property
    def has_variables(self) -> bool:
        return self.variables is not None and all(map(self.reaches, self.variables.servers))
