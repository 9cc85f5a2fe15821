"""
Everything that masters decide and tell passes here, and is compared with what may be: the one way into the core, and the one way out.
"""

from __future__ import annotations

from typing import cast

from dlrover.core.commit_order import RecordBatch
from dlrover.core.job import Job
from dlrover.core.membership.rendezvous import NUM_USED_OFFERS
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import ModelRestored
from dlrover.protocol.messages.data import RestoreAgreed
from dlrover.protocol.messages.job import (
    Command,
    DeadlineKind,
    DeadlinePassed,
    FailureKind,
    Micros,
    NodeSilent,
    ReportFailure,
    TellNode,
)
from dlrover.simulator.parts import MasterPart, SimulationPart, VirtualWork
from dlrover.simulator.truth.invariants import Violation, check_command, check_in_full, is_joined, is_stale
from dlrover.simulator.truth.touched import Touched

NUM_KEPT_WORLDS = 100


def stage(sim: SimulationPart, master: MasterPart, work: VirtualWork, now: Micros) -> int:
    """The one way into the core; raises `Rejected`, after a look at whether that left no trace."""
    job, command, origin = master.job, cast(Command, work.body), work.origin
    state = job.state
    had_check = state.check.cycle is not None
    number, before = job.number, job.encode() if sim.plan.is_thorough else b""
    is_repeated = False
    if origin is not None:
        life = (origin.node, origin.incarnation)
        highest = max(sim.ledger.applied.get(life, 0), master.applied.get(life, 0))
        is_repeated = origin.sequence <= highest
    touched = Touched(
        command=command,
        origin=origin,
        round=state.rendezvous.round,
        num_restarts=state.restarts.num_restarts,
        num_spent=sum(state.restarts.spent.values()),
        num_without_progress=state.restarts.num_without_progress,
        is_stale=is_stale(job, command),
        num_checks=state.check.num_checks,
        is_repeated=is_repeated,
        had_end=job.end is not None,
        committed=dict(state.checkpoints.committed),
        call=(state.rendezvous.call_began_at, state.rendezvous.opening),
        has_joined=is_joined(state.rendezvous, command),
    )
    if sim.shape.scaling is not None:
        sim.scaling.before(job)
    is_new_model = isinstance(command, RestoreAgreed) and command.round not in state.data.restored
    is_new_model |= (
        isinstance(command, ModelRestored) and state.cluster is not None and state.cluster.restored_step is None
    )
    try:
        ticket = master.sequence.stage(command, now, origin)
    except Rejected as error:
        if sim.data is not None and master is sim.masters.newest:
            sim.data.was_refused(job, command, error.code)
        if job.number != number or (before and job.encode() != before):
            raise Violation("I6", f"{type(command).__name__} was refused ({error.code}) and changed the job") from error
        _note_command(sim, command, f"refused: {error.code}")
        raise
    if job.number != number:
        sim.ledger.num_commands += 1
        _note_command(sim, command, "")
        is_sleeper = isinstance(command, ReportFailure) and command.failures[0].kind is FailureKind.STOPPED_BY_US
        is_gone = isinstance(command, DeadlinePassed) and command.kind is DeadlineKind.NODE_GONE
        sim.ledger.num_alarms += is_sleeper or is_gone or isinstance(command, NodeSilent)
        if origin is not None:
            master.applied[life] = origin.sequence
        if master is not sim.masters.newest:
            return ticket  # it was replaced while it slept: whatever it decides will not be durable
        if not had_check and state.check.cycle is not None:
            sim.check_began_at = sim.events.now
        check_command(sim, job, touched)
        if sim.data is not None and is_new_model:
            sim.data.agreed(job, command)
        if sim.plan.is_thorough:
            check_in_full(sim, job)
    return ticket


def _note_command(sim: SimulationPart, command: Command, verdict: str) -> None:
    if sim.has_timeline:
        names = (
            "node",
            "node_rank",
            "launch",
            "incarnation",
            "round",
            "running_round",
            "kind",
            "id",
            "step",
            "reason",
        )
        values = [f"{name}={value}" for name in names if (value := getattr(command, name, None)) is not None]
        if isinstance(command, ReportFailure):
            values.append(f"failure={command.failures[0].kind}")
        sim.note(f"    {type(command).__name__} {' '.join(values)} {verdict}".rstrip())


def release(sim: SimulationPart, master: MasterPart, batch: RecordBatch | None) -> None:
    """What is released now is seen by all: it must be durable, and of the newest master."""
    job = master.job
    if master.master_epoch != sim.masters.journal.master_epoch:
        raise Violation("I6", f"the master of epoch {master.master_epoch} speaks after it was replaced")
    if job.number != sim.masters.journal.last_number:
        raise Violation("I5", f"command {job.number} is told and {sim.masters.journal.last_number} is durable")
    if master is not sim.masters.newest:
        raise Violation("I6", "two masters write")
    if not sim.masters.is_serving:
        sim.masters.serve()
        sim.platform.serve(master)
    sim.ledger.applied.update(master.applied)
    master.applied = {}
    if batch is None:
        return
    _note_world(sim, job)
    if sim.tasks is not None:
        sim.tasks.released(job)
    _follow_limits(sim, job)
    for one in batch.released:
        for effect in one.outcome.effects:
            if isinstance(effect, TellNode):
                node = job.state.nodes.live.get(effect.node)
                if node is not None and node.desired.master_epoch != job.master_epoch:
                    raise Violation("I6", f"{node.label} is told a wish of an old master")
    if sim.has_timeline:
        for one in batch.released:
            for verdict in one.outcome.verdicts:
                sim.note(f"  {verdict}")
    if job.end is not None and sim.ended_at is None:
        sim.ended_at = sim.events.now


def check_restored(sim: SimulationPart, job: Job, durable: bytes | None) -> None:
    """What a new master replayed. `durable`: what it has to be, if that is known for certain."""
    if durable is not None:
        compare_restored(job, durable)
    elif job.number != sim.masters.journal.last_number:
        raise Violation(
            "I5", f"the journal has {sim.masters.journal.last_number} records, the replay gave {job.number}"
        )
    for (
        node,
        sender,
    ) in job.state.replay_guard.by_node.items():  # what was answered is durable, whenever the master died
        answered = sim.ledger.answered.get((node, sender.incarnation), 0)
        if answered > sender.highest:
            raise Violation("I5", f"command {answered} of node {node} was answered, and {sender.highest} is known")
    sim.store.check(job)
    sim.saves.check(job)


def compare_restored(job: Job, durable: bytes) -> None:
    if job.encode() != durable:
        raise Violation("I5", f"after the replay of {job.number} commands the state is not what it was")


def _follow_limits(sim: SimulationPart, job: Job) -> None:
    """The platform gives what the job shall have."""
    if job.state.terms is not None and job.state.terms.limits != sim.limits:
        sim.limits = job.state.terms.limits
        sim.troubles.add()
        sim.platform.scale(sim.limits.max_nodes + sim.shape.spares)


def _note_world(sim: SimulationPart, job: Job) -> None:
    world, ledger = job.state.rendezvous.world, sim.ledger
    if world is None:
        return
    ledger.coordinators.setdefault(world.coordinator, world.round)
    if len(ledger.coordinators) > NUM_USED_OFFERS:
        del ledger.coordinators[next(iter(ledger.coordinators))]
    key = (world.round, world.coordinator)
    if key not in ledger.worlds:
        ledger.worlds[key] = {member.node: place for place, member in enumerate(world.members)}
        if len(ledger.worlds) > NUM_KEPT_WORLDS:
            del ledger.worlds[next(iter(ledger.worlds))]
