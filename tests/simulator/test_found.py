"""
Lives that once broke something: each is the shortest list of faults that showed a bug, kept for ever.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import CheckTerms
from dlrover.protocol.messages.cluster import ModelSaved
from dlrover.protocol.messages.data import DatasetSpec
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    MigrateNode,
    NodeExit,
    NodePhase,
    NodeType,
    ReplicaSpec,
    Resource,
    Strategy,
)
from dlrover.protocol.messages.job import PlatformId, RestartPolicy
from dlrover.simulator.campaign import draw_plan, draw_task_plan, run_plan
from dlrover.simulator.faults.kinds import Fault
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import Shape
from tests.core.fleet.fleet_scene import FleetScene, ps_job, workers
from tests.core.fleet.test_fleet_properties import CountedScene
from tests.core.scene import terms

WORKERS = {NodeType.WORKER: ReplicaSpec(count=3, max_relaunches=5)}
PAIR = {NodeType.WORKER: ReplicaSpec(count=2, max_relaunches=5)}

FOUND = {
    # A platform showed nodes that this master had never asked for, because its journal was lost: nor did it ask for
    # their removal when the job was over.
    "nodes-of-a-lost-journal-stay-behind": SeedPlan(
        seed=145,
        shape=Shape(min_nodes=3, max_nodes=3, fleet=FleetSpec(replicas=WORKERS), num_steps=600),
        faults=(Fault(at=163776410, kind="journal-lost", pick=790268902, amount=0.9124693743073743),),
        hours=0.5,
    ),
    # No node was left to tell the newest epoch, and the platform refused all launches as those of an older master.
    "a-platform-refuses-a-master-without-its-journal": SeedPlan(
        seed=1,
        shape=Shape(min_nodes=1, max_nodes=3, fleet=FleetSpec(replicas=WORKERS), num_steps=600),
        faults=(
            Fault(at=200_000_000, kind="master-crash", pick=0, amount=0.5),
            Fault(at=250_000_000, kind="eviction", pick=0, amount=0.5),
            Fault(at=400_000_000, kind="eviction", pick=0, amount=0.5),
            Fault(at=400_000_001, kind="eviction", pick=0, amount=0.5),
            Fault(at=400_000_002, kind="eviction", pick=0, amount=0.5),
            Fault(at=400_000_003, kind="journal-lost", pick=0, amount=0.5),
        ),
        hours=0.5,
    ),
    # The first list came after the exchange had been decided, and gave the new node another id: nobody exchanged any more.
    "an-exchange-before-the-first-list-leaves-two-nodes": SeedPlan(
        seed=2,
        shape=Shape(min_nodes=1, max_nodes=3, fleet=FleetSpec(replicas=WORKERS), num_steps=600),
        faults=(
            Fault(at=299_000_000, kind="cloud-away", pick=0, amount=0.8),
            Fault(at=300_000_000, kind="journal-lost", pick=0, amount=0.1),
            Fault(at=310_000_000, kind="exchange", pick=0, amount=0.5),
        ),
        hours=0.5,
    ),
    # The last call of the next round ended before the silence of the node was believed, and its peers, who had only
    # lost their connection to it, paid a restart each time.
    "a-node-without-power-is-charged-to-its-peers": SeedPlan(
        seed=16,
        shape=Shape(min_nodes=2, max_nodes=3, spares=1, local_world_size=8, restarts=RestartPolicy(max_restarts=7)),
        faults=(
            Fault(at=457062701, kind="preemption", pick=458563895, amount=0.2122013266869337),
            Fault(at=462737842, kind="worker-crash", pick=1015296256, amount=0.8820382956713625),
            Fault(at=595521212, kind="power-loss", pick=445677477, amount=0.017524976267879633),
        ),
        hours=1.0,
    ),
    # A master slept for some seconds, was replaced, woke up and had nothing to write: so it never met the fence, its
    # agents stayed with it, and the new master waited for them until it gave up. An idle master has to look.
    "a-replaced-master-with-nothing-to-write-keeps-its-agents": SeedPlan(
        seed=20,
        shape=Shape(min_nodes=2, max_nodes=2, node_unit=2, num_steps=2520),
        faults=(Fault(at=1299757748, kind="two-masters", pick=478249108, amount=0.11887009662766057),),
        hours=1.0,
    ),
    # A report of a failure waited for a master, which came without its journal and numbered the nodes anew: the report was
    # refused, and the agent began a new life that was charged to it.
    "a-report-under-a-forgotten-number-costs-a-restart": SeedPlan(
        seed=700198,
        shape=Shape(
            min_nodes=6,
            max_nodes=8,
            node_unit=2,
            spares=2,
            restarts=RestartPolicy(max_restarts=11),
            join_timeout=120.0,
            num_steps=2520,
            checkpoint_every=100,
            has_replicas=True,
        ),
        faults=(
            Fault(at=316028321, kind="stall", pick=891376172, amount=0.3055943367431744),
            Fault(at=418219172, kind="scaling", pick=132705125, amount=0.1561573102862236),
            Fault(at=1268022697, kind="power-loss", pick=232943252, amount=0.06033816831015859),
            Fault(at=1605382479, kind="freeze", pick=365563827, amount=0.21615116251333377),
            Fault(at=1643075594, kind="journal-lost", pick=951538188, amount=0.6612875521039295),
        ),
        hours=1.0,
    ),
    # The node had taken part in later rounds of the check than those of the new master, ignored them, and was blamed.
    "a-check-counted-anew-is-taken-for-an-old-one": SeedPlan(
        seed=701965,
        shape=Shape(
            min_nodes=1,
            max_nodes=2,
            local_world_size=8,
            num_steps=2520,
            fleet=FleetSpec(replicas=PAIR),
            check=CheckTerms(module="virtual", accelerator="cpu", is_perf_test=True, timeout=60.0, fresh_for=60.0),
            bad_odds=0.0,
        ),
        faults=(
            Fault(at=1901457766, kind="eviction", pick=815504652, amount=0.2788040741325921),
            Fault(at=1951574416, kind="journal-lost", pick=17352466, amount=0.6356709400811418),
        ),
        hours=1.0,
    ),
    # A new node came to a master without its journal before the platform was asked what there is. It was taken for one of the
    # first free rank, in whose place the real one was sent away, and its failure was charged to that rank.
    "a-node-of-a-lost-journal-is-taken-for-another-rank": SeedPlan(
        seed=18255,
        shape=Shape(
            min_nodes=3,
            max_nodes=3,
            spares=2,
            local_world_size=2,
            restarts=RestartPolicy(max_without_progress=50, max_same_crash=50),
            last_call=5.0,
            join_timeout=120.0,
            num_steps=3600,
            has_replicas=False,
            fleet=FleetSpec(
                replicas={NodeType.WORKER: ReplicaSpec(count=3, max_relaunches=3)},
                standby=2,
                remove_exited=True,
                pending_timeout=900.0,
                failure_window=3600.0,
            ),
        ),
        faults=(
            Fault(at=8057665, kind="watch-breaks", pick=633763816, amount=0.0510801051017199),
            Fault(at=12507574, kind="node-fails", pick=818792335, amount=0.8141494344943565),
            Fault(at=18085676, kind="eviction", pick=383932310, amount=0.27341852726169213),
            Fault(at=27171048, kind="eviction", pick=242995264, amount=0.6043206796257891),
            Fault(at=27716388, kind="exchange", pick=563643463, amount=0.3024483934636534),
            Fault(at=102103245, kind="watch-breaks", pick=414972646, amount=0.2594622873425094),
            Fault(at=116856181, kind="journal-lost", pick=127262062, amount=0.8262460348532873),
            Fault(at=156167746, kind="eviction", pick=756319513, amount=0.029230708999849475),
            Fault(at=156405076, kind="agent-killed", pick=763451754, amount=0.6567481533456009),
            Fault(at=162945642, kind="journal-lost", pick=1068932270, amount=0.5866642254865955),
            Fault(at=290811437, kind="power-loss", pick=784251472, amount=0.2563127438850392),
        ),
        hours=1.0,
    ),
    # The check was wrong: an agent slept while the journal was lost, had its failure to tell, and the new master knew it by
    # another rank, because somebody else had taken its own.
    "a-failure-is-told-under-a-new-rank": SeedPlan(
        seed=21459,
        shape=Shape(
            min_nodes=21,
            max_nodes=24,
            spares=1,
            local_world_size=8,
            restarts=RestartPolicy(max_restarts=1000),
            num_steps=1800,
            has_store_traffic=True,
        ),
        faults=(
            Fault(at=1140643121, kind="freeze", pick=948035190, amount=0.12578501395366348),
            Fault(at=1158947043, kind="journal-lost", pick=815360187, amount=0.41834772422920496),
            Fault(at=1176681263, kind="new-node", pick=472759969, amount=0.41598483637186023),
        ),
        hours=0.5,
    ),
    # Workers finished while there was no master. Their agents said so when they came back, before what the workers had last read:
    # that was refused, and a job that had read everything ended as one that had not.
    "the-last-words-of-finished-workers-are-refused": SeedPlan(
        seed=201214,
        shape=Shape(
            min_nodes=2,
            max_nodes=2,
            has_fixed_ranks=True,
            restarts=RestartPolicy(max_restarts=1000),
            last_call=5.0,
            num_steps=22,
            checkpoint_every=20,
            has_store_traffic=True,
            dataset=DatasetSpec(
                name="clicks", size=98, shard_size=14, num_epochs=2, seed=72, is_required=False, max_errors=0
            ),
        ),
        faults=(Fault(at=19659385, kind="two-masters", pick=579722661, amount=0.28586747553116265),),
        hours=0.02,
    ),
    # A node that was cut off went on training, while the other one went back to an older model and read its data again. Then both
    # took the snapshot of the former, of which the books knew nothing any more. First seen as seed 10175.
    "a-model-that-others-have-given-up-is-taken": SeedPlan(
        seed=7,
        shape=Shape(
            min_nodes=1,
            max_nodes=2,
            local_world_size=2,
            restarts=RestartPolicy(max_restarts=1000),
            last_call=5.0,
            num_steps=1080,
            has_replicas=True,
            dataset=DatasetSpec(name="clicks", size=86, shard_size=20, num_epochs=2, seed=717, is_required=False),
        ),
        faults=(
            Fault(at=44305645, kind="one-way-partition", pick=828004, amount=0.651),
            Fault(at=89872446, kind="partition", pick=259631, amount=0.947),
        ),
        hours=0.2,
    ),
    # The last parameter server could not be replaced, and the workers were told to go on with none.
    "a-job-goes-on-without-any-server": SeedPlan(
        seed=3,
        shape=Shape(
            min_nodes=2,
            max_nodes=2,
            fleet=FleetSpec(
                replicas=PAIR
                | {kind: ReplicaSpec(count=1, max_relaunches=0) for kind in (NodeType.PS, NodeType.CHIEF)},
                strategy=Strategy.PS,
            ),
            num_steps=1800,
        ),
        faults=(Fault(at=300_000_000, kind="node-fails", pick=0, amount=0.0),),
        hours=0.2,
        is_thorough=True,
    ),
    # The replacement of a lost server was scaled away before it ran. When another server was to be exchanged before the workers had
    # said that they had switched, they were told to use it. First seen as seed 30576.
    "a-server-that-will-never-come-is-to-be-used": SeedPlan(
        seed=4,
        shape=Shape(
            min_nodes=2,
            max_nodes=2,
            fleet=FleetSpec(
                replicas=PAIR | {NodeType.PS: ReplicaSpec(count=2), NodeType.CHIEF: ReplicaSpec(count=1)},
                strategy=Strategy.PS,
            ),
            num_steps=900,
        ),
        faults=(
            Fault(at=300_000_000, kind="suspension", pick=0, amount=0.9),
            Fault(at=310_000_000, kind="eviction", pick=1, amount=0.5),
            Fault(at=320_000_000, kind="scaling", pick=1, amount=0.5),
            Fault(at=322_000_000, kind="exchange", pick=0, amount=0.5),
        ),
        hours=0.25,
    ),
    # A worker came to a sync point while a master without its journal did not know the world yet: the point waited for nobody, and all
    # others of that round passed it, too. First seen as seed 894.
    "a-sync-point-of-a-world-that-nobody-knows-waits-for-nobody": SeedPlan(
        seed=5,
        shape=Shape(min_nodes=3, max_nodes=3, num_steps=600, has_sync_traffic=True),
        faults=(
            Fault(at=99_000_000, kind="partition", pick=1, amount=0.4),
            Fault(at=100_000_000, kind="journal-lost", pick=0, amount=0.0),
            Fault(at=103_000_000, kind="clock-jump", pick=0, amount=0.5),
        ),
        hours=0.1,
    ),
    # A master without its journal called the replacement of a lost node by the id of another that came further down in the platform's first
    # list, and took that one for it: its failure was then charged to another rank.
    "a-replacement-is-called-like-a-node-that-is-there": SeedPlan(
        seed=500450,
        shape=Shape(
            min_nodes=1,
            max_nodes=3,
            spares=2,
            local_world_size=2,
            restarts=RestartPolicy(max_restarts=1000),
            fleet=FleetSpec(
                replicas={NodeType.WORKER: ReplicaSpec(count=3, max_relaunches=3)}, standby=2, relaunch_always=True
            ),
            num_steps=2520,
            has_replicas=False,
        ),
        faults=(
            Fault(at=6303479, kind="eviction", pick=974290262, amount=0.0480989166751421),
            Fault(at=21632811, kind="watch-breaks", pick=318767020, amount=0.9651414105301286),
            Fault(at=53747355, kind="disk-full", pick=220390012, amount=0.8477653364587739),
            Fault(at=57688942, kind="preemption", pick=650309972, amount=0.22253685344125884),
            Fault(at=91525562, kind="eviction", pick=75078157, amount=0.7942051699584906),
            Fault(at=105552745, kind="journal-lost", pick=541609374, amount=0.5048078831887849),
            Fault(at=123435939, kind="eviction", pick=689751433, amount=0.5160053456872),
            Fault(at=131563192, kind="node-fails", pick=667121417, amount=0.7539012534939192),
            Fault(at=135165960, kind="cloud-away", pick=577276540, amount=0.1366355165909996),
        ),
        hours=1.0,
    ),
    # The replacement lost its power before a disk had room for its attach: by the word of its platform it ran, and the join timeout
    # ended the job while it was suspended. Seed 12676 of a campaign.
    "a-suspended-job-gives-up-on-its-round": SeedPlan(
        seed=101,
        shape=Shape(
            min_nodes=1,
            max_nodes=1,
            join_timeout=120.0,
            fleet=FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=1, max_relaunches=5)}),
            num_steps=2000,
        ),
        faults=(
            Fault(at=300_000_000, kind="node-vanishes", pick=0, amount=0.5),
            Fault(at=313_000_000, kind="disk-full", pick=0, amount=0.7124433658633121),
            Fault(at=337_000_000, kind="power-loss", pick=0, amount=0.5),
            Fault(at=434_000_000, kind="suspension", pick=0, amount=0.9),
        ),
        hours=0.5,
    ),
    # An agent that was restarted in its check got the port of the former one. The simulator put both checks into one group.
    "a-restarted-agent-gets-the-port-of-its-former-check": draw_plan(386),
    # A long life without a step counted as progress. Then another node reported an old step, and the restart was one too many.
    "a-late-step-disproves-the-progress-of-a-long-life": draw_plan(1535),
    # A committer reported a failure and then a success. The older attempt that had its turn meanwhile was to move the tracker back.
    "a-late-commit-takes-the-tracker-from-an-older-attempt": draw_plan(9350),
    # An agent joined the next round while an extension of the user thought about its failure. The round completed without the
    # report, and a victim was charged. The agent's mistake, not the core's.
    "a-node-joins-before-its-failure-is-told": draw_plan(51),
    # The answer to a launch was lost and the pod evicted before the launch was tried again: a second pod beside its successor. The
    # core has it removed; the check asked that it never be.
    "an-evicted-pod-is-made-once-more": draw_plan(5737),
    # The same, and the job was stopped while the watch was broken, so that no list showed the second pod. The operator removes it; the
    # check asked that the master do so.
    "a-job-ends-before-a-late-pod-is-found": draw_plan(6712),
    # A round has 120 s, and they begin anew when a job is resumed. The check gave it 300 s.
    "a-resumed-job-has-the-patience-of-a-round": draw_plan(2708),
    # A master without its journal released the nodes of a suspended job. The first list of the platform still showed them, so it took
    # them over, and when they ended well the job counted as completed at step 250 of 3600. A mistake of the core.
    "a-released-node-counts-as-one-that-has-done-its-work": draw_plan(10550),
    # A change was to be taken back and there was no room for the former size, so nothing changed. Then the room was given back, and
    # the job grew in the same instant. The check had counted the change that was not made, and asked for a cool-down.
    "what-cannot-be-taken-back-asks-for-no-cool-down": draw_plan(11716),
    # A job dropped one of its servers by itself six seconds before its end. The check saw only that no person had changed anything.
    "a-job-changes-its-own-servers-in-calm-times": draw_task_plan(110),
    # A virtual chief dropped a save of its own cadence when not all that it had read was told, which was so each time. Its coordinator
    # renewed the version now and then, and the job never came further. Real chiefs wait and save.
    "a-chief-that-reads-on-never-saves": draw_task_plan(3018),
    # A job without a fleet had one node left. It was cut off, then it stood still, and had no master for twelve minutes. Its agent woke
    # up, reached the master and left, as it had been without one for too long. The job ended with it, as it shall; the check knew of no
    # failure.
    "the-last-agent-gives-up-and-says-so": draw_plan(31436),
    # A person asked for a pause, and the master died before that was written. The wish to go on was refused, as there was no pause. The
    # check took that for a resumed job, and asked that a pending node have its time once more.
    "a-pause-that-never-was-renews-no-patience": draw_plan(31731),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_broke_once_holds(name: str) -> None:
    outcome = run_plan(FOUND[name])
    assert isinstance(outcome, Result), outcome


@pytest.mark.parametrize("taken_away", [NodeExit.NONE, NodeExit.KILLED])
def test_a_node_taken_away_after_its_exchange_failed_is_replaced_at_no_cost(taken_away: NodeExit) -> None:
    """
    The check of I7 was wrong, not the core: it charged the new node to the failed exchange.

    Node 2 was to take the place of node 1 and failed, so node 1 kept its rank. Then the platform took node 1 away, and an
    eviction is replaced at no cost, whatever the budget.
    """
    scene = _an_exchange_that_failed()
    scene.vanish(1, exit_reason=taken_away)
    assert scene.launched == [0, 1, 2, 3]
    assert scene.paid == {}
    assert scene.fleet.replicas[NodeType.WORKER].spent == {}


def test_a_node_that_fails_after_its_exchange_failed_needs_the_budget() -> None:
    scene = _an_exchange_that_failed()
    scene.vanish(1, exit_reason=NodeExit.HARDWARE)
    assert scene.launched == [0, 1, 2], "the budget is 0"


def test_a_worker_that_says_it_saved_is_refused_and_changes_nothing() -> None:
    """The job counted it as progress before it refused it, and a replay of the journal did not."""
    scene = FleetScene(replace(terms(1), strategy=Strategy.PS))
    scene.begin(ps_job(num_workers=2, num_ps=1)).run()
    for node in tuple(scene.cloud):
        scene.attach(f"n{node}")
    worker = scene.agents["n2"]
    said = ModelSaved(step=5, node=worker.node, incarnation=worker.incarnation, round=scene.newest_round("n2"))
    with pytest.raises(Rejected, match="only the chief"):
        scene.send("n2", said)
    assert scene.job.state.cluster is not None
    assert scene.job.state.cluster.progress == 0


def _an_exchange_that_failed() -> CountedScene:
    scene = CountedScene(terms(1, 1))
    scene.begin(FleetSpec(replicas=workers(1, max_relaunches=0), standby=1, failure_window=0.0))
    scene.show(0, NodePhase.SUCCEEDED)
    scene.list()
    scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=9)))
    scene.fail(2, exit_reason=NodeExit.HARDWARE)
    return scene
