"""
What must never happen, as checks from outside the core.

Each check looks at the state of the job and at what the simulation knows of the real world, and returns a sentence when
something is wrong. `AFTER_COMMAND` runs on what a command touched, `IN_FULL` on everything, now and then and at the end.
Those of checkpoints (I4), data (I3), parameter servers, suspensions and sync points stand with what they are compared with, in
`saves`, `data`, `beside`, `people` and `syncs`; so does what counts as progress (I7), in `restarts`.

* I1 one world is active, and a node is in at most one.
* I2 a world has at least the minimum, at most the maximum, a multiple of the unit, and distinct ranks.
* I1 also: the coordinator of a world has a port that the last rounds did not have.
* I4 also: the newest checkpoint of a directory, and with it the tracker, never goes back.
* I5 the state after a replay is the state before the crash, bit for bit.
* I6 a message of an older incarnation or an older master changes nothing, and no command is applied twice.
* I7 restarts are charged for failures only, and never beyond the budget; nothing but progress ends a row of restarts without.
* call: a repeated join never prolongs the last call.
* goodput: the classes of each node rank sum to the time it was there.
* I8 when faults stop and enough nodes exist, the job makes progress within a bounded time, and ends for a reason.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover.core.desired import wish_of
from dlrover.core.job import Job
from dlrover.core.membership.rendezvous import Rendezvous
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    LaunchRefused,
    MigrateNode,
    NodeChanged,
    NodePhase,
    NodesListed,
    PsReady,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    SuspendJob,
)
from dlrover.protocol.messages.job import (
    TRAINING_RENDEZVOUS,
    Attach,
    Command,
    DeadlinePassed,
    ExitReason,
    JobEnd,
    JoinRendezvous,
    MasterStarted,
    Run,
    StopJob,
)
from dlrover.protocol.messages.scaling import DefineScaling, RoomSeen, RunMeasured
from dlrover.simulator.parts import SimulationPart
from dlrover.simulator.shapes import Shape
from dlrover.simulator.truth.touched import Touched
from dlrover.simulator.virtual_time import SECOND

BOUND = 420 * SECOND
"""I8: virtual time from the end of the last trouble to new progress. Forty seconds until silence is believed, thirty of
last call, and a slow node may need a hundred to start its workers; the rest is what several of these in a row take."""


FLEET_EXTRA = 240 * SECOND
"""With a fleet: until a list shows what no event told."""
TASK_EXTRA = 2400 * SECOND
"""With parameter servers: a slow restore and a slow step on the way to the next version, and the patience with each of them."""
CHECK_EXTRA = 600 * SECOND
"""With a node check: several phases, of which each may have to wait for a node that does not come."""


def bound_of(shape: Shape) -> int:
    fleet = FLEET_EXTRA if shape.fleet is not None else 0
    tasks = TASK_EXTRA if shape.has_tasks else 0
    return BOUND + fleet + tasks + (CHECK_EXTRA if shape.check is not None else 0)


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, sentence: str) -> None:
        super().__init__(f"{invariant}: {sentence}")
        self.invariant = invariant
        self.sentence = sentence

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str]]:
        return Violation, (self.invariant, self.sentence)


_OF_NO_NODE = (
    MasterStarted,
    Attach,
    DeadlinePassed,
    StopJob,
    RestartJob,
    ScaleJob,
    DefineFleet,
    DefineScaling,
    RunMeasured,
    RoomSeen,
    NodesListed,
    NodeChanged,
    LaunchRefused,
    MigrateNode,
    SuspendJob,
    ResumeJob,
    ScaleReplicas,
    SizeReplicas,
    PsReady,
)


def is_stale(job: Job, command: Command) -> bool:
    """Whether the command speaks for a life that is not the current one."""
    if isinstance(command, _OF_NO_NODE):
        return False
    node = job.state.nodes.live.get(getattr(command, "node", None))  # type: ignore[arg-type]
    return node is None or node.incarnation != getattr(command, "incarnation", None)


def is_joined(rdzv: Rendezvous, command: Command) -> bool:
    """Whether the command is a join of a node that has joined the training before."""
    if not isinstance(command, JoinRendezvous) or command.name != TRAINING_RENDEZVOUS:
        return False
    return command.node in rdzv.waiting or command.node in rdzv.absent


def _old_lives_change_nothing(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    name = type(touched.command).__name__
    if touched.is_stale:
        return f"{name} of a former life was accepted: {touched.command}"
    if touched.is_repeated:
        return f"{name} was applied twice: {touched.origin}"
    return None


def _new_world_is_right(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    state, rdzv = job.state, job.state.rendezvous
    if rdzv.round == touched.round or rdzv.world is None:
        return None
    assert state.terms is not None, "a world without terms"
    limits, members = state.limits, rdzv.world.members
    if rdzv.round < touched.round:
        return f"round {rdzv.round} follows round {touched.round}"
    if not limits.min_nodes <= len(members) <= limits.max_nodes or len(members) % limits.node_unit:
        return (
            f"the world of round {rdzv.round} has {len(members)} nodes, not {limits.min_nodes} to "
            f"{limits.max_nodes} in multiples of {limits.node_unit}"
        )
    ranks = [member.node_rank for member in members]
    if ranks != sorted(dict.fromkeys(ranks)):
        return f"the node ranks of round {rdzv.round} are {ranks}"
    first = 0
    for member in members:
        node = state.nodes.live.get(member.node)
        # A world that is taken up after its journal was lost may have finished members.
        if node is None or node.finished_round not in (0, rdzv.round) or not state.nodes.is_connected(member.node):
            return f"node {member.node} cannot be in the world of round {rdzv.round}: it is not there"
        if member.first_global_rank != first:
            return f"node {member.node} begins at global rank {member.first_global_rank}, not at {first}"
        first += member.local_world_size
    if rdzv.world.world_size != first:
        return f"the world of round {rdzv.round} has {first} workers and says {rdzv.world.world_size}"
    return None


def _coordinator_is_fresh(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    """A socket of an old round may still live; a worker that connects to it would meet the wrong world."""
    rdzv = job.state.rendezvous
    if rdzv.round == touched.round or rdzv.world is None:
        return None
    former = sim.ledger.coordinators.get(rdzv.world.coordinator, rdzv.round)
    if former != rdzv.round:  # a world that is taken up after its journal was lost keeps both
        return f"{rdzv.world.coordinator} was the coordinator of round {former}, and is that of round {rdzv.round}"
    return None


def _repeated_joins_prolong_nothing(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    rdzv, (began_at, opening) = job.state.rendezvous, touched.call
    if touched.has_joined and rdzv.opening is opening and rdzv.call_began_at != began_at:
        return f"the call of round {rdzv.next_round} began at {began_at}, and a repeated join moved it to {rdzv.call_began_at}"
    return None


def _tracker_never_goes_back(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    return sim.saves.explain_step_back(job, touched.committed)


def _budget_is_kept(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    restarts, terms = job.state.restarts, job.state.terms
    if restarts.num_restarts == touched.num_restarts or terms is None:
        return None
    policy = terms.restarts
    for rank, spent in restarts.spent.items():
        if spent > sim.ledger.chargeable.get(rank, 0):
            return (
                f"node rank {rank} was charged {spent} restarts and failed {sim.ledger.chargeable.get(rank, 0)} times"
            )
        if policy.max_restarts is not None and spent > max(0, policy.max_restarts):
            return f"node rank {rank} has spent {spent} of {policy.max_restarts} restarts"
    if policy.max_restarts is None and restarts.num_without_progress > policy.max_without_progress:
        return f"{restarts.num_without_progress} restarts in a row without progress"
    return None


def _only_progress_counts(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    return sim.restarts.explain_count(job, touched)


def _relaunches_are_kept(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    fleet = job.state.fleet
    for node_type, replicas in () if fleet is None else fleet.replicas.items():
        for rank, spent in replicas.spent.items():
            if spent > replicas.budget(rank):
                return f"{node_type} {rank} was relaunched {spent} times after failures, of {replicas.budget(rank)}"
            num_failures = sim.ledger.node_failures.get((node_type, rank), 0)
            if spent > num_failures:
                return f"{node_type} {rank} was charged {spent} relaunches and failed {num_failures} times"
    return None


def _ranks_have_one_node(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    fleet = job.state.fleet
    for node_type in () if fleet is None else fleet.replicas:
        assert fleet is not None, "types of no fleet"
        live = [node for node in fleet.live_nodes(node_type) if node.id not in fleet.migrations]
        if len({node.rank for node in live}) != len(live):
            return f"two nodes of one rank are live: {[(node.rank, node.id) for node in live]}"
    return None


def _blame_is_just(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    """Of a check during which nothing happened to any node."""
    check = job.state.check
    if check.num_checks == touched.num_checks or not sim.troubles.was_calm_since(sim.check_began_at):
        return None
    for rank, node in check.members.items():
        agent, result = sim.machines.agent_of(node), check.results.get(rank)
        if agent is None or result is None or (result.node, result.incarnation) != (node, agent.incarnation):
            continue
        if result.status == "faulty" and agent.node.breakage is None:
            return f"{agent.node.label} is well and was found faulty: {result.reason}"
        if result.status == "straggler" and not agent.node.is_sluggish:
            return f"{agent.node.label} is quick and was found slow"
    return None


def _end_has_a_reason(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    if touched.had_end or job.end is None:
        return None
    return explain_end(sim, job, job.end)


def explain_end(sim: SimulationPart, job: Job, end: JobEnd) -> str | None:
    """
    Nothing if what the simulation knows explains why the job ended so.

    An end by an error names the process that failed first. There is one without: the master of a job without a fleet launches no nodes,
    and ends the job when its last agent leaves for good. An agent may do so although no process failed: it was cut off or stood still
    for longer than it may be without its master, reached the master once more and said goodbye. Then the end has to hold the words of
    that agent.
    """
    terms = job.state.terms or sim.terms  # the job itself knows none before its first node has come
    policy, charged = terms.restarts, sim.ledger.chargeable
    calm = sim.troubles.calm_for()
    is_impatient = end.reason in (ExitReason.PENDING_TIMEOUT, ExitReason.NOT_ENOUGH_NODES)
    if is_impatient and not job.state.rendezvous.finished and (sim.people.is_paused or sim.people.has_just_resumed()):
        return f"the time in which the job was suspended counts: {end.message}"
    match end.reason:
        case ExitReason.COMPLETED if sim.tasks is not None:
            return None  # whether all is read and in the model is asked at the end
        case ExitReason.COMPLETED:
            if sim.training.best_step < sim.shape.num_steps:
                return f"the job completed at step {sim.training.best_step} of {sim.shape.num_steps}"
            return sim.agentless.explain_completion()
        case ExitReason.RENDEZVOUS_TIMEOUT | ExitReason.NOT_ENOUGH_NODES:
            if calm > sim.bound and (sim.shape.is_one_world or sim.machines.has_enough()):
                return f"the job gave up, although all was well for {calm / SECOND:.0f} s: {end.message}"
            limits, num_steady = terms.limits, sim.machines.num_steady()
            if num_steady - num_steady % limits.node_unit >= limits.min_nodes and not job.state.rendezvous.finished:
                return f"the job gave up, although {num_steady} nodes were there and well: {end.message}"
        case ExitReason.NODE_CHECK_FAILED:
            if not sim.machines.has_bad() and calm > sim.bound:
                return f"no node is bad, and nothing has happened for {calm / SECOND:.0f} s: {end.message}"
        case ExitReason.PENDING_TIMEOUT:
            if calm > sim.bound:
                return f"the platform was well for {calm / SECOND:.0f} s: {end.message}"
        case ExitReason.DATA_UNFINISHED:
            if sim.data is None:
                return f"the job has no data: {end.message}"
        case _ if end.first_failure is None and job.state.fleet is not None:
            if not sim.ledger.node_failures and not sim.ledger.num_lost_nodes:
                return f"no node was lost and none had failed: {end.message}"
        case ExitReason.STOPPED_BY_USER:
            return None if sim.ledger.num_aborted else f"no person stopped the job: {end.message}"
        case _ if end.first_failure is not None and sim.tasks is not None:
            limit = policy.max_without_progress if policy.max_restarts is None else policy.max_restarts
            if sum(charged.values()) <= limit:
                return f"processes failed {sum(charged.values())} times: {end.message}"
        case _ if end.first_failure is not None:
            rank = end.first_failure.node_rank
            if policy.max_restarts is not None and end.reason is not ExitReason.WORKER_ERROR:
                if charged.get(rank, 0) <= policy.max_restarts:
                    return f"node rank {rank} failed {charged.get(rank, 0)} times: {end.message}"
            elif not sum(charged.values()) and not sim.ledger.num_ports_taken:
                return f"nothing had failed: {end.message}"
        case ExitReason.WORKER_ERROR if sim.ledger.names_who_gave_up(end.message):
            return None
        case _:
            return f"no failure is named: {end.message}"
    return None


def _states_agree_with_wishes(sim: SimulationPart, job: Job) -> str | None:
    state = job.state
    for node in state.nodes.live.values():
        if node.desired.wish != wish_of(state, node):
            return f"{node.label} was not told about its new wish"
        if node.desired.master_epoch != state.master_epoch:
            return f"{node.label} has a wish of master epoch {node.desired.master_epoch}, not {state.master_epoch}"
    return None


def _one_world_is_active(sim: SimulationPart, job: Job) -> str | None:
    if sim.tasks is not None:
        return None  # each process of a cluster has a start of its own
    running = [node.desired.wish.world for node in job.state.nodes.live.values() if isinstance(node.desired.wish, Run)]
    if len({(world.round, world.coordinator) for world in running}) > 1:
        return f"two worlds are active: {sorted({world.round for world in running})}"
    if len({world.group_rank for world in running}) != len(running):
        return "two nodes have the same place in the world"
    return None


def _each_node_has_one_place(sim: SimulationPart, job: Job) -> str | None:
    state, nodes, rdzv = job.state, job.state.nodes, job.state.rendezvous
    if sim.tasks is not None:
        return None  # nobody meets in a cluster
    if {node.rank: node.id for node in nodes.live.values()} != nodes.holders:
        return "the ranks are not those of the live nodes"
    if state.end is not None:
        return None
    places = [*rdzv.waiting, *rdzv.absent, *rdzv.expected]
    places += [node for node in rdzv.take_up.claims if node not in rdzv.finished]
    if rdzv.is_active:
        places += [node for node in rdzv.group_ranks if rdzv.is_member(node) and node not in rdzv.finished]
    unfinished = sorted(node.id for node in nodes.live.values() if not node.finished_round and node.dismissed is None)
    if sorted(places) != unfinished:
        return f"each unfinished node shall be in one place: {sorted(places)} against {unfinished}"
    if any(node in nodes.broken for node in rdzv.waiting):
        return "a node without a stream waits for a world"
    return None


def _snapshot_is_the_state(sim: SimulationPart, job: Job) -> str | None:
    data = job.encode()
    return None if Job.decode(data).encode() == data else "a decoded snapshot is another state"


def _time_is_accounted_for(sim: SimulationPart, job: Job) -> str | None:
    goodput = job.state.goodput
    for rank, place in goodput.places.items():
        if (total := sum(goodput.totals(place, job.now).values())) != (lived := goodput.lived(place, job.now)):
            return f"node rank {rank} was there for {lived} us, and its classes sum to {total}"
    return None


def _nobody_waits_for_the_dead(sim: SimulationPart, job: Job, touched: Touched) -> str | None:
    sync, live = job.state.sync, job.state.nodes.live
    for round_, name in sync.open.values():
        for node in sync.points[round_][name].missing:
            if node not in live or live[node].finished_round:
                return f"sync point {name!r} of round {round_} waits for node {node}, whose workers have ended"
    return None


def _agents_obey(sim: SimulationPart, job: Job) -> str | None:
    """Who is attached and undisturbed runs what the master wants, not something older."""
    if sim.troubles.calm_for() < sim.bound or job.end is not None:
        return None
    changed_at = job.state.scaling.changed_at
    if changed_at is not None and job.now - changed_at < sim.bound:
        return None  # a job that changes its size by itself, or follows its room, does so in calm times, too
    if job.state.cluster is not None and not job.state.cluster.is_settled:
        return None  # a coordinator that wants other workers begins a version in calm times, too
    for node in job.state.nodes.live.values():
        agent = sim.machines.agent_of(node.id)
        if agent is None or agent.incarnation != node.incarnation or not agent.can_speak:
            continue
        wish = node.desired.wish
        running = 0 if agent.workers.group is None else agent.workers.group.world.round
        wanted = wish.world.round if isinstance(wish, Run) else 0
        if running != wanted and not agent.decisions.finished_round:
            return f"{agent.node.label} runs round {running} and shall run round {wanted}"
    return None


def _agents_give_up(sim: SimulationPart, job: Job) -> str | None:
    """Without a master for longer than they may stay."""
    for node in sim.machines.nodes:
        if node.agent is not None and node.agent.channel.is_overdue():
            return f"{node.label} stays without a master"
    return None


def _intents_are_done(sim: SimulationPart, job: Job) -> str | None:
    """What the job wants of its platform is asked for until it is so, whatever became of the master who decided it."""
    fleet = job.state.fleet
    if (
        fleet is None
        or job.end is not None
        or sim.troubles.calm_for() <= sim.bound
        or _has_just_changed_itself(sim, job)
    ):
        return None
    for node in fleet.nodes.values():
        if node.is_live and node.phase is NodePhase.INITIAL and not sim.people.want_pause:
            return f"no person asked for {node.label}"
        if node.removal is not None:
            return f"{node.label} shall be removed and is still there: {node.removal.reason}"
    return None


def _has_just_changed_itself(sim: SimulationPart, job: Job) -> bool:
    """A job that finds its own size wants other nodes in calm times, too."""
    changed_at = job.state.scaling.changed_at
    return sim.shape.scaling is not None and changed_at is not None and job.state.now - changed_at <= sim.bound


def _servers_are_settled(sim: SimulationPart, job: Job) -> str | None:
    is_settled = job.end is None and sim.troubles.calm_for() > sim.bound and not sim.people.want_pause
    if sim.tasks is not None:
        fleet = job.state.fleet
        is_settled = is_settled and not _has_just_changed_itself(sim, job)
        is_open = is_settled and fleet is not None and (fleet.servers.is_changed or fleet.servers.dropped)
        return "the parameter servers that shall be used never were" if is_open else None
    return sim.agentless.check_calm(job) if is_settled else None


def _phases_have_an_end(sim: SimulationPart, job: Job) -> str | None:
    return None if sim.tasks is None else sim.tasks.check_patience(job)


def _calm_brings_progress(sim: SimulationPart, job: Job) -> str | None:
    calm = sim.troubles.calm_for()
    if calm <= sim.bound or job.end is not None or not sim.machines.has_enough():
        return None
    if sim.troubles.progress_since() <= 0:
        return (
            f"no progress beyond step {sim.training.progress()} for {calm / SECOND:.0f} s without trouble; "
            f"{job.state.verdict}"
        )
    return None


Check = Callable[[SimulationPart, Job], str | None]
CommandCheck = Callable[[SimulationPart, Job, Touched], str | None]

AFTER_COMMAND: list[tuple[str, CommandCheck]] = [
    ("I6", _old_lives_change_nothing),
    ("I2", _new_world_is_right),
    ("I1", _coordinator_is_fresh),
    ("call", _repeated_joins_prolong_nothing),
    ("I4", _tracker_never_goes_back),
    ("I7", _budget_is_kept),
    ("I7", _only_progress_counts),
    ("I7", _relaunches_are_kept),
    ("fleet", _ranks_have_one_node),
    ("check", _blame_is_just),
    ("sync", _nobody_waits_for_the_dead),
    ("I8", _end_has_a_reason),
]
IN_FULL: list[tuple[str, Check]] = [
    ("I1", _states_agree_with_wishes),
    ("I1", _one_world_is_active),
    ("I1", _each_node_has_one_place),
    ("I5", _snapshot_is_the_state),
    ("goodput", _time_is_accounted_for),
    ("I8", _agents_obey),
    ("I8", _agents_give_up),
    ("fleet", _intents_are_done),
    ("servers", _servers_are_settled),
    ("cluster", _phases_have_an_end),
    ("I8", _calm_brings_progress),
]


def check_command(sim: SimulationPart, job: Job, touched: Touched) -> None:
    if sim.shape.scaling is not None and (broken := sim.scaling.check(job, touched.command)) is not None:
        raise Violation(*broken)
    for invariant, check in AFTER_COMMAND:
        if (sentence := check(sim, job, touched)) is not None:
            raise Violation(invariant, sentence)


def check_in_full(sim: SimulationPart, job: Job) -> None:
    for invariant, check in IN_FULL:
        if (sentence := check(sim, job)) is not None:
            raise Violation(invariant, sentence)
