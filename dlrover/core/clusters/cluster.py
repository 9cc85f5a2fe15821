"""
The versions of a parameter-server cluster: which processes belong to the newest one, and how far it is.

A version is a set of fresh processes. Whatever changes the set of parameter servers, be it a loss, scaling or a migration, ends all of them but
the evaluator's and begins the next version. What crosses from one version to the next is the checkpoint and the data books, nothing else.

    GATHERING → RESTORING → TRAINING → PARKING → SAVING → GATHERING of the next version

For a save that shall be exact (`exact_saves`) the way leads from SAVING back to TRAINING of the same version.
A loss of a server, or of a coordinator, goes to GATHERING at once. Workers, and a chief beside living variables, come and go within a version.

Values in, sentences out: this room knows neither the platform nor the agents. `look` compares what is there with what shall be there, and may be
called as often as a caller likes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.outcome import micros
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import FRESH, NO_CUT, ClusterPhase, ClusterTask, VersionView
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Incarnation, Micros, NodeId, PlatformId, Round
from dlrover.protocol.messages.job import Idle, Run, Wait, Wish, WorldSpec

GATHER_PATIENCE = 600.0
"""Seconds for a wanted server to come. Then the job goes on with those that are there."""
RESTORE_PATIENCE = 600.0
"""Seconds for the chief to restore. Then the next version begins: its process may still be about to do it."""
PARK_PATIENCE = 30.0
"""Seconds for the step that a process is in. A process that is not parked by then is ended."""
SAVE_PATIENCE = 300.0
FINISH_PATIENCE = 60.0
"""Seconds for workers to end after the chief has."""
EVALUATION_PATIENCE = 300.0
"""Seconds for the last evaluation after the training."""
NUM_PAUSES = 5
TRAINED = (NodeType.CHIEF, NodeType.WORKER)
_OPEN = (ClusterPhase.TRAINING, ClusterPhase.PARKING)


class Seat(Struct, frozen=True, kw_only=True):
    """A node of the job with a live agent: the newest of its type and rank."""

    node: NodeId
    incarnation: Incarnation
    node_type: NodeType
    rank: int
    platform: PlatformId

    @property
    def label(self) -> str:
        return f"{self.node_type.value}-{self.rank}"


class Surroundings(Struct, frozen=True, kw_only=True):
    """What is there, and which servers shall be used."""

    seats: tuple[Seat, ...] = ()
    servers: tuple[PlatformId, ...] = ()
    """Wanted for the next version, in rank order."""
    is_complete: bool = True
    """The platform has brought all of them."""
    num_workers: int = 0
    """That the platform shall run."""


class TaskProcess(Struct, kw_only=True):
    """The process of a node, as the master wants it."""

    seat: Seat
    round: Round
    """Counts the starts of all processes of the job."""
    version: int
    is_bound: bool = False
    """It runs: it has told the address of its server."""
    address: str = ""
    """Of its server; until it is bound, the one of the process before it on this seat in this version."""
    is_coordinator: bool = False
    is_parked: bool = False
    is_ended: bool = False
    """It has done its work."""
    is_stopped: bool = False
    """It did not park in time and shall not run any more in this version."""

    @property
    def is_at_work(self) -> bool:
        return not self.is_ended and not self.is_stopped


class Failing(Struct, frozen=True):
    """How often the process of a seat failed in a row without progress of the job in between."""

    count: int
    progress: int


class Cluster(Struct, kw_only=True):
    version: int = 1
    phase: ClusterPhase = ClusterPhase.GATHERING
    since: Micros = Micros(0)
    """When the phase began."""
    number: int = 1
    """Of the view."""
    starts: int = 0
    processes: dict[NodeId, TaskProcess] = {}
    num_wanted_workers: int = 0
    servers: list[PlatformId] = []
    """Of this version, in rank order; empty while they are gathered."""
    addresses: list[str] = []
    restored_step: int | None = None
    saved_step: int = FRESH
    cut: int = 0
    """Consumption is booked under this number: what was reported before a save has a lower one than what was reported after it."""
    is_only_saving: bool = False
    """PARKING and SAVING serve a save of the chief's own cadence: whatever disturbs it, the version goes on."""
    num_parks: int = 0
    has_failure: bool = False
    """Some server did not come in time, and the job went on without it."""
    is_late: bool = False
    """The servers of this version have been waited for long enough."""
    finished_at: Micros | None = None
    """When the chief ended well: the training is over."""
    failing: dict[str, Failing] = {}
    progress: int = 0
    """Grows with what the job does."""
    began_at: Micros = Micros(0)
    start_seconds: float = 0.0
    """Until the first version trained; 0: it has not yet."""
    changes_since: Micros | None = None
    """When training stopped for a change of the servers that was planned; None: none is under way, or a loss came between."""
    pauses: list[float] = []
    """Seconds that the newest of these changes took."""

    # What the shell of the core asks for.

    def view(self) -> VersionView:
        return VersionView(
            number=self.number,
            version=self.version,
            phase=self.phase,
            servers=tuple(self.addresses),
            restored_step=self.restored_step,
            saved_step=self.saved_step,
            num_parks=self.num_parks,
            num_workers=sum(
                process.is_at_work and process.seat.node_type is NodeType.WORKER for process in self.processes.values()
            ),
            is_over=self.finished_at is not None,
            workers=self._worker_addresses(),
            num_wanted_workers=self.num_wanted_workers,
        )

    def task(self, node: NodeId) -> tuple[Round, ClusterTask] | None:
        """What the node shall run; None: nothing now."""
        process = self.processes.get(node)
        if process is None or not process.is_at_work:
            return None
        seat = process.seat
        return process.round, ClusterTask(version=process.version, node_type=seat.node_type, rank=seat.rank)

    def wish_of(self, node: NodeId) -> Wish:
        """What a live node shall be doing."""
        found = self.task(node)
        if found is not None:
            round_, task = found
            return Run(
                WorldSpec(
                    round=round_,
                    group_rank=0,
                    group_world_size=1,
                    first_global_rank=0,
                    local_world_size=1,
                    world_size=1,
                    coordinator="",
                    restart_count=round_ - 1,
                    task=task,
                )
            )
        if self.has_ended(node):
            return Idle("its process has done its work; others still work")
        return Wait(f"version {self.version} of the cluster does not need it now")

    def has_ended(self, node: NodeId) -> bool:
        process = self.processes.get(node)
        return process is not None and process.is_ended

    def round_of(self, node: NodeId) -> Round:
        """Of the process that the node shall run; 0: it shall run none."""
        process = self.processes.get(node)
        return process.round if process is not None and process.is_at_work else Round(0)

    def current(self, node: NodeId, round_: Round) -> TaskProcess:
        """The process of exactly this start, or `Rejected`: what an ended process says changes nothing."""
        process = self.processes.get(node)
        if process is None or process.round != round_ or not process.is_at_work:
            raise Rejected(
                f"Process {round_} of node {node} belongs to an older version of the cluster; {self.version} is the newest. It "
                "shall end.",
                code=ErrorCode.STALE_ROUND,
            )
        return process

    def deadline(self) -> Micros | None:
        """When time alone changes something."""
        if self.finished_at is not None:
            is_training = any(each.seat.node_type in TRAINED and each.is_at_work for each in self.processes.values())
            return Micros(self.finished_at + micros(FINISH_PATIENCE if is_training else EVALUATION_PATIENCE))
        match self.phase:
            case ClusterPhase.GATHERING:
                return None if self.is_late else Micros(self.since + micros(GATHER_PATIENCE))
            case ClusterPhase.RESTORING:
                return Micros(self.since + micros(RESTORE_PATIENCE))
            case ClusterPhase.PARKING:
                return Micros(self.since + micros(PARK_PATIENCE))
            case ClusterPhase.SAVING:
                return Micros(self.since + micros(SAVE_PATIENCE))
            case ClusterPhase.TRAINING:
                return None

    @property
    def is_settled(self) -> bool:
        """The newest version trains, and nothing of the one before it can still run."""
        processes = [each for each in self.processes.values() if each.seat.node_type in TRAINED and each.is_at_work]
        return self.phase is ClusterPhase.TRAINING and all(each.is_bound for each in processes)

    def is_complete(self, now: Micros) -> bool:
        """Whether the job has done its work."""
        if self.finished_at is None:
            return False
        left = [each for each in self.processes.values() if each.seat.node_type is not NodeType.PS and each.is_at_work]
        if not left:
            return True
        is_training = any(each.seat.node_type in TRAINED for each in left)
        # An evaluator that never said anything is a script of the user's own, and would wait for checkpoints for ever.
        is_evaluated = not is_training and not any(each.is_bound for each in left)
        patience = FINISH_PATIENCE if is_training else EVALUATION_PATIENCE
        return is_evaluated or now >= self.finished_at + micros(patience)

    # What happens.

    def look(self, around: Surroundings, now: Micros) -> list[str]:
        """Compare what is there with what shall be there. The sentences say what follows."""
        said: list[str] = []
        if around.num_workers != self.num_wanted_workers:
            self.num_wanted_workers = around.num_workers
            self.number += 1
        gone = self._drop_gone(around)
        lost = [each.seat.label for each in gone if each.is_coordinator or each.seat.platform in self.servers]
        is_chief_lost = any(process.seat.node_type is NodeType.CHIEF for process in gone)
        if self.finished_at is not None:
            return said
        if lost and self.phase is not ClusterPhase.GATHERING:
            self._begin_version(f"{lost[0]} is lost", now, said)
        if self.is_only_saving and not self._chief():
            self._go_on("The chief was lost before it had saved: the others go on.", now, said)
        if self.phase is ClusterPhase.SAVING and not self._chief():
            self._begin_version("the chief was lost while it saved", now, said)
        if self.phase is ClusterPhase.RESTORING and is_chief_lost:
            # It may live on where the master cannot see it: it must not restore variables that others train.
            self._begin_version("the chief was lost while it restored the model", now, said)
        self._start_missing(around)
        if self.phase is ClusterPhase.GATHERING:
            self._gather(around, now, said)
        is_open = self.phase is ClusterPhase.TRAINING or self.is_only_saving
        if is_open and self._shall_change(around):
            if not self.is_only_saving:
                self._begin_parking(now)
            self.is_only_saving = False
            self.changes_since = now
            said.append(
                f"The parameter servers change from {len(self.servers)} to {len(around.servers)}: chief and workers park, the "
                "chief saves, then they go on with the new ones."
            )
        if self.phase is ClusterPhase.PARKING:
            self._park(now, said)
        return said

    def expire(self, now: Micros) -> list[str]:
        """The deadline of the phase, if it has passed. `look` goes on from there."""
        at = self.deadline()
        if at is None or now < at or self.finished_at is not None:
            return []
        said: list[str] = []
        match self.phase:
            case ClusterPhase.GATHERING:
                self.is_late = True
            case ClusterPhase.RESTORING:
                self._begin_version(f"the chief has not restored the model within {RESTORE_PATIENCE:g} s", now, said)
            case ClusterPhase.PARKING:
                late = self._unparked()
                if self.is_only_saving:
                    self._save_without(late, now, said)
                    return said
                said += [f"{each.seat.label} has not parked within {PARK_PATIENCE:g} s and is ended." for each in late]
                for each in late:
                    each.is_stopped = True
                    self.number += 1
                if self._chief() is None:
                    self._begin_version("there is no chief that could save", now, said)
            case ClusterPhase.SAVING if self.is_only_saving:
                self._go_on(f"The chief has not saved within {SAVE_PATIENCE:g} s: the others go on.", now, said)
            case ClusterPhase.SAVING:
                self._begin_version(f"the chief has not saved within {SAVE_PATIENCE:g} s", now, said)
            case ClusterPhase.TRAINING:
                pass
        return said

    def bound(self, process: TaskProcess, address: str, *, is_coordinator: bool = False) -> None:
        process.is_bound, process.address, process.is_coordinator = True, address, is_coordinator
        if process.seat.node_type is NodeType.WORKER:
            self.number += 1

    def restored(self, process: TaskProcess, step: int, now: Micros) -> list[str]:
        if process.seat.node_type is not NodeType.CHIEF or self.phase not in (ClusterPhase.RESTORING, *_OPEN):
            raise Rejected(
                f"{process.seat.label} has restored a model in phase {self.phase.value}; the chief does so in phase restoring.",
                code=ErrorCode.MALFORMED,
            )
        if self.phase is not ClusterPhase.RESTORING:
            return []  # a new chief beside living variables: nothing was restored
        self.restored_step = step
        self._enter(ClusterPhase.TRAINING, now)
        self.start_seconds = self.start_seconds or (now - self.began_at) / MICROS_PER_SECOND
        if self.changes_since is not None:
            self.pauses = [*self.pauses, (now - self.changes_since) / MICROS_PER_SECOND][-NUM_PAUSES:]
            self.changes_since = None
        what = "a fresh model" if step == FRESH else f"the model of step {step}"
        return [f"Version {self.version} trains {what} on {len(self.servers)} parameter servers."]

    def renew(self, process: TaskProcess, reason: str, now: Micros) -> list[str]:
        """On the word of the chief."""
        if process.seat.node_type is not NodeType.CHIEF:
            raise Rejected(
                f"{process.seat.label} wants the next version; only the chief begins one.", code=ErrorCode.MALFORMED
            )
        said: list[str] = []
        if self.phase is not ClusterPhase.GATHERING and self.finished_at is None:
            self._begin_version(reason, now, said)
        return said

    def parked(self, process: TaskProcess) -> None:
        process.is_parked = True

    def park_for_save(self, process: TaskProcess, now: Micros) -> None:
        """For the chief. While a change of the servers is under way there is a save in it anyway."""
        if process.seat.node_type is not NodeType.CHIEF:
            raise Rejected(f"{process.seat.label} wants to save; only the chief does.", code=ErrorCode.MALFORMED)
        if self.phase is ClusterPhase.TRAINING and self.finished_at is None:
            self.is_only_saving = True
            self._begin_parking(now)

    def take_cut(self, process: TaskProcess) -> int:
        """The number under which everything was booked that the coming checkpoint contains."""
        check_saver(process)
        self.cut += 1
        return self.cut - 1

    def saved(self, process: TaskProcess, step: int, now: Micros) -> list[str]:
        said: list[str] = []
        self.saved_step = step
        self.number += 1
        if self.is_only_saving and self.phase is ClusterPhase.SAVING:
            self._go_on("", now, said)
        elif self.phase is ClusterPhase.SAVING:
            since = self.changes_since
            self._begin_version(f"step {step} is saved and the parameter servers change", now, said)
            self.changes_since = since
        return said

    def returned_to(self, cut: int) -> None:
        """The books are those of this cut: later numbers must not fit what is booked from now on."""
        if cut != NO_CUT:
            self.cut = max(self.cut, cut + 1)

    def ended_well(self, node: NodeId, round_: Round, now: Micros) -> list[str]:
        process = self.processes.get(node)
        if process is None or process.round != round_ or not process.is_at_work:
            return []
        kind = process.seat.node_type
        if kind is NodeType.PS and self.finished_at is None:
            return self._vital_ended(process, now)
        process.is_ended = True
        self.number += 1
        if kind is NodeType.CHIEF:
            self.finished_at = now
            return ["The chief has ended well: the training is over."]
        return []

    def failed(self, node: NodeId, round_: Round, now: Micros, *, is_long_life: bool) -> tuple[list[str], int]:
        """What follows, and how often the seat has failed in a row; 0: a process that does not count any more."""
        process = self.processes.get(node)
        if process is None or process.round != round_ or not process.is_at_work:
            return [], 0
        seat = process.seat
        if self.finished_at is not None:
            process.is_ended = True
            self.number += 1
            return [f"{seat.label} failed after the training was over."], 0
        former = self.failing.get(seat.label)
        has_progress = former is None or former.progress < self.progress or is_long_life
        count = 1 if has_progress or former is None else former.count + 1
        self.failing[seat.label] = Failing(count, self.progress)
        if seat.node_type is NodeType.PS or process.is_coordinator:
            return self._vital_ended(process, now), count
        said: list[str] = []
        if seat.node_type is NodeType.CHIEF and self.is_only_saving:
            self._go_on("The chief failed before it had saved: the others go on.", now, said)
        elif seat.node_type is NodeType.CHIEF and self.phase is ClusterPhase.SAVING:
            self._begin_version("the chief was lost while it saved", now, said)
            return said, count
        self._restart(process)
        return [*said, f"The process of {seat.label} starts again; the others go on."], count

    def master_restarted(self, by: int) -> None:
        """No process could report meanwhile."""
        self.since, self.began_at = Micros(self.since + by), Micros(self.began_at + by)
        if self.changes_since is not None:
            self.changes_since = Micros(self.changes_since + by)
        if self.finished_at is not None:
            self.finished_at = Micros(self.finished_at + by)

    # How.

    def _vital_ended(self, process: TaskProcess, now: Micros) -> list[str]:
        """A server, or a coordinator: no version goes on without it."""
        said: list[str] = []
        if self.phase is ClusterPhase.GATHERING:
            self._restart(process)  # nobody has met it
        else:
            self._begin_version(f"{process.seat.label} is lost", now, said)
        return said

    def _begin_version(self, why: str, now: Micros, said: list[str]) -> None:
        self.version += 1
        self.servers, self.addresses, self.restored_step, self.is_late, self.has_failure = [], [], None, False, False
        self.is_only_saving, self.changes_since = False, None
        self.processes = {
            node: each for node, each in self.processes.items() if each.seat.node_type is NodeType.EVALUATOR
        }
        self._enter(ClusterPhase.GATHERING, now)
        said.append(f"Version {self.version} of the cluster begins: {why}.")

    def _drop_gone(self, around: Surroundings) -> list[TaskProcess]:
        """Processes whose node or agent is there no more."""
        there = {seat.node: seat for seat in around.seats}
        gone = []
        for node, process in list(self.processes.items()):
            if there.get(node) == process.seat:
                continue
            if process.is_ended and there.get(node) is None:
                continue  # its work is done, wherever its node is now
            self._drop(node)
            gone.append(process)
        return gone

    def _start_missing(self, around: Surroundings) -> None:
        done = [each.seat.label for each in self.processes.values() if each.is_ended]
        for seat in around.seats:
            if seat.node_type is NodeType.PS or seat.node in self.processes or seat.label in done:
                continue
            self._start(seat)

    def _gather(self, around: Surroundings, now: Micros, said: list[str]) -> None:
        wanted = {seat.platform: seat for seat in around.seats if seat.platform in around.servers}
        for node, process in list(self.processes.items()):
            if process.seat.node_type is NodeType.PS and process.seat.platform not in wanted:
                self._drop(node)
        for platform in around.servers:
            if platform in wanted and wanted[platform].node not in self.processes:
                self._start(wanted[platform])
        ready = [self.processes[wanted[each].node] for each in around.servers if each in wanted]
        ready = [process for process in ready if process.is_bound]
        is_all_there = around.is_complete and len(ready) == len(around.servers)
        if not ready or not (is_all_there or self.is_late):
            return
        if not is_all_there:
            self.has_failure = True
            said.append(
                f"Only {len(ready)} of {len(around.servers)} parameter servers came in time: the job goes on with them."
            )
            kept = [process.seat.node for process in ready]
            self.processes = {
                node: each
                for node, each in self.processes.items()
                if each.seat.node_type is not NodeType.PS or node in kept
            }
        self.servers = [process.seat.platform for process in ready]
        self.addresses = [process.address for process in ready]
        self._enter(ClusterPhase.RESTORING, now)

    def _shall_change(self, around: Surroundings) -> bool:
        """Another set is wanted, and all of it is there. A process of a wanted server starts with the next version."""
        there = [seat.platform for seat in around.seats]
        is_there = around.is_complete and all(each in there for each in around.servers)
        return bool(around.servers) and is_there and list(around.servers) != self.servers

    def _park(self, now: Micros, said: list[str]) -> None:
        if self._unparked():
            return
        if self._chief() is None:
            return  # it comes back, and parks
        self._enter(ClusterPhase.SAVING, now)

    def _begin_parking(self, now: Micros) -> None:
        self.num_parks += 1
        self._enter(ClusterPhase.PARKING, now)

    def _save_without(self, late: list[TaskProcess], now: Micros, said: list[str]) -> None:
        """No process is ended for the sake of a save: it is made while some still train, as one without `exact_saves`."""
        who = ", ".join(each.seat.label for each in late)
        if any(each.seat.node_type is NodeType.CHIEF for each in late):
            self._go_on(f"{who} has not parked within {PARK_PATIENCE:g} s for an exact save: all go on.", now, said)
            return
        said.append(f"{who} has not parked within {PARK_PATIENCE:g} s: this save is not exact.")
        self._enter(ClusterPhase.SAVING, now)

    def _go_on(self, sentence: str, now: Micros, said: list[str]) -> None:
        """The version trains on, as if no save had been wanted."""
        self.is_only_saving = False
        for process in self.processes.values():
            process.is_parked = False
        self._enter(ClusterPhase.TRAINING, now)
        if sentence:
            said.append(sentence)

    def _unparked(self) -> list[TaskProcess]:
        trained = [each for each in self.processes.values() if each.seat.node_type in TRAINED and each.is_at_work]
        return [each for each in trained if not each.is_parked and each.version == self.version]

    def _chief(self) -> TaskProcess | None:
        chiefs = (each for each in self.processes.values() if each.seat.node_type is NodeType.CHIEF)
        return next((each for each in chiefs if each.is_at_work), None)

    def _drop(self, node: NodeId) -> None:
        del self.processes[node]
        self.number += 1

    def _restart(self, process: TaskProcess) -> None:
        self._start(process.seat)
        self.processes[process.seat.node].address = process.address

    def _worker_addresses(self) -> dict[int, str]:
        workers = [each for each in self.processes.values() if each.seat.node_type is NodeType.WORKER]
        found = {each.seat.rank: each.address for each in workers if each.is_at_work and each.address}
        return dict(sorted(found.items()))

    def _start(self, seat: Seat) -> None:
        self.starts += 1
        self.number += 1
        self.processes[seat.node] = TaskProcess(seat=seat, round=Round(self.starts), version=self.version)

    def _enter(self, phase: ClusterPhase, now: Micros) -> None:
        self.phase, self.since = phase, now
        self.number += 1


def check_saver(process: TaskProcess) -> None:
    """Raises `Rejected` for all but the chief."""
    if process.seat.node_type is not NodeType.CHIEF:
        raise Rejected(f"{process.seat.label} cannot save; only the chief does.", code=ErrorCode.MALFORMED)


def seats_of(seats: Sequence[Seat]) -> tuple[Seat, ...]:
    """The newest node of each type and rank, but every server: old and new ones are there together while they are exchanged."""
    newest: dict[tuple[NodeType, int, PlatformId], Seat] = {}
    for seat in sorted(seats, key=lambda each: (each.platform, each.node)):
        by = seat.platform if seat.node_type is NodeType.PS else PlatformId(-1)
        newest[seat.node_type, seat.rank, by] = seat
    return tuple(newest.values())
