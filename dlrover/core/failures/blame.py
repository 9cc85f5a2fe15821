"""
Restarts: what a worker's failure means, and how often the job may begin again.

All failures of one round are one incident. The first of them is its cause, the others are usually its consequences: a
peer that lost its connection, a worker that we stopped. The job does not wait for the cause to be known: the next round opens at
the first report, and until that round completes a better first failure may still take the blame. Only at completion the
restart is charged, once, to the node of the first failure. So the budget is never charged twice, and never to the
messenger.

Without `--max-restarts` the job is restarted for as long as it makes progress: at most 3 times in a row without, and never more than 3 times after
the same traceback at the same step. What progress is, and how a crash loop is told from a script that counts its steps anew in each epoch, is
said in `reach`. Of such a script "the same step" is the same step of the same epoch and model.
"""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from dlrover.agreed.mistakes import SENTENCE, Alike, is_mistake
from dlrover.agreed.reach import NOTHING_TOLD, furthest, is_further, is_start_told
from dlrover.agreed.worker_failure import is_device_fault, is_out_of_memory, is_secondary, priority, traceback_digest
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    DistinctFailure,
    ExitReason,
    FailureKind,
    FirstFailure,
    Micros,
    NodeRank,
    RestartPolicy,
    Round,
    WorkerFailure,
)
from dlrover.protocol.messages.watch import Reach

LATE_FAILURE = 5.0
"""Seconds after an incident during which a late report may still name a better first failure."""
MAX_PORTS_TAKEN = 3
"""So many times in a row a round is repeated because its coordinator's port was taken; then something else is wrong."""
NUM_CRASHES = 64
"""So many different crashes are remembered for recognising a loop."""
NUM_DISTINCT = 16
"""So many ways to fail are kept of one incident, the first ones; of an error storm these tell everything."""
HOUR = 3600.0
"""Seconds for which hangs are counted."""
_KEPT_HANGS = 64
_SHORT = 160
"""Characters of a message that is repeated to every node."""


class Incident(Struct):
    """Everything that went wrong in one round."""

    round: Round
    first: FirstFailure
    began_at: Micros
    """When the first report of it arrived."""
    step: int | None
    """Greatest step that any report of the round named."""
    lived: float
    reach: Reach = NOTHING_TOLD
    num_records: int = 0
    """Consumed of all datasets of the job when it failed."""
    is_member_lost: bool = False
    """A member of the world went too: then workers that only lost a peer have told nothing about themselves."""
    is_node_suspect: bool = False
    """A diagnosis says that the node is to blame."""
    is_node_replaced: bool = False
    """The platform gives another node for it, which that budget pays."""
    is_settled: bool = False
    """The next round has completed: charged, only the record may still improve."""
    has_whole_state: bool = False
    """All who told of it can go on without the memory of another node."""
    distinct: list[DistinctFailure] = []
    """Each way to fail once, in the order in which they were told. What was stopped by us failed in no way."""
    world_size: int = 0
    """Of the round; 0: unknown."""
    alike: Alike = field(default_factory=Alike)

    @property
    def is_secondary(self) -> bool:
        """What was told so far is the consequence of another failure."""
        return is_secondary(self.first.failure)

    def master_restarted(self, outage: int) -> None:
        """Reports of it could not arrive meanwhile; they have the rest of their time again."""
        self.began_at = Micros(self.began_at + outage)


class Crash(Struct):
    """One way to crash, and how often the job was restarted after it."""

    step: int | None
    traceback_digest: str
    num_restarts: int
    model_step: int = 0
    data: tuple[int, int] = (0, 0)
    """Both only of a script that counts its steps anew: for it the step alone is no place."""


class Hang(Struct, frozen=True):
    at: Micros
    node_rank: NodeRank


class Hangs(Struct):
    """What was found within the last hour, oldest first."""

    recent: list[Hang] = []

    def since(self, now: Micros) -> list[Hang]:
        return [hang for hang in self.recent if hang.at > now - micros(HOUR)]

    def add(self, hang: Hang) -> None:
        self.recent = [*self.since(hang.at), hang][-_KEPT_HANGS:]


class RestartDecision(Struct, frozen=True):
    sentence: str
    reason: ExitReason | None = None
    """None: restart. Else the job ends for this reason."""
    is_elsewhere: bool = False
    """The workers cannot go on where they are, but might on another node, if there is one."""


class Restarts(Struct):
    """What was spent, and what the job achieved in between."""

    incident: Incident | None = None
    """The newest one."""
    num_restarts: int = 0
    """After failures; membership changes are not counted."""
    spent: dict[NodeRank, int] = {}
    """Restarts charged per node rank: the budget of `max_restarts`."""
    num_without_progress: int = 0
    """Charged restarts since the last progress."""
    num_ports_taken: int = 0
    """Rounds in a row that failed for a taken port, up to `port_taken_round`."""
    port_taken_round: Round = Round(0)
    best_step: int | None = None
    """Greatest step any report ever named."""
    best_reach: Reach = NOTHING_TOLD
    """The greatest of each other count."""
    best_records: int = 0
    crashes: list[Crash] = []
    """Oldest first."""

    def open_incident(self, round_: Round) -> Incident | None:
        """The incident of this round while it may still change."""
        incident = self.incident
        return incident if incident is not None and incident.round == round_ and not incident.is_settled else None

    def settle(self, policy: RestartPolicy) -> None:
        """The next round completes: charge the incident that led to it, if one did."""
        incident = self.incident
        if incident is None or incident.is_settled:
            return
        incident.is_settled = True
        self.num_restarts += 1
        if incident.first.failure.kind is FailureKind.PORT_TAKEN:
            self.num_ports_taken = self.num_ports_taken_before(incident.round) + 1
            self.port_taken_round = incident.round
        elif is_charged(incident):
            node_rank = incident.first.node_rank
            self.spent[node_rank] = self.spent.get(node_rank, 0) + 1
            if made_progress(policy, self, incident):
                self.num_without_progress = 0
            self.num_without_progress += 1
            self._remember_crash(incident)
        if incident.step is not None and (self.best_step is None or incident.step > self.best_step):
            self.best_step = incident.step
        self.best_reach = furthest(self.best_reach, incident.reach)
        self.best_records = max(self.best_records, incident.num_records)

    def is_counting_anew(self, incident: Incident) -> bool:
        """Whether the script does, as seen in this life or in one before."""
        return incident.reach.is_counting_anew or self.best_reach.is_counting_anew

    def node_replaced(self, incident: Incident) -> None:
        """Its rank begins anew, on another node."""
        incident.is_node_replaced = True
        self.spent.pop(incident.first.node_rank, None)
        self.num_without_progress = 0

    def num_ports_taken_before(self, round_: Round) -> int:
        """How many rounds just before this one failed for a taken port, without any other in between."""
        return self.num_ports_taken if self.port_taken_round == round_ - 1 else 0

    def num_same_crash(self, incident: Incident) -> int:
        """How often the job was restarted after this very crash before."""
        crash = self._find_crash(incident)
        return 0 if crash is None else crash.num_restarts

    def _find_crash(self, incident: Incident) -> Crash | None:
        digest = traceback_digest(incident.first.failure)
        place = self._place(incident)
        for crash in self.crashes:
            if digest and digest == crash.traceback_digest and (crash.step, crash.model_step, crash.data) == place:
                return crash
        return None

    def _remember_crash(self, incident: Incident) -> None:
        crash = self._find_crash(incident)
        if crash is not None:
            crash.num_restarts += 1
        elif digest := traceback_digest(incident.first.failure):
            step, model_step, data = self._place(incident)
            self.crashes = [*self.crashes, Crash(step, digest, 1, model_step, data)][-NUM_CRASHES:]

    def _place(self, incident: Incident) -> tuple[int | None, int, tuple[int, int]]:
        reach = incident.reach if self.is_counting_anew(incident) else NOTHING_TOLD
        return incident.step, reach.model_step, reach.data


def improve(incident: Incident, candidate: FirstFailure) -> bool:
    """Let a later report take the blame if it tells of an earlier exit. Returns whether it did."""
    if priority(candidate.failure) >= priority(incident.first.failure):
        return False
    incident.first = candidate
    return True


def note(incident: Incident, step: int | None, lived: float, reach: Reach) -> None:
    """Another report of the same round: what counts is how far the furthest worker came."""
    if step is not None and (incident.step is None or step > incident.step):
        incident.step = step
        incident.first = replace(incident.first, step=step)
    incident.lived = max(incident.lived, lived)
    incident.reach = furthest(incident.reach, reach)


def count(incident: Incident, failures: tuple[WorkerFailure, ...], node_rank: NodeRank, host: str) -> bool:
    """Remember how these workers failed. Returns whether a way was among them that was not told before."""
    is_new = False
    for failure in failures:
        if failure.kind is FailureKind.STOPPED_BY_US:
            continue
        digest = traceback_digest(failure)
        incident.alike.count(failure, digest)
        for index, known in enumerate(incident.distinct):
            if (known.kind, known.traceback_digest) == (failure.kind, digest):
                incident.distinct[index] = replace(known, count=known.count + 1)
                break
        else:
            if len(incident.distinct) < NUM_DISTINCT:
                is_new = True
                told = DistinctFailure(
                    kind=failure.kind,
                    message=failure.message[:_SHORT],
                    node_rank=node_rank,
                    host=host,
                    global_rank=failure.global_rank,
                    traceback_digest=digest,
                )
                incident.distinct.append(told)
    return is_new


def is_charged(incident: Incident) -> bool:
    """Whether the restart costs budget: not for a taken port, and not for workers that merely lost a lost node."""
    failure = incident.first.failure
    is_consequence = incident.is_node_replaced or (is_secondary(failure) and incident.is_member_lost)
    return failure.kind is not FailureKind.PORT_TAKEN and not is_consequence


def made_progress(policy: RestartPolicy, restarts: Restarts, incident: Incident) -> bool:
    """One count beyond all lives before; workers that never told a step may live long instead."""
    step, best_step = incident.step, restarts.best_step
    if step is not None and (best_step is None or step > best_step):
        return True
    if is_further(incident.reach, restarts.best_reach) or incident.num_records > restarts.best_records:
        return True
    if step is None:
        return incident.lived >= policy.lived_long
    is_incomparable = restarts.is_counting_anew(incident) and not is_start_told(incident.reach)
    return is_incomparable and incident.reach.has_whole_epoch


def decide(policy: RestartPolicy, restarts: Restarts, incident: Incident) -> RestartDecision:
    """Restart or end, by what was spent before this incident."""
    restart = _decide(policy, restarts, incident)
    is_elsewhere = incident.is_node_replaced or _calls_for_another_node(incident, restart)
    return replace(restart, is_elsewhere=True) if is_elsewhere else restart


def _decide(policy: RestartPolicy, restarts: Restarts, incident: Incident) -> RestartDecision:
    failure = incident.first.failure
    if failure.kind is FailureKind.BAD_SCRIPT and incident.step is None and restarts.best_step is None:
        return RestartDecision("No restart can help before the script is corrected.", ExitReason.CODE_ERROR)
    if is_script_mistaken(policy, restarts, incident):
        return RestartDecision(SENTENCE, ExitReason.CODE_ERROR)
    if failure.stop_line:
        return RestartDecision(
            f"Its log has a line after which the job shall end (--log-patterns): {failure.stop_line[:500]}",
            ExitReason.CODE_ERROR,
        )
    if failure.kind is FailureKind.PORT_TAKEN:
        if restarts.num_ports_taken_before(incident.round) < MAX_PORTS_TAKEN:
            return RestartDecision("The round is repeated at no cost.")
        return RestartDecision(
            f"The port was taken {MAX_PORTS_TAKEN + 1} times in a row: free the port of --master-port on {incident.first.host}, or "
            "without that option a range of ports.",
            ExitReason.WORKER_ERROR,
        )
    if not is_charged(incident):
        return RestartDecision("It followed the loss of a node and costs no restart.")
    if policy.max_restarts is not None:
        return _decide_by_number(policy.max_restarts, restarts, incident)
    return _decide_by_progress(policy, restarts, incident)


def is_script_mistaken(policy: RestartPolicy, restarts: Restarts, incident: Incident) -> bool:
    """See `mistakes`."""
    has_stepped = incident.step is not None or restarts.best_step is not None
    return not has_stepped and is_mistake(policy, incident.alike, round_=incident.round, world_size=incident.world_size)


def _calls_for_another_node(incident: Incident, restart: RestartDecision) -> bool:
    """Whether the workers cannot go on where they are, but might elsewhere."""
    failure = incident.first.failure
    if is_secondary(failure) or failure.kind is FailureKind.PORT_TAKEN:
        return False  # the node that tells of it is not the one to blame
    is_spent = restart.reason not in (None, ExitReason.CODE_ERROR)
    return is_spent or incident.is_node_suspect or is_device_fault(failure)


def _decide_by_number(max_restarts: int, restarts: Restarts, incident: Incident) -> RestartDecision:
    node_rank = incident.first.node_rank
    spent = restarts.spent.get(node_rank, 0)
    if spent < max_restarts:
        return RestartDecision(f"Restart {spent + 1} of at most {max_restarts} on node rank {node_rank}.")
    if max_restarts <= 0:
        return RestartDecision(
            "No restarts are allowed (--max-restarts 0).", _over_limit(incident, ExitReason.WORKER_ERROR)
        )
    return RestartDecision(
        f"All {max_restarts} restarts of node rank {node_rank} are used up (--max-restarts {max_restarts}).",
        _over_limit(incident, ExitReason.RESTART_OVER_LIMIT),
    )


def _decide_by_progress(policy: RestartPolicy, restarts: Restarts, incident: Incident) -> RestartDecision:
    num_same = restarts.num_same_crash(incident)
    num_stuck = 0 if made_progress(policy, restarts, incident) else restarts.num_without_progress
    is_stuck = num_stuck >= policy.max_without_progress
    # Without a reported step "the same step" is unknown: only the lack of progress ends the job, but is named a loop.
    is_loop = num_same >= policy.max_same_crash and (is_stuck or incident.step is not None)
    if is_loop:
        where = "before any step was reported" if incident.step is None else f"at step {incident.step}"
        return RestartDecision(
            f"This is a crash loop: the same traceback {where}, {num_same + 1} times. Correct the script.",
            _over_limit(incident, ExitReason.CODE_ERROR),
        )
    if is_stuck:
        return RestartDecision(
            f"{num_stuck} restarts in a row brought no progress. See the log, or allow more with --max-restarts.",
            _over_limit(incident, ExitReason.RESTART_OVER_LIMIT),
        )
    return RestartDecision(
        f"Restart {num_stuck + 1} of at most {policy.max_without_progress} in a row without progress."
    )


def _over_limit(incident: Incident, otherwise: ExitReason) -> ExitReason:
    kind = incident.first.failure.kind
    if kind is FailureKind.DIAGNOSED:
        return ExitReason.HANG_ERROR
    return ExitReason.WORKER_OOM if is_out_of_memory(incident.first.failure) else otherwise
