"""
The course of a job while one command is applied: the decisions that several commands share.

A command checks and then says what happened (a node was lost, workers failed, somebody joined); what follows from it is
decided here, on the state, with everything that shall leave the core gathered on the way: effects, verdicts, and the
nodes whose wish may be another one now. A course lives for one command, so nothing of it can leak into the next.

What a node shall do is a function of the state (`wish_of`). Whoever may have got another wish is only marked; at the
end all marked nodes are looked at once, and those whose wish did change are told.
"""

from __future__ import annotations

from dlrover.core.check import commands as check_commands
from dlrover.core.check import pre_check
from dlrover.core.checkpoints import commits
from dlrover.core.data import books as data_books
from dlrover.core.data import progress as data_progress
from dlrover.core.desired import is_running, wish_of
from dlrover.core.exchange import sync_points
from dlrover.core.failures import blame, incidents
from dlrover.core.fleet import agents as fleet_agents
from dlrover.core.fleet import reconcile, targets
from dlrover.core.goodput import accountant
from dlrover.core.membership import adoption, rounds
from dlrover.core.membership.nodes import Node, NodeLife, reattach_window
from dlrover.core.membership.rendezvous import Opening
from dlrover.core.membership.waiting import pending
from dlrover.core.outcome import micros
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.job import (
    Attach,
    Desired,
    Detection,
    DistinctFailure,
    Effect,
    EndStream,
    ExitReason,
    FailureKind,
    FinishJob,
    FirstFailure,
    JobEnd,
    JobTerms,
    Leave,
    Limits,
    Micros,
    NodeId,
    NodeRank,
    Round,
    Stage,
    StopCause,
    TellNode,
    WorkerFailure,
)

DRAIN_MARGIN = 5.0
"""Seconds that nodes have for leaving after the end, on top of what their workers have for stopping."""
EXIT_TRAINING = 1
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
        claim = adoption.hear_claim(self, command, rank)
        node = nodes.admit(command, rank, is_continued=claim is not None)
        if claim is not None:
            rdzv.take_up.add(node.id, claim)
        state.senders.begin(node.id, node.incarnation)
        if state.end is None:
            self._hear_finished(node, command)
            if not node.finished_round and claim is None:
                rdzv.expect(node.id, node.rank)
                check_commands.expect(self, node)
            self._open_first()
        return node

    def _open_first(self) -> None:
        """Nobody has a world, so there is nobody who would have to lose it before a round opens."""
        rdzv = self.state.rendezvous
        if rdzv.world is None and rdzv.opening is None:
            self.open_round(StopCause.MEMBERSHIP, "the job begins")

    def _rank_for(self, command: Attach) -> NodeRank:
        """The one it had before, if nobody else has it by now."""
        nodes, former = self.state.nodes, command.former_rank
        if former is not None and former not in nodes.holders and former not in nodes.former:
            return former
        return nodes.lowest_free_rank()

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
        commits.lose(self, node.id)
        check_commands.lose(self, node, "", is_blamed=False)
        state.senders.begin(node.id, node.incarnation)
        rdzv.blocks.pop(node.id, None)
        if state.end is not None or node.dismissed is not None:
            return
        self._hear_finished(node, command)
        if node.finished_round:
            return
        if node.id in rdzv.take_up.claims:
            adoption.give_up_claims(self, f"the agent of {node.label} was restarted, its workers are dead")
        incident = state.restarts.open_incident(rdzv.round)
        if not was_running:
            rdzv.expect(node.id, node.rank)
            check_commands.expect(self, node)
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
                incidents.begin(self, first, lived, (failure,))
            elif incident is not None:
                incidents.hear_more(
                    self, incident, first, lived, (failure,)
                )  # others told first that they lost this one

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
        check_commands.lose(self, node, "", is_blamed=False)
        fleet_agents.agent_finished(self, node)
        self.touch(node.id)
        self._end_if_all_finished()

    def _end_if_all_finished(self) -> None:
        rdzv = self.state.rendezvous
        if not rdzv.is_all_finished() or reconcile.is_work_left_beside(self.state):
            return
        if not any(data_books.is_reading(self.state, node) for node in rdzv.finished):
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
        commits.lose(self, node.id)
        check_commands.lose(self, node, "it was lost during the check", is_blamed=life is NodeLife.GONE)
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
            adoption.give_up_claims(self, why)
        if was_running:
            self.open_round(StopCause.MEMBERSHIP, why, fault=fault, node_rank=node.rank)
        elif was_member:
            incident = state.restarts.open_incident(rdzv.round)
            if incident is not None and blame.is_secondary(incident.first.failure):
                state.goodput.fault_named("node", why, incident.first, node_rank=node.rank)
        if node.finished_round or node.dismissed is not None:
            state.goodput.left(node.rank, self.now)
        else:
            state.goodput.lost(node.rank, self.now, ended_at)
        fleet_agents.agent_lost(self, node, exit_reason, is_presumed=is_presumed)

    def send_away(
        self, node: Node, why: str, *, exit_reason: NodeExit = NodeExit.KILLED, is_presumed: bool = False
    ) -> None:
        """Lose a node whose agent may be well: it would train on beside its successor until the platform removes it.

        Without its stream it presents itself anew, as one whose stream is down does, and is refused: it ends its workers
        and goes. Who has finished or was dismissed has no workers to end, and knows.
        """
        is_at_work = not node.finished_round and node.dismissed is None
        if self.state.end is None and is_at_work and self.state.nodes.is_connected(node.id):
            self.effects.append(EndStream(node.id, node.incarnation))
        self.lose(node, NodeLife.GONE, why, exit_reason=exit_reason, is_presumed=is_presumed)

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
        check_commands.lose(self, node, "", is_blamed=False)
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
        sentence = f"the job was scaled from {rounds.span_of(former)} to {rounds.span_of(limits)} nodes"
        self.say(f"{sentence[0].upper()}{sentence[1:]}.")
        if rdzv.take_up.size > limits.max_nodes:
            adoption.give_up_claims(self, sentence)
        if limits.max_nodes < former.max_nodes:  # growing is the rendezvous's own matter
            self.make_room(state.terms, sentence)
        targets.retarget(self, limits.max_nodes)

    def make_room(self, terms: JobTerms, why: str) -> None:
        """A world that is too large meets again, and who is too many goes.

        Not in the last minutes of a job, when nobody restarts any more. Nor yet while rounds are held: the members would
        stop for a round that cannot complete, and who holds it might be among those that go.
        """
        state, rdzv = self.state, self.state.rendezvous
        is_too_large = rdzv.is_too_large(terms.limits)
        if rdzv.finished or (is_too_large and rdzv.is_held):
            return
        if is_too_large:
            self.open_round(StopCause.MEMBERSHIP, why)
        there = [node for node in state.nodes.live.values() if not node.finished_round and node.dismissed is None]
        there.sort(key=lambda node: (not rdzv.is_member(node.id), node.rank))
        for node in there[terms.limits.max_nodes + terms.standby :]:
            if not is_running(state, node) and node.id not in rdzv.take_up.claims:
                self.dismiss(node, Leave("the job was scaled down", 0))

    def restart_workers(self, reason: str) -> None:
        """The members of the world stop their workers and meet again. Nobody failed, so nobody's budget pays."""
        self.say(f"{reason[0].upper()}{reason[1:]}.")
        self.open_round(StopCause.MEMBERSHIP, reason)

    def open_round(
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
        reconcile.note_awaited(state)
        for node in members:
            self.touch(node)
            check_commands.expect(self, state.nodes.live[node])
        check_commands.recall_stale(self)

    def advance(self) -> None:
        """After each command: let the rendezvous go as far as it can, and the ended job end."""
        state, rdzv = self.state, self.state.rendezvous
        check_commands.advance(self)
        rdzv.are_members_checked = check_commands.are_members_checked(state)
        reconcile.settle(self)
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
                adoption.take_up(self)
                self.advance()
                return
            if rdzv.take_up.until <= self.now:
                come, size = len(rdzv.take_up.claims), rdzv.take_up.size
                adoption.give_up_claims(self, f"only {come} of its {size} nodes came back in time")
        rounds.meet(self, state.terms)
        if rdzv.is_active and state.terms.limits.pend_timeout is not None:
            rdzv.bystanders.note_pending(pending(state), self.now)

    def enter_running(self) -> None:
        """A suspended job may train, it only launches nothing: it is running when it is resumed."""
        state = self.state
        if state.fleet is not None and state.fleet.is_suspended:
            state.fleet.suspended_from = Stage.RUNNING
        else:
            state.stage = Stage.RUNNING

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
        reconcile.job_ended(self)
        self.touch_all()

    def _judge_data(self, sentence: str) -> tuple[ExitReason, str]:
        """Processes that ended well are not all that a job is about."""
        if missing := data_progress.unfinished(self.state.data):
            return ExitReason.DATA_UNFINISHED, f"{sentence} {missing}"
        return ExitReason.COMPLETED, f"{sentence} {data_progress.left_out(self.state.data)}".rstrip()

    def model_restored(self) -> None:
        """The ranks of the round have said which model they go on with."""
        commits.give_up_history(self)

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
                check_commands.expect(self, node)
            self.touch(node.id)
        if state.nodes.live:
            self.open_round(StopCause.MEMBERSHIP, why)

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
            reconcile.job_finished(self)
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
        accountant.follow(state, touched, self.now)
        if state.rendezvous.is_active != self._was_active:  # the same wish to wait means another thing now
            accountant.follow(state, [*state.rendezvous.waiting, *state.rendezvous.absent], self.now)

    def say(self, verdict: str) -> None:
        self.verdicts.append(verdict)
