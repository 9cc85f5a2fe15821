"""
A core that is broken on purpose is caught. Without these, a simulator that checks nothing would be green for ever.

Each mutation takes one promise away. The simulator has to notice within so many planned faults, and where the mutation
breaks one invariant only, it has to name that one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core import decision, job
from dlrover.core.check import commands as check_commands
from dlrover.core.check.cycle import CheckCycle
from dlrover.core.checkpoints import commits
from dlrover.core.checkpoints.state import SaveAttempt
from dlrover.core.commit_order import CommitSequence
from dlrover.core.data import checkpoint_text
from dlrover.core.data import commands as data_commands
from dlrover.core.data import restoring as data_restoring
from dlrover.core.data.books import DataBooks
from dlrover.core.data.dataset import Dataset
from dlrover.core.exchange import commands as exchange
from dlrover.core.exchange import kv_store
from dlrover.core.exchange.sync_points import SyncPoint, SyncPoints
from dlrover.core.failures import blame
from dlrover.core.fleet import early_stop, life_cycle, parameter_servers, platform_news, reconcile, relaunch, targets
from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode, ParameterServers
from dlrover.core.membership import attaching, departures
from dlrover.core.membership import commands as membership_commands
from dlrover.core.membership.liveness import Liveness
from dlrover.core.membership.nodes import Node, NodeLife, Nodes
from dlrover.core.membership.rendezvous import Rendezvous
from dlrover.core.replay_guard import ReplayGuard
from dlrover.master.loop.turn import Turn
from dlrover.protocol.messages.check import ExitClass
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec
from dlrover.protocol.messages.frames import Answer, Request
from dlrover.protocol.messages.job import ExitReason, Limits, NodeId, RestartPolicy, Round, Run
from dlrover.protocol.messages.kv import KvGet, KvQuery
from dlrover.simulator.campaign import Failure, draw_plan, run_plan, shrink
from dlrover.simulator.faults.kinds import Fault
from dlrover.simulator.masters import master
from dlrover.simulator.masters.inbox import VirtualInbox
from dlrover.simulator.masters.journal import VirtualJournal
from dlrover.simulator.masters.turning import VirtualTurning
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import Shape
from tests.simulator.test_found import FOUND

NUM_FAULTS = 5000
MOST_NODES = 12

Mutation = Callable[[pytest.MonkeyPatch], None]


def nobody_reacts(patch: pytest.MonkeyPatch, left_out: Callable[..., None]) -> None:
    """Take one function out of all rows."""
    tables = {
        rooms: decision.Reactions(*(tuple(row for row in rows if row is not left_out) for rows in table))
        for rooms, table in job.TABLES.items()
    }
    assert tables[True, True] != job.TABLES[True, True], f"{left_out} reacts to nothing"
    patch.setattr(job, "TABLES", tables)


def former_lives_are_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nodes, "current", lambda nodes, node, incarnation: nodes.live[node])


def commands_are_applied_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplayGuard, "answered", lambda replay_guard, origin: None)


def masters_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualJournal, "check_fence", lambda journal, writer: None)


def lost_nodes_are_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blame, "is_charged", lambda incident: True)


def the_same_step_is_progress(patch: pytest.MonkeyPatch) -> None:
    """A script that fails at one place is restarted without end."""
    original = blame.made_progress

    def made_progress(policy: RestartPolicy, restarts: blame.Restarts, incident: blame.Incident) -> bool:
        is_same = incident.step is not None and incident.step == restarts.best_step
        return is_same or original(policy, restarts, incident)

    patch.setattr(blame, "made_progress", made_progress)


def progress_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blame, "made_progress", lambda policy, restarts, incident: False)


def worlds_ignore_the_unit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "num_usable", lambda limits, num_nodes: min(num_nodes, limits.max_nodes))


def worlds_ignore_the_maximum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "num_usable", lambda limits, num_nodes: num_nodes - num_nodes % limits.node_unit)


def nobody_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision.Decision, "touch", lambda self, node: None)


def who_trains_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """The next round is for others; an old world goes on beside the new one."""
    original = decision.Decision.touch

    def touch(self: decision.Decision, node: NodeId) -> None:
        known = self.state.nodes.live.get(node)
        if known is None or not isinstance(known.desired.wish, Run):
            original(self, node)

    patch.setattr(decision.Decision, "touch", touch)


def two_nodes_have_one_place(patch: pytest.MonkeyPatch) -> None:
    original = Rendezvous.spec
    patch.setattr(Rendezvous, "spec", lambda rdzv, node: replace(original(rdzv, node), group_rank=0))


def a_replay_counts_differently(patch: pytest.MonkeyPatch) -> None:
    """As if something outside the state had a say."""
    numbers = itertools.count(1)
    original = Nodes.admit

    def admit(nodes: Nodes, *args: Any, **kwargs: Any) -> Any:
        node = original(nodes, *args, **kwargs)
        node.host = f"{node.host}-{next(numbers)}"
        return node

    patch.setattr(Nodes, "admit", admit)


def a_record_is_lost(patch: pytest.MonkeyPatch) -> None:
    original = CommitSequence.take

    def take(sequence: CommitSequence) -> Any:
        batch = original(sequence)
        if batch is not None and batch.first_number % 7 == 0:
            sequence._job.state.verdict = "not in the journal"
        return batch

    patch.setattr(CommitSequence, "take", take)


def the_silent_are_never_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "next_deadline", lambda observations: None)
    patch.setattr(Liveness, "tick", lambda observations, now, due_at: [])


def a_world_may_hold_who_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rendezvous, "stream_broke", lambda rdzv, node: None)


def unwritten_decisions_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The shell goes on with a state that the full disk has never seen."""

    def keep(self: VirtualTurning, before: bytes, works: list[Any]) -> None:
        self._release(None, Turn())

    patch.setattr(VirtualTurning, "_fall_back", keep)


def replaced_masters_do_not_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(master.VirtualMaster, "look_at_the_fence", lambda self: None)


def evictions_are_charged(patch: pytest.MonkeyPatch) -> None:
    original = relaunch.decide
    patch.setattr(relaunch, "decide", lambda end, terms: replace(original(end, terms), is_charged=True))


def relaunches_are_without_limit(patch: pytest.MonkeyPatch) -> None:
    original = relaunch.decide

    def charge(fleet: Fleet, node: FleetNode) -> None:
        spent = fleet.replicas[node.node_type].spent
        spent[node.rank] = spent.get(node.rank, 0) + 1

    patch.setattr(relaunch, "decide", lambda end, terms: original(replace(end, num_relaunches=-1), terms))
    patch.setattr(Fleet, "charge", charge)


def lost_nodes_are_left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "remove", lambda fleet, node, removal: None)


def nodes_outlive_their_job(patch: pytest.MonkeyPatch) -> None:
    nobody_reacts(patch, reconcile.on_job_finished)


def intents_die_with_their_master(patch: pytest.MonkeyPatch) -> None:
    original = platform_news.hear_list

    def hear_list(decision: Any, told: Any) -> None:
        original(decision, told)
        if decision.state.master_epoch > 1:
            decision.state.fleet.to_launch, decision.state.fleet.to_remove = {}, {}

    patch.setattr(platform_news, "hear_list", hear_list)


def exchanged_nodes_stay(patch: pytest.MonkeyPatch) -> None:
    original = life_cycle.started

    def started(decision: Any, node: FleetNode) -> None:
        decision.state.fleet.migrations = {}
        original(decision, node)

    patch.setattr(life_cycle, "started", started)


def exchanged_nodes_are_not_told(patch: pytest.MonkeyPatch) -> None:
    def send_away(decision: decision.Decision, node: Node, why: str, **details: Any) -> None:
        departures.lose(decision, node, NodeLife.GONE, why, **details)

    for module in (attaching, departures):
        patch.setattr(module, "send_away", send_away)


def suspended_jobs_launch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "is_suspended", property(lambda fleet: False))


def a_pause_counts_as_waiting(patch: pytest.MonkeyPatch) -> None:
    original = early_stop._too_long

    def too_long(state: Any) -> Any:
        former, state.fleet.suspended_from = state.fleet.suspended_from, None
        found = original(state)
        state.fleet.suspended_from = former
        return found

    patch.setattr(early_stop, "_too_long", too_long)


def suspended_jobs_stay_so(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(targets, "resume", lambda decision: None)


def released_jobs_get_no_new_nodes(patch: pytest.MonkeyPatch) -> None:
    """A resumed job lacks what it let go."""
    original = targets.resume

    def resume(decision: Any) -> None:
        decision.state.fleet.is_released = False
        original(decision)

    patch.setattr(targets, "resume", resume)


def released_nodes_are_taken_over(patch: pytest.MonkeyPatch) -> None:
    """A platform that shows them late is believed that the job wants them."""
    patch.setattr(platform_news, "_see_off", lambda decision, fleet, node, agent: None)


def servers_go_before_the_switch(patch: pytest.MonkeyPatch) -> None:
    original = targets.scale_servers

    def scale_servers(decision: Any, count: int) -> None:
        original(decision, count)
        if not parameter_servers.is_somebody_awaited(decision.state.fleet):
            targets.switch_servers(decision)

    patch.setattr(targets, "scale_servers", scale_servers)


def servers_are_used_before_they_run(patch: pytest.MonkeyPatch) -> None:
    def next_cluster(fleet: Fleet) -> list[FleetNode]:
        return [fleet.nodes[node] for _, node in sorted(fleet.replicas[NodeType.PS].holders.items())]

    patch.setattr(parameter_servers, "next_cluster", next_cluster)


def lost_variables_are_not_told_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParameterServers, "lost", lambda servers: setattr(servers, "is_changed", True))


def evaluations_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    nobody_reacts(patch, reconcile.on_all_finished)


def nobody_hears_that_the_workers_switched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(targets, "switch_servers", lambda decision: None)


def a_job_needs_no_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(life_cycle, "_are_servers_left", lambda fleet: True)


def servers_may_return(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(life_cycle, "_is_serving", lambda fleet, node: False)


def nobody_is_checked(patch: pytest.MonkeyPatch) -> None:
    nobody_reacts(patch, check_commands.on_node_expected)
    nobody_reacts(patch, check_commands.on_round_opened)


def the_healthy_are_blamed(patch: pytest.MonkeyPatch) -> None:
    original = CheckCycle.report

    def report(cycle: CheckCycle, rank: Any, round_: Any, elapsed_ms: float, exit_class: ExitClass) -> None:
        original(cycle, rank, round_, elapsed_ms, ExitClass.COMPUTE if rank == 1 else exit_class)

    patch.setattr(CheckCycle, "report", report)


def adds_count_twice(patch: pytest.MonkeyPatch) -> None:
    original = kv_store._added
    patch.setattr(kv_store, "_added", lambda value, command: original(value, command) + command.amount)


def questions_are_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    """From a state of which the disk has not seen everything."""
    original = VirtualInbox.accept

    def accept(self: VirtualInbox, line: Any, request: Request) -> None:
        if not isinstance(request.body, KvQuery):
            original(self, line, request)
        elif isinstance(request.body, KvGet):
            answer = self._master.job.state.kv.answer(request.body)
            if not isinstance(answer, kv_store.NotYet):
                self._master.send(line, Answer(id=request.id, body=answer))

    patch.setattr(VirtualInbox, "accept", accept)


def one_shard_makes_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SaveAttempt, "is_complete", property(lambda attempt: bool(attempt.writers)))


def dead_nodes_shall_commit(patch: pytest.MonkeyPatch) -> None:
    nobody_reacts(patch, commits.on_agent_gone)


def trackers_go_back(patch: pytest.MonkeyPatch) -> None:
    """A late save of an older step becomes the newest."""
    patch.setattr(SaveAttempt, "order", property(lambda attempt: (attempt.round, -attempt.step, -attempt.number)))


def ports_serve_two_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership_commands, "is_offer_used", lambda rdzv, node, offer: False)


def repeated_joins_prolong_the_call(patch: pytest.MonkeyPatch) -> None:
    original = Rendezvous.join

    def join(rdzv: Rendezvous, node: NodeId, joined: Any, now: Any, *, is_connected: bool) -> None:
        original(rdzv, node, joined, now, is_connected=is_connected)
        rdzv.call_began_at = now

    patch.setattr(Rendezvous, "join", join)


def a_step_back_leaves_manifests_empty(patch: pytest.MonkeyPatch) -> None:
    """What storage has is taken for a part of the older model."""
    patch.setattr(data_restoring, "min", max, raising=False)


def a_model_keeps_its_future(patch: pytest.MonkeyPatch) -> None:
    """What was read after the restored step counts as seen."""
    patch.setattr(Dataset, "restore", lambda dataset, step, claims=(), *, round_=None: [])


def leases_outlive_their_round(patch: pytest.MonkeyPatch) -> None:
    original = Dataset._return
    patch.setattr(Dataset, "_return", lambda dataset, ranges: original(dataset, list(ranges)[:-1]))


def a_dead_branch_makes_records_final(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataBooks, "last_shared", lambda books, step, round_: 10**6)


def a_checkpoint_forgets_what_is_being_read(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint_text.write_checkpoint

    def write(dataset: Dataset, step: int, *, most_listed: int) -> str:
        return original(replace(dataset, held={}), step, most_listed=most_listed)

    patch.setattr(checkpoint_text, "write_checkpoint", write)


def a_restored_model_takes_everything_back(patch: pytest.MonkeyPatch) -> None:
    """Also what workers of the very round have just been given."""
    original = Dataset.restore
    patch.setattr(Dataset, "restore", lambda dataset, step, claims=(), *, round_=None: original(dataset, step, claims))


def what_a_model_claims_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dataset, "_claim", lambda dataset, claims: [])


def the_word_about_a_model_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Who is quicker than the rank that speaks gets shards, and loses them when the data go back to a checkpoint."""
    patch.setattr(Dataset, "take_over_leases", lambda dataset, former, round_: None)
    original = data_commands._is_held_back
    patch.setattr(
        data_commands,
        "_is_held_back",
        lambda command, *others: original(replace(command, has_model=False), *others),
    )


def the_first_to_come_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncPoint, "is_reached", property(lambda point: bool(point.joined)))


def the_dead_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    nobody_reacts(patch, exchange.on_workers_ended)


def who_stands_by_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    original = exchange.targets_of
    patch.setattr(exchange, "targets_of", lambda state, round_: original(state, Round(0)))


def barriers_open_twice(patch: pytest.MonkeyPatch) -> None:
    original = SyncPoints.notify

    def notify(points: SyncPoints, name: str, round_: Round) -> None:
        original(points, name, round_)
        original(points, name, round_)

    patch.setattr(SyncPoints, "notify", notify)


def barriers_stay_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncPoints, "notify", lambda points, name, round_: None)


def ends_name_nobody(patch: pytest.MonkeyPatch) -> None:
    original = decision.Decision.end_job

    def end_job(self: decision.Decision, reason: ExitReason, sentence: str, **more: Any) -> None:
        original(self, reason, "The job failed.", **more)

    patch.setattr(decision.Decision, "end_job", end_job)


LIKELY = {
    "a_world_may_hold_who_is_gone": 18,
    "replaced_masters_do_not_look": 20,
    "relaunches_are_without_limit": 22,
    "intents_die_with_their_master": 22,
    "exchanged_nodes_stay": 18,
    "exchanged_nodes_are_not_told": 18,
    "suspended_jobs_stay_so": 18,
    "servers_go_before_the_switch": 173,
    "servers_are_used_before_they_run": 112,
    "a_restored_model_takes_everything_back": 24,
    "what_a_model_claims_is_not_heard": 65,
    "the_word_about_a_model_is_not_waited_for": 134,
}
"""
Seeds that noticed the mutations which few seeds notice. Only the time of the search hangs on them: if the faults of a seed change,
the search goes on from the first one.
"""


@pytest.mark.parametrize(
    ("mutation", "invariants"),
    [
        (former_lives_are_heard, {"I6", "core"}),
        (commands_are_applied_twice, {"I6", "core"}),
        (masters_are_not_fenced, {"I6", "I5"}),
        (lost_nodes_are_charged, {"I7"}),
        (the_same_step_is_progress, {"I7"}),
        (progress_is_not_seen, {"I7"}),
        (ports_serve_two_rounds, {"I1"}),
        (repeated_joins_prolong_the_call, {"call"}),
        (trackers_go_back, {"I4"}),
        (a_step_back_leaves_manifests_empty, {"I3"}),
        (worlds_ignore_the_unit, {"I2"}),
        (worlds_ignore_the_maximum, {"I2"}),
        (nobody_is_told, {"I1", "I8"}),
        (who_trains_is_not_told, {"I1"}),
        (two_nodes_have_one_place, {"I1"}),
        (a_replay_counts_differently, {"I5"}),
        (a_record_is_lost, {"I5"}),
        (the_silent_are_never_missed, {"I8"}),
        (a_world_may_hold_who_is_gone, {"I2", "I1"}),
        (unwritten_decisions_are_kept, {"I5"}),
        (replaced_masters_do_not_look, {"I8"}),
        (evictions_are_charged, {"I7"}),
        (relaunches_are_without_limit, {"I7"}),
        (lost_nodes_are_left_behind, {"fleet"}),
        (nodes_outlive_their_job, {"fleet"}),
        (intents_die_with_their_master, {"fleet", "I8"}),
        (exchanged_nodes_stay, {"fleet"}),
        (exchanged_nodes_are_not_told, {"fleet"}),
        (suspended_jobs_launch, {"fleet"}),
        (suspended_jobs_stay_so, {"fleet", "I8"}),
        (released_jobs_get_no_new_nodes, {"fleet", "I8"}),
        (servers_go_before_the_switch, {"servers"}),
        (servers_are_used_before_they_run, {"servers"}),
        (lost_variables_are_not_told_of, {"servers"}),
        (evaluations_are_not_waited_for, {"I8", "fleet"}),
        (nobody_is_checked, {"check"}),
        (the_healthy_are_blamed, {"check"}),
        (adds_count_twice, {"KV"}),
        (questions_are_answered_at_once, {"KV"}),
        (one_shard_makes_a_checkpoint, {"I4"}),
        (dead_nodes_shall_commit, {"I4"}),
        (a_model_keeps_its_future, {"I3"}),
        (leases_outlive_their_round, {"I3"}),
        (a_dead_branch_makes_records_final, {"I3"}),
        (a_checkpoint_forgets_what_is_being_read, {"I3"}),
        (a_restored_model_takes_everything_back, {"I3"}),
        (what_a_model_claims_is_not_heard, {"I3"}),
        (the_word_about_a_model_is_not_waited_for, {"I3"}),
        (the_first_to_come_goes_on, {"sync"}),
        (the_dead_are_waited_for, {"sync"}),
        (barriers_open_twice, {"sync"}),
        (barriers_stay_closed, {"sync"}),
    ],
)
def test_a_broken_promise_is_noticed(mutation: Mutation, invariants: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    rooms = {
        "KV": "has_store_traffic",
        "I3": "dataset",
        "I4": "has_store_traffic",
        "check": "check",
        "fleet": "fleet",
        "servers": "has_servers",
        "sync": "has_sync_traffic",
    }
    room = next((rooms[name] for name in sorted(invariants) if name in rooms), "")
    failure = first_failure(invariants, room, likely=LIKELY.get(mutation.__name__, 1))
    assert failure.invariant in invariants, failure.sentence


def test_a_pause_that_counts_as_waiting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seeds wait for so long."""
    faults = (
        Fault(at=300_000_000, kind="platform-refuses", pick=0, amount=0.99),
        Fault(at=301_000_000, kind="eviction", pick=0, amount=0.5),
        Fault(at=400_000_000, kind="suspension", pick=1, amount=1.0),  # which releases no node
    )
    fleet = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=3)}, pending_timeout=600.0)
    shape = Shape(min_nodes=3, max_nodes=3, fleet=fleet, num_steps=600)
    plan = SeedPlan(seed=1, shape=shape, faults=faults, hours=0.6)
    assert isinstance(run_plan(plan), Result)
    a_pause_counts_as_waiting(monkeypatch)
    failure = run_plan(plan)
    assert isinstance(failure, Failure)
    assert failure.invariant == "I8"
    assert "suspended" in failure.sentence


def test_a_released_node_that_counts_as_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seeds lose the journal and release the nodes before the platform is heard."""
    released_nodes_are_taken_over(monkeypatch)
    failure = run_plan(FOUND["a-released-node-counts-as-one-that-has-done-its-work"])
    assert isinstance(failure, Failure)
    assert failure.invariant == "I8"


def test_an_end_that_names_no_failure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seeds have an agent that gives up its master as the last of its job."""
    ends_name_nobody(monkeypatch)
    failure = run_plan(FOUND["the-last-agent-gives-up-and-says-so"])
    assert isinstance(failure, Failure)
    assert failure.invariant == "I8"
    assert "no failure is named" in failure.sentence


@pytest.mark.parametrize(
    ("mutation", "exit_codes"),
    [(nobody_hears_that_the_workers_switched, ()), (a_job_needs_no_server, (201,)), (servers_may_return, (0,))],
)
def test_servers_that_do_not_settle_are_noticed(
    mutation: Mutation, exit_codes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few seeds are calm for so long."""
    plan = FOUND["a-job-goes-on-without-any-server"]
    plan = replace(plan, faults=tuple(replace(plan.faults[0], amount=0.0 if code else 0.5) for code in exit_codes))
    assert isinstance(run_plan(plan), Result)
    mutation(monkeypatch)
    failure = run_plan(plan)
    assert isinstance(failure, Failure)
    assert failure.invariant == "servers"


def test_a_worker_that_waits_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(min_nodes=2, max_nodes=2, spares=1, num_steps=2000, has_sync_traffic=True)
    plan = SeedPlan(seed=1, shape=shape, faults=(Fault(at=100_000_000, kind="stall", pick=0, amount=0.0),), hours=0.1)
    assert isinstance(run_plan(plan), Result)
    who_stands_by_is_waited_for(monkeypatch)
    failure = run_plan(plan)
    assert isinstance(failure, Failure)
    assert failure.invariant == "sync"


def test_a_failing_seed_shrinks_to_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_nodes_are_charged(monkeypatch)
    failure = first_failure({"I7"})
    plan, smaller = shrink(draw_plan(failure.seed), failure.invariant)
    assert smaller.invariant == failure.invariant
    assert len(plan.faults) <= 5


def first_failure(invariants: Container[str], room: str = "", *, likely: int = 1) -> Failure:
    """
    Of one of these; others may be missed before. `room`: only jobs that have it, or it would take longer. `likely`: the seed that is
    tried first.
    """
    num_faults = 0
    for seed in itertools.chain([likely], itertools.count(1)):
        plan = draw_plan(seed)
        if plan.shape.num_nodes > MOST_NODES or (room and not getattr(plan.shape, room)):
            continue
        outcome = run_plan(plan)
        if isinstance(outcome, Failure) and (outcome.invariant in invariants or outcome.invariant == "core"):
            return outcome
        num_faults += outcome.num_faults
        assert num_faults < NUM_FAULTS, "nobody noticed"
    raise AssertionError("unreachable")
