"""
The course of a job while one command is applied: the decisions that several commands share.

A command checks and then says what happened (a node was lost, workers failed, somebody joined); what follows from it is
decided here, on the state, with everything that shall leave the core gathered on the way: effects, verdicts, and the
nodes whose wish may be another one now. A course lives for one command, so nothing of it can leak into the next.

What a node shall do is a function of the state (`wish_of`). Whoever may have got another wish is only marked; at the
end all marked nodes are looked at once, and those whose wish did change are told.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from dlrover.core import (
    checkpoints,
    data_books,
    data_progress,
    fleet_agents,
    fleet_settling,
    fleet_wishes,
    goodput,
    life_cycle,
    node_check,
    pre_check,
    sync_points,
)
from dlrover.core import restarts as blame
from dlrover.core.kv_store import NUM_ROUNDS_KEPT
from dlrover.core.nodes import Node, NodeLife, reattach_window
from dlrover.core.rendezvous import Member, Opening, World, choose_world, explain_timeout, num_usable
from dlrover.core.restarts import Incident
from dlrover.core.state import JobState
from dlrover.core.take_up import Claim, is_sane
from dlrover.core.turn import micros
from dlrover.protocol.fleet_messages import NodeExit
from dlrover.protocol.messages import (
    Attach,
    Desired,
    Detection,
    DistinctFailure,
    Effect,
    End,
    ExitReason,
    FailureKind,
    FinishJob,
    FirstFailure,
    Idle,
    JobEnd,
    JobTerms,
    Join,
    Leave,
    Limits,
    Micros,
    NodeId,
    NodeRank,
    Round,
    Run,
    Stage,
    StopCause,
    TellNode,
    Wait,
    Wish,
    WorkerFailure,
)

DRAIN_MARGIN = 5.0
"""Seconds that nodes have for leaving after the end, on top of what their workers have for stopping."""
EXIT_TRAINING = 1
EXIT_RENDEZVOUS_TIMEOUT = 22
_SIGKILL = 9


class Course:
    """One command being applied."""

    def __init__(self, state: JobState, now: Micros) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []
        self.verdicts: list[str] = []
        self._touched: dict[NodeId, None] = {}
        """A dict because the order of a set is not reproducible."""
        self._is_all_touched = False
        self._was_active = state.rendezvous.is_active
        self.ending: tuple[ExitReason, str] | None = None
        """Why the job shall end after this command; the first reason counts."""

    @property
    def detection(self) -> Detection:
        return self.state.detection

    def touch(self, node: NodeId) -> None:
        """The wish of this node may be another one now."""
        self._touched[node] = None

    def touch_all(self) -> None:
        self._is_all_touched = True

    def admit(self, command: Attach) -> Node:
        """A launch that nobody knows becomes a node, and is asked to join."""
        state, nodes, rdzv = self.state, self.state.nodes, self.state.rendezvous
        rank = command.node_rank if command.node_rank is not None else self._rank_for(command)
        former = nodes.former.get(rank)
        if former is not None:
            state.senders.forget(former.id)
        claim = self._hear_claim(command, rank)
        node = nodes.admit(command, rank, is_continued=claim is not None)
        if claim is not None:
            rdzv.take_up.add(node.id, claim)
        state.senders.begin(node.id, node.incarnation)
        if state.end is None:
            self._hear_finished(node, command)
            if not node.finished_round and claim is None:
                rdzv.expect(node.id, node.rank)
                node_check.expect(self, node)
            self._open_first()
        return node

    def _open_first(self) -> None:
        """Nobody has a world, so there is nobody who would have to lose it before a round opens."""
        rdzv = self.state.rendezvous
        if rdzv.world is None and rdzv.opening is None:
            self._open(StopCause.MEMBERSHIP, "the job begins")

    def _rank_for(self, command: Attach) -> NodeRank:
        """The one it had before, if nobody else has it by now."""
        nodes, former = self.state.nodes, command.former_rank
        if former is not None and former not in nodes.holders and former not in nodes.former:
            return former
        return nodes.lowest_free_rank()

    def _hear_claim(self, command: Attach, rank: NodeRank) -> Claim | None:
        """A node that is about to be admitted runs workers of a world that we know nothing of: our journal was lost.

        None: it does not, or what it says cannot count.
        """
        rdzv, world = self.state.rendezvous, command.world
        if self.state.end is not None or rdzv.world is not None:
            return None
        if command.running_round > rdzv.round:
            if rdzv.take_up.claims:
                self.give_up_claims(f"{command.host} ran in round {command.running_round}")
            # Rounds of a life whose journal was lost must not be numbered again: their stores may still answer.
            rdzv.round = command.running_round
            self.touch_all()
        is_possible = world is not None and is_sane(world, command.running_round) and world.round == rdzv.round
        is_newest_life = command.incarnation > self.state.nodes.incarnations.get(rank, 0)
        if world is None or not is_possible or not is_newest_life or rdzv.take_up.is_over:
            return None
        if rdzv.take_up.contradicts(world):
            self.give_up_claims(f"what {command.host} says of round {world.round} contradicts the others")
            return None
        if not rdzv.take_up.claims:
            rdzv.take_up.until = Micros(self.now + micros(reattach_window(self.detection)))
        return Claim(rank, world)

    def give_up_claims(self, why: str) -> None:
        """The world from before our time cannot be taken up: a new round forms."""
        rdzv = self.state.rendezvous
        # Its number, also if the only one who claimed it is lost by now: no round has completed since.
        self.say(f"The world of round {rdzv.round} cannot be taken up again: {why}. A new round forms.")
        for node in rdzv.give_up_claims(self.now):
            self.touch(node)
            node_check.expect(self, self.state.nodes.live[node])

    def _take_up(self) -> None:
        """All members of the claimed world are back: it goes on, and nobody restarts."""
        state, rdzv = self.state, self.state.rendezvous
        claimed = rdzv.take_up.in_order()
        assert claimed is not None, "nothing to take up"
        assert state.terms is not None, "a claim without a node"
        first, size = claimed[0][1].world, len(claimed)
        if size % state.terms.limits.node_unit:
            self.give_up_claims(f"{size} nodes are no multiple of --node-unit {state.terms.limits.node_unit}")
            return
        limits = state.terms.limits
        if not state.limits_version and not limits.min_nodes <= size <= limits.max_nodes:
            # It did run, so the job had been scaled; nobody has told us yet what it shall be.
            limits = replace(limits, min_nodes=min(limits.min_nodes, size), max_nodes=max(limits.max_nodes, size))
            state.terms = replace(state.terms, limits=limits)
            state.limits_version += 1
        members = tuple(
            Member(
                node,
                claim.node_rank,
                claim.world.local_world_size,
                claim.world.first_global_rank,
                # What the others had offered nobody knows any more, and nobody needs.
                first.coordinator if not claim.world.group_rank else "",
            )
            for node, claim in claimed
        )
        limits_version = state.limits_version if size >= limits.min_nodes else 0  # it began under lower limits
        rdzv.adopt(World(first.round, members, first.world_size, limits_version), self.now, first.job_age)
        rdzv.verdict = (
            f"Round {rdzv.round} goes on: the journal was lost, all {size} nodes of its world are back, and no worker "
            "restarts."
        )
        self.say(rdzv.verdict)
        self._enter_running()
        for member in members:
            if (node := state.nodes.live.get(member.node)) is not None:
                node.entered_at = self.now
            self.touch(member.node)
        if rdzv.is_all_finished():
            self.end_job(ExitReason.COMPLETED, "The workers of all nodes ended well.")

    def reattach(self, node: Node, command: Attach) -> None:
        """The same life on a new stream: nothing restarts. Or one that never heard of its new incarnation."""
        self.state.nodes.broken.pop(node.id, None)
        self.state.rendezvous.stream_back(node.id)
        node.host = command.host
        node.peer = command.peer
        node.process = command.life
        self._hear_finished(node, command)

    def renew(self, node: Node, command: Attach) -> None:
        """A new life of the agent: the workers of the old one are dead."""
        state, rdzv = self.state, self.state.rendezvous
        was_running = is_running(self.state, node)
        # It was asked back and has not come: as far as anybody knows its workers ran until the agent died.
        was_stopping = node.id in rdzv.expected and rdzv.is_member(node.id)
        state.nodes.renew(node, command)
        sync_points.leave(self, node.id)
        data_books.workers_ended(self, node.id)
        checkpoints.lose(self, node.id)
        node_check.lose(self, node, "", is_blamed=False)
        state.senders.begin(node.id, node.incarnation)
        rdzv.blocks.pop(node.id, None)
        if state.end is not None or node.dismissed is not None:
            return
        self._hear_finished(node, command)
        if node.finished_round:
            return
        if node.id in rdzv.take_up.claims:
            self.give_up_claims(f"the agent of {node.label} was restarted, its workers are dead")
        incident = state.restarts.open_incident(rdzv.round)
        if not was_running:
            rdzv.expect(node.id, node.rank)
            node_check.expect(self, node)
            self._open_first()  # all were lost while the job was begun anew
        if was_running or (was_stopping and incident is not None):
            failure = WorkerFailure(
                global_rank=rdzv.spec(node.id).first_global_rank,
                local_rank=0,
                pid=0,
                kind=FailureKind.SIGNAL,
                signal=_SIGKILL,
                exited_at=self.now,
                message="the agent of the node was restarted and its workers died with the old one",
            )
            first = FirstFailure(failure=failure, node_rank=node.rank, host=node.host, round=rdzv.round, step=node.step)
            lived = (self.now - rdzv.completed_at) / micros(1.0)
            if was_running:
                self.begin_incident(first, lived, (failure,))
            elif incident is not None:
                self.hear_more(incident, first, lived, (failure,))  # others told first that they lost this one

    def begin_incident(
        self, first: FirstFailure, lived: float, failures: tuple[WorkerFailure, ...], *, is_node_suspect: bool = False
    ) -> None:
        """The first report of a round's failures: decide, and open the next round without waiting for the others."""
        state = self.state
        incident = Incident(round=first.round, first=first, began_at=self.now, step=first.step, lived=lived)
        incident.is_node_suspect = is_node_suspect
        blame.count(incident, failures, first.node_rank, first.host)
        state.restarts.incident = incident
        self._open(StopCause.FAILURE, blame.describe(first), fault=_fault_kind(first), first=first)
        if blame.is_secondary(first.failure):
            self.say(f"{blame.describe(first)} The next round opens; the first failure may still be reported.")
        elif not self._are_too_few_left():
            self._judge(incident)

    def hear_more(
        self, incident: Incident, first: FirstFailure, lived: float, failures: tuple[WorkerFailure, ...]
    ) -> None:
        """A further report of a round that has failed already. It never costs a second restart."""
        state = self.state
        if blame.count(incident, failures, first.node_rank, first.host) and state.end is not None:
            state.end = replace(state.end, distinct_failures=tuple(incident.distinct))
            self.touch_all()
        is_late = self.now - incident.began_at > micros(blame.LATE_FAILURE)
        if is_late and (incident.is_settled or state.end is not None):
            return
        is_better = blame.improve(incident, first)
        if is_better:
            state.goodput.fault_named(_fault_kind(first), blame.describe(first), first)
        if incident.is_settled:
            if is_better:
                self.say(f"{blame.describe(incident.first)} It was the first failure of the round.")
            return
        blame.note(incident, first.step, lived)
        if state.end is not None:
            if state.end.first_failure is not None and is_better:
                message = f"{blame.describe(incident.first)} {state.end_sentence}"
                state.end = replace(state.end, first_failure=incident.first, message=message)
                self.touch_all()
        elif is_better and not blame.is_secondary(incident.first.failure):
            self._judge(incident)

    def _judge(self, incident: Incident) -> bool:
        """Restart or end the job after this incident. Returns whether it goes on."""
        state = self.state
        assert state.terms is not None, "workers ran before any node attached"
        decision = blame.decide(state.terms.restarts, state.restarts, incident)
        if self._is_node_replaced(incident, decision):
            return True
        if decision.reason is not None:
            self.end_job(decision.reason, decision.sentence, first=incident.first)
            return False
        self.say(f"{blame.describe(incident.first)} {decision.sentence}")
        return True

    def _is_node_replaced(self, incident: Incident, decision: blame.Decision) -> bool:
        """Where a platform can give another node, that is better than ending, and for a broken device the only way."""
        failure = incident.first.failure
        if incident.is_node_replaced or not blame.calls_for_another_node(incident, decision):
            return incident.is_node_replaced
        exit_reason = NodeExit.HARDWARE if blame.is_device_fault(failure) else NodeExit.FATAL
        if incident.is_node_suspect:
            exit_reason = NodeExit.DIAGNOSED
        if blame.is_out_of_memory(failure):
            exit_reason = NodeExit.OOM
        if not life_cycle.replace_node_of(self, incident.first.node_rank, exit_reason, blame.describe(incident.first)):
            return False
        self.state.restarts.node_replaced(incident)
        return True

    def finish_node(self, node: Node, round_: Round, *, has_more_to_say: bool = False) -> None:
        """All workers of the node ended well in that round: it waits at the exit barrier and is never started again.

        It may tell so late: given up meanwhile, or when the others meet again already, or have met. `has_more_to_say`: what its workers
        said of their data before they ended follows, and only then its report.
        """
        rdzv = self.state.rendezvous
        if self.state.end is not None:
            return
        if not has_more_to_say and round_ in (node.finished_round, rdzv.round):
            data_books.workers_ended(self, node.id)
        if node.finished_round:
            return
        if round_ == rdzv.round and node.id in rdzv.group_ranks:
            rdzv.lost.pop(node.id, None)
            rdzv.finish(node.id, node.rank)
        elif not rdzv.is_member(node.id):
            rdzv.excuse(node.id, node.rank)
        else:
            return  # it has a place in a newer world, so it knows that its work was not done
        node.finished_round = round_
        sync_points.leave(self, node.id)
        node_check.lose(self, node, "", is_blamed=False)
        fleet_agents.agent_finished(self, node)
        self.touch(node.id)
        self._end_if_all_finished()

    def _end_if_all_finished(self) -> None:
        rdzv = self.state.rendezvous
        if rdzv.is_all_finished() and not any(data_books.is_reading(self.state, node) for node in rdzv.finished):
            self.end_job(ExitReason.COMPLETED, "The workers of all nodes ended well.")

    def _hear_finished(self, node: Node, command: Attach) -> None:
        """The report may have been lost with the stream, or with a journal."""
        if command.is_finished and command.running_round:
            self.finish_node(node, command.running_round, has_more_to_say=True)

    def lose(
        self,
        node: Node,
        life: NodeLife,
        why: str,
        *,
        exit_reason: NodeExit = NodeExit.KILLED,
        is_presumed: bool = False,
        ended_at: Micros | None = None,
        fault: str = "node",
    ) -> None:
        """A live node is there no more; if its world needs it, the others meet again, at no cost of the budget.

        `ended_at`: when it was last known to be there. `fault`: what the accountant calls it. The other two are for the platform that it came from (`fleet_agents.agent_lost`).
        """
        state, rdzv = self.state, self.state.rendezvous
        was_running = is_running(self.state, node)
        was_member = rdzv.is_member(node.id) and not node.finished_round
        was_claiming = node.id in rdzv.take_up.claims and not node.finished_round
        state.nodes.retire(node, life)
        sync_points.leave(self, node.id)
        data_books.workers_ended(self, node.id)
        checkpoints.lose(self, node.id)
        node_check.lose(self, node, "it was lost during the check", is_blamed=life is NodeLife.GONE)
        rdzv.forget(node.id, node.rank)
        rdzv.blocks.pop(node.id, None)
        if state.end is not None:
            state.goodput.left(node.rank, self.now)
            fleet_agents.agent_lost(self, node, exit_reason, is_presumed=is_presumed)
            return
        self.say(f"{why[0].upper()}{why[1:]}.")
        if was_member and node.entered_at is not None:
            # Also if the round is open already: its neighbours are often quicker to tell that they lost somebody.
            rdzv.bystanders.note_loss(node.rank, node.entered_at, self.now)
        if was_claiming:
            self.give_up_claims(why)
        if was_running:
            self._open(StopCause.MEMBERSHIP, why, fault=fault, node_rank=node.rank)
        elif was_member:
            incident = state.restarts.open_incident(rdzv.round)
            if incident is not None and blame.is_secondary(incident.first.failure):
                state.goodput.fault_named("node", why, incident.first, node_rank=node.rank)
        if node.finished_round or node.dismissed is not None:
            state.goodput.left(node.rank, self.now)
        else:
            state.goodput.lost(node.rank, self.now, ended_at)
        fleet_agents.agent_lost(self, node, exit_reason, is_presumed=is_presumed)

    def give_up(self, node: Node) -> None:
        """Its stream broke and it did not come back in time. It may still, with the news that it has finished."""
        rdzv, broken = self.state.rendezvous, self.state.nodes.broken[node.id]
        if broken.broken_at is not None and rdzv.is_member(node.id) and not node.finished_round:
            until = Micros(broken.broken_at + micros(reattach_window(self.detection)))
            rdzv.may_return_until = max(rdzv.may_return_until, until)
        why = f"{node.label} lost its connection and did not come back"
        self.lose(node, NodeLife.GONE, why, is_presumed=True, ended_at=broken.broken_at)

    def dismiss(self, node: Node, leave: Leave) -> None:
        """The job goes on without this node. If it is a member of the world, the next round must be open already."""
        assert not is_running(self.state, node), f"{node.label} is needed"
        self.state.rendezvous.forget(node.id, node.rank)
        self.state.rendezvous.blocks.pop(node.id, None)
        node_check.lose(self, node, "", is_blamed=False)
        node.dismissed = leave
        self.say(f"{node.label[0].upper()}{node.label[1:]} leaves: {leave.reason}.")
        self.touch(node.id)

    def rescale(self, former: Limits) -> None:
        """The limits are other ones now: who is too many goes, and a world that is too large makes room at once.

        A world below a raised minimum goes on until enough nodes are there: stopping it would help nobody.
        """
        state, rdzv = self.state, self.state.rendezvous
        assert state.terms is not None, "scaled before any node came"
        limits = state.terms.limits
        sentence = f"the job was scaled from {_span(former)} to {_span(limits)} nodes"
        self.say(f"{sentence[0].upper()}{sentence[1:]}.")
        if rdzv.take_up.size > limits.max_nodes:
            self.give_up_claims(sentence)
        if limits.max_nodes < former.max_nodes:  # growing is the rendezvous's own matter
            self._make_room(state.terms, sentence)
        fleet_wishes.retarget(self, limits.max_nodes)

    def _make_room(self, terms: JobTerms, why: str) -> None:
        """A world that is too large meets again, and who is too many goes.

        Not in the last minutes of a job, when nobody restarts any more. Nor yet while rounds are held: the members would
        stop for a round that cannot complete, and who holds it might be among those that go.
        """
        state, rdzv = self.state, self.state.rendezvous
        is_too_large = rdzv.is_too_large(terms.limits)
        if rdzv.finished or (is_too_large and rdzv.is_held):
            return
        if is_too_large:
            self._open(StopCause.MEMBERSHIP, why)
        there = [node for node in state.nodes.live.values() if not node.finished_round and node.dismissed is None]
        there.sort(key=lambda node: (not rdzv.is_member(node.id), node.rank))
        for node in there[terms.limits.max_nodes + terms.standby :]:
            if not is_running(state, node) and node.id not in rdzv.take_up.claims:
                self.dismiss(node, Leave("the job was scaled down", 0))

    def restart_workers(self, reason: str) -> None:
        """The members of the world stop their workers and meet again. Nobody failed, so nobody's budget pays."""
        self.say(f"{reason[0].upper()}{reason[1:]}.")
        self._open(StopCause.MEMBERSHIP, reason)

    def _open(
        self,
        cause: StopCause,
        reason: str,
        *,
        fault: str = "membership",
        node_rank: NodeRank | None = None,
        first: FirstFailure | None = None,
    ) -> None:
        state, rdzv = self.state, self.state.rendezvous
        if rdzv.world is not None:
            ranks = [member.node_rank for member in rdzv.world.members if member.node not in rdzv.finished]
            state.goodput.fault_began(fault, reason, self.now, rdzv.round, ranks)
            state.goodput.fault_named(fault, reason, first, node_rank=node_rank)
        members = [
            member.node
            for member in (rdzv.world.members if rdzv.world is not None else ())
            if member.node in state.nodes.live and member.node not in rdzv.finished
        ]
        rdzv.open(Opening(cause, reason), members, self.now)
        for node in members:
            self.touch(node)
            node_check.expect(self, state.nodes.live[node])
        node_check.recall_stale(self)

    def advance(self) -> None:
        """After each command: let the rendezvous go as far as it can, and the ended job end."""
        state, rdzv = self.state, self.state.rendezvous
        node_check.advance(self)
        fleet_settling.settle(self)
        if state.end is None:
            self._end_if_all_finished()
        if state.end is not None:
            self._finish_job(state.end)
            return
        if state.terms is None:
            return
        for block in rdzv.lift_expired(self.now):
            self.say(f"The lease of {block.owner} is over: the rendezvous is blocked no longer ({block.reason}).")
        pre_check.expire(self)
        if rdzv.take_up.claims:
            if rdzv.take_up.in_order() is not None:
                self._take_up()
                self.advance()
                return
            if rdzv.take_up.until <= self.now:
                come, size = len(rdzv.take_up.claims), rdzv.take_up.size
                self.give_up_claims(f"only {come} of its {size} nodes came back in time")
        self._meet(state.terms)
        if rdzv.is_active and state.terms.limits.pend_timeout is not None:
            rdzv.bystanders.note_pending(pending(state), self.now)

    def _meet(self, terms: JobTerms) -> None:
        """Open the next round if the world should grow, and complete it if its time has come."""
        state, rdzv, limits = self.state, self.state.rendezvous, terms.limits
        if rdzv.is_too_large(limits) and not rdzv.finished and not rdzv.is_held:
            self._make_room(terms, f"the job was scaled to {_span(limits)} nodes")
            fleet_wishes.retarget(self, limits.max_nodes)
        if rdzv.opening is None:
            reason = rdzv.reason_to_grow(limits, self.now)
            if reason is None:
                return
            self.say(f"{reason[0].upper()}{reason[1:]}.")
            self._open(StopCause.MEMBERSHIP, reason)
        if self._are_too_few_left():
            self._end_unfinished(limits)
            self.advance()
            return
        rdzv.note_shortage(limits, self.now)
        if state.check.is_under_way:
            rdzv.below_min_since = None  # it has deadlines of its own
        gives_up_at = rdzv.gives_up_at(limits)
        if gives_up_at is not None and gives_up_at <= self.now:
            is_anybody_there = bool(state.nodes.live)
            reason_ = ExitReason.RENDEZVOUS_TIMEOUT if is_anybody_there else ExitReason.NOT_ENOUGH_NODES
            sentence = node_check.explain_timeout(state, limits) or explain_timeout(rdzv, limits)
            self.end_job(reason_, sentence, exit_code=EXIT_RENDEZVOUS_TIMEOUT)
            self.advance()
            return
        self._try_world(terms)

    def _try_world(self, terms: JobTerms) -> None:
        """Complete the open round if its time has come, and charge what led to it."""
        state, rdzv, restarts = self.state, self.state.rendezvous, self.state.restarts
        world, sentence = choose_world(rdzv, terms.limits, self.now, limits_version=state.limits_version)
        if world is None:
            if rdzv.waiting and sentence != rdzv.verdict:  # that nobody waits yet is no news
                self.say(sentence)
            rdzv.verdict = sentence
            return
        incident = restarts.open_incident(rdzv.round)
        if incident is not None and blame.is_secondary(incident.first.failure):
            # No better failure was reported. If a member is missing, that is the cause and nobody's budget pays. A node
            # without power is missed by its peers long before its silence is believed: it just did not come back.
            incident.is_member_lost = any(
                node in rdzv.lost or node in rdzv.expected or not state.nodes.is_connected(node)
                for node in rdzv.group_ranks
            )
            if not self._judge(incident):
                self.advance()
                return
        restarts.settle(terms.restarts)
        former = rdzv.group_ranks
        rdzv.complete(world, self.now)
        steps = [node.step for node in state.nodes.live.values()]
        state.goodput.round_began(self.now, steps, is_full=len(world.members) >= terms.limits.max_nodes)
        state.kv.drop_before(Round(rdzv.round - NUM_ROUNDS_KEPT + 1))
        state.sync.drop_before(rdzv.round)
        data_books.round_began(self, rdzv.round)
        rdzv.verdict = sentence
        self.say(sentence)
        self._enter_running()
        for member in world.members:
            if member.node not in former:
                state.nodes.live[member.node].entered_at = self.now
            self.touch(member.node)
        for node in rdzv.expected:
            self.touch(node)  # they missed it and are asked for the next

    def _enter_running(self) -> None:
        """A suspended job may train, it only launches nothing: it is running when it is resumed."""
        state = self.state
        if state.fleet is not None and state.fleet.is_suspended:
            state.fleet.suspended_from = Stage.RUNNING
        else:
            state.stage = Stage.RUNNING

    def _are_too_few_left(self) -> bool:
        """Whether the open round can lead to nothing, because some have finished and the rest is no world."""
        terms = self.state.terms
        at = None if terms is None else self.state.rendezvous.too_few_at(terms.limits)
        return at is not None and at <= self.now

    def _end_unfinished(self, limits: Limits) -> None:
        """Some nodes finished, another failed or was lost, and too few are left for a world."""
        rdzv = self.state.rendezvous
        incident = self.state.restarts.open_incident(rdzv.round)
        num_left = len(rdzv.waiting) + rdzv.num_coming
        num_finished = len(rdzv.finished)
        assert rdzv.opening is not None, "nothing failed"
        if rdzv.world is None and not num_left and num_finished >= limits.min_nodes:
            self.end_job(ExitReason.COMPLETED, "The workers of all nodes that came to this master had ended well.")
            return
        sentence = (
            f"{num_finished} node{'' if num_finished == 1 else 's'} had finished already, and the {num_left} left "
            f"cannot form a world of at least {limits.min_nodes}."
        )
        if incident is not None:
            self.end_job(ExitReason.WORKER_ERROR, sentence, first=incident.first)
        else:
            why = rdzv.opening.reason
            self.end_job(ExitReason.NOT_ENOUGH_NODES, f"{why[0].upper()}{why[1:]}. {sentence}")

    def end_job(
        self,
        reason: ExitReason,
        sentence: str,
        *,
        first: FirstFailure | None = None,
        exit_code: int | None = None,
    ) -> None:
        state = self.state
        assert state.end is None, f"the job ended twice: {state.end} and {sentence}"
        if reason is ExitReason.COMPLETED:
            reason, sentence = self._judge_data(sentence)
        if exit_code is None:
            exit_code = 0 if reason is ExitReason.COMPLETED else EXIT_TRAINING
        state.end_sentence = sentence
        state.end = JobEnd(
            reason=reason,
            exit_code=exit_code,
            message=sentence if first is None else f"{blame.describe(first)} {sentence}",
            first_failure=first,
            num_restarts=state.restarts.num_restarts,
            num_rounds=state.rendezvous.round,
            distinct_failures=self._distinct_failures(first),
        )
        state.stage = Stage.STOPPING
        terms = JobTerms() if state.terms is None else state.terms
        state.drains_at = Micros(self.now + micros(terms.shutdown_timeout + DRAIN_MARGIN))
        state.rendezvous.close()
        state.check.close()
        self.say(f"The job ends ({reason.value}): {state.end.message}")
        fleet_settling.job_ended(self)
        self.touch_all()

    def _judge_data(self, sentence: str) -> tuple[ExitReason, str]:
        """Processes that ended well are not all that a job is about."""
        if missing := data_progress.unfinished(self.state.data):
            return ExitReason.DATA_UNFINISHED, f"{sentence} {missing}"
        return ExitReason.COMPLETED, f"{sentence} {data_progress.left_out(self.state.data)}".rstrip()

    def model_restored(self) -> None:
        """The ranks of the round have said which model they go on with."""
        checkpoints.give_up_history(self)

    def wants_end(self, reason: ExitReason, sentence: str) -> None:
        """The job ends when everything that follows from the command is known."""
        if self.ending is None and self.state.end is None:
            self.ending = (reason, sentence)

    def start_over(self, why: str) -> None:
        """Every worker was replaced: the rounds go on counting, and nothing else of the past counts."""
        state, rdzv = self.state, self.state.rendezvous
        rdzv.start_over()
        state.check.close()
        if state.restarts.incident is not None:
            state.restarts.incident.is_settled = True
        state.kv.drop_before(Round(rdzv.round + 1))
        state.sync.drop_before(Round(rdzv.round + 1))
        data_books.round_began(self, Round(rdzv.round + 1))
        for node in state.nodes.former.values():
            node.finished_round = Round(0)  # should it come back, its work is to be done again
        for node in state.nodes.live.values():
            node.finished_round = Round(0)
            if node.dismissed is None:
                rdzv.expect(node.id, node.rank)
                node_check.expect(self, node)
            self.touch(node.id)
        if state.nodes.live:
            self._open(StopCause.MEMBERSHIP, why)

    def _distinct_failures(self, first: FirstFailure | None) -> tuple[DistinctFailure, ...]:
        incident = self.state.restarts.incident
        is_about_it = incident is not None and first is not None and incident.round == first.round
        return tuple(incident.distinct) if incident is not None and is_about_it else ()

    def _finish_job(self, end: JobEnd) -> None:
        """The last node has left: the master may go, too."""
        state = self.state
        if state.stage is Stage.STOPPING and not state.nodes.live:
            state.stage = Stage.STOPPED
            state.drains_at = None
            state.goodput.finish(self.now)
            fleet_settling.job_finished(self)
            self.effects.append(FinishJob(end))

    def tell_nodes(self) -> None:
        """Give new wishes to the touched nodes, and have those told whose wish is another one than before."""
        state, live = self.state, self.state.nodes.live
        touched = sorted(live if self._is_all_touched else self._touched)
        for id_ in touched:
            node = live.get(id_)
            if node is None:
                continue
            wish = wish_of(state, node)
            if wish != node.desired.wish or node.desired.master_epoch != state.master_epoch or not node.desired.number:
                node.desired = Desired(node.desired.number + 1, state.master_epoch, wish)
                self.effects.append(TellNode(node.id))
        goodput.follow(state, touched, self.now)
        if state.rendezvous.is_active != self._was_active:  # the same wish to wait means another thing now
            goodput.follow(state, [*state.rendezvous.waiting, *state.rendezvous.absent], self.now)

    def say(self, verdict: str) -> None:
        self.verdicts.append(verdict)


def wish_of(state: JobState, node: Node) -> Wish:
    """What a live node shall be doing."""
    rdzv = state.rendezvous
    if state.end is not None:
        return End(state.end)
    if node.dismissed is not None:
        return node.dismissed
    if node.finished_round:
        return Idle(f"your workers finished in round {node.finished_round}; others still work")
    if node.id in state.check.needed:
        return node_check.wish_of(state, node)
    if node.id in rdzv.take_up.claims:
        return Run(rdzv.take_up.claims[node.id].world)
    if node.id in rdzv.waiting or node.id in rdzv.absent:
        return Wait("you have joined; a round will start with you when there is room")
    if rdzv.is_active and rdzv.is_member(node.id):
        return Run(rdzv.spec(node.id))
    if rdzv.opening is not None and rdzv.is_member(node.id):
        return Join(rdzv.next_round, rdzv.opening.cause, rdzv.opening.reason, node_check.note_on(state, node))
    reason = f"round {rdzv.next_round} is the next to form"
    return Join(rdzv.next_round, StopCause.MEMBERSHIP, reason, node_check.note_on(state, node))


def is_running(state: JobState, node: Node) -> bool:
    """Whether the node shall run workers of the active world right now."""
    rdzv = state.rendezvous
    return state.end is None and rdzv.is_active and rdzv.is_member(node.id) and not node.finished_round


def gone_times(state: JobState, nodes: Iterable[NodeId]) -> dict[NodeId, Micros]:
    """When those of the nodes that have no stream are given up."""
    broken = [node for node in nodes if node in state.nodes.broken]
    has_spare = bool(broken) and state.rendezvous.has_spare()
    is_last_hope = bool(broken) and _is_none_dispensable(state)
    return {
        node: state.nodes.gone_at(
            node,
            state.detection,
            has_spare=has_spare,
            is_needed=is_last_hope and not state.nodes.live[node].finished_round,
        )
        for node in broken
    }


def standby(state: JobState) -> list[NodeId]:
    """Who waits warm beside the world, as wished: the lowest ranks outside it."""
    wanted = 0 if state.terms is None else state.terms.standby
    return state.rendezvous.outsiders()[:wanted]


def pending(state: JobState) -> list[NodeId]:
    """Who waits beside the world although nobody asked for so many."""
    wanted = 0 if state.terms is None else state.terms.standby
    return state.rendezvous.outsiders()[wanted:]


def pend_timeouts(state: JobState) -> dict[NodeId, Micros]:
    """When pending nodes are sent away. Not while a round is open: it may take them."""
    timeout = None if state.terms is None else state.terms.limits.pend_timeout
    if timeout is None or state.end is not None or not state.rendezvous.is_active:
        return {}
    left_out = state.rendezvous.bystanders.left_out
    return {node: Micros(since + micros(timeout)) for node, since in left_out.items()}


def suspects(state: JobState) -> list[NodeId]:
    """Members that have not come back although all the others can say is that they lost somebody."""
    rdzv = state.rendezvous
    incident = state.restarts.open_incident(rdzv.round)
    if state.end is not None or incident is None or incident.first.failure.kind is not FailureKind.PEER_LOST:
        return []
    return [node for node in rdzv.expected if node in rdzv.group_ranks]


def _fault_kind(first: FirstFailure) -> str:
    return "hang" if first.failure.kind is FailureKind.DIAGNOSED else "worker"


def _span(limits: Limits) -> str:
    return f"{limits.min_nodes}:{limits.max_nodes}"


def _is_none_dispensable(state: JobState) -> bool:
    """Whether the job fails with the next unfinished node that goes, because some have finished and too few are left."""
    rdzv, terms = state.rendezvous, state.terms
    if state.end is not None or terms is None or not rdzv.finished:
        return False
    return num_usable(rdzv.num_unfinished - 1, terms.limits) < terms.limits.min_nodes
