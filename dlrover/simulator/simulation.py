"""
One life of one job, from a seed: its nodes, its network, its masters and everything that goes wrong.

While the faults of the plan happen, invariants are checked on what each command touched. Then faults stop: cuts heal,
nodes that slept wake up, the platform gives what it owes. From there on the job has to make progress and to end well, within
bounded virtual time, or to have ended before for a reason that the faults explain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dlrover.core.commit_order import CoreFault, JournalCorrupt
from dlrover.protocol.messages.fleet import FleetSpec
from dlrover.simulator.faults.machines import Machines
from dlrover.simulator.faults.network import Network
from dlrover.simulator.faults.people import People
from dlrover.simulator.faults.troubles import Troubles
from dlrover.simulator.masters.masters import Masters
from dlrover.simulator.masters.statistics import Statistics
from dlrover.simulator.nodes.agentless_programs import AgentlessPrograms
from dlrover.simulator.nodes.checks import CheckRuns
from dlrover.simulator.nodes.cloud import VirtualCloud
from dlrover.simulator.nodes.cluster import VirtualCluster
from dlrover.simulator.nodes.platform import VirtualPlatform
from dlrover.simulator.nodes.tasks import VirtualTasks
from dlrover.simulator.parts import NodeSource
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.truth import worlds
from dlrover.simulator.truth.breaths import LastBreaths
from dlrover.simulator.truth.data import DataTraffic
from dlrover.simulator.truth.invariants import Violation, bound_of, check_in_full
from dlrover.simulator.truth.ledger import Ledger
from dlrover.simulator.truth.restarts import RestartTruth
from dlrover.simulator.truth.saves import SaveTraffic
from dlrover.simulator.truth.scaling import ScalingTruth
from dlrover.simulator.truth.store import StoreTraffic
from dlrover.simulator.truth.syncs import SyncTraffic
from dlrover.simulator.truth.training import Training
from dlrover.simulator.virtual_time import SECOND, Chance, VirtualTime

FULL_CHECK_EVERY = 1000
"""Events between two checks of everything, at least."""
EVENTS_PER_NODE = 10
"""A check of everything looks at each node: in large jobs so many events share the cost of one node."""
REPLAY_EVERY = 10
"""Seeds: of one in so many the whole journal is replayed at the end. What a new master replays is compared always."""


class Simulation:
    """Use `run`."""

    def __init__(self, plan: SeedPlan, *, on_note: Callable[[int, str], None] | None = None) -> None:
        self.plan = plan
        self.shape = plan.shape
        self.terms = plan.shape.terms
        self.events = VirtualTime()
        self.chance = Chance(plan.seed)
        self.digest_every = 1 if plan.is_thorough else plan.digest_every
        often = random.Random(f"{plan.seed}/snapshots").choice([50, 300, 2000])
        self.snapshot_every = max(often, plan.shape.num_nodes // 2)  # a snapshot holds each node
        self._on_note = on_note
        self.has_timeline = on_note is not None
        """Whether the notes are read."""
        self.ledger = Ledger()
        self.training = Training(
            self.shape, self.events, lambda world: worlds.finish(self, world), lambda world: worlds.began(self, world)
        )
        self.network = Network(self.events, self.chance.network, self.shape.costs)
        fleet = plan.shape.fleet
        self.platform: NodeSource = self._node_source(fleet)
        self.troubles = Troubles(self)
        self.machines = Machines(self)
        self.masters = Masters(self)
        self.people = People(self)
        self.agentless = AgentlessPrograms(self)
        self.checks = CheckRuns(self)
        self.store = StoreTraffic(self)
        self.saves = SaveTraffic(self)
        self.syncs = SyncTraffic(self)
        self.restarts = RestartTruth(self)
        self.breaths = LastBreaths(self)
        dataset = plan.shape.dataset
        self.tasks = VirtualTasks(self, dataset) if dataset is not None and plan.shape.has_tasks else None
        self.reading = None if dataset is None or self.tasks is not None else DataTraffic(self, dataset)
        """Of workers that meet in worlds."""
        self.data = self.tasks or self.reading
        self.statistics = None if plan.shape.scaling is None else Statistics(self)
        self.scaling = ScalingTruth(self)
        self.check_began_at = 0
        self.bound = bound_of(plan.shape)
        """I8: virtual time from the end of the last trouble to new progress."""
        self.is_over = False
        self.ended_at: int | None = None
        self.limits = self.terms.limits

    def _node_source(self, fleet: FleetSpec | None) -> NodeSource:
        if fleet is None:
            return VirtualPlatform(self)
        return VirtualCluster(self, fleet) if self.shape.has_pods else VirtualCloud(self, fleet)

    def run(self) -> Result:
        """Raises `Violation`."""
        try:
            return self._run()
        except (CoreFault, JournalCorrupt, AssertionError) as error:
            cause = error.__cause__ if isinstance(error, CoreFault) and error.__cause__ is not None else error
            invariant = "I5" if isinstance(error, JournalCorrupt) else "core"
            raise Violation(invariant, f"{type(cause).__name__}: {cause}") from error

    def _run(self) -> Result:
        for fault in self.plan.faults:
            self.events.at(fault.at, self.troubles.inject, fault)
        self.masters.start()
        self.platform.begin()
        if self.statistics is not None:
            self.statistics.begin()
        faults_end_at = round(self.plan.hours * 3600 * SECOND)
        self.events.at(faults_end_at, self.troubles.stop)
        check_every = max(FULL_CHECK_EVERY, EVENTS_PER_NODE * self.shape.num_nodes)
        next_check = check_every
        while not self.is_over and self.events.happen():
            if self.events.num_past >= next_check:
                next_check = self.events.num_past + check_every
                self._check()
                self._check_bounds(faults_end_at)
        if not self.is_over:
            raise Violation("I8", f"nothing will ever happen again; {self._describe()}")
        return self._conclude()

    def _check(self) -> None:
        self.machines.count()
        if self.masters.newest is not None and self.masters.is_serving:
            check_in_full(self, self.masters.newest.job)

    def _check_bounds(self, faults_end_at: int) -> None:
        now = self.events.now
        if self.ended_at is not None and self.troubles.calm_for() > self.bound and now - self.ended_at > self.bound:
            raise Violation("I8", f"the job ended {(now - self.ended_at) / SECOND:.0f} s ago and is not over")
        slowest = self.shape.slowest_step
        limit = faults_end_at + 2 * self.bound + round(self.shape.num_steps * slowest * SECOND)
        if now > limit:
            raise Violation("I8", f"the job should have finished; {self._describe()}")

    def _conclude(self) -> Result:
        self._check()
        if self.troubles.recovery > self.bound:
            raise Violation(
                "I8", f"the first step came {self.troubles.recovery / SECOND:.0f} s after the faults had stopped"
            )
        assert self.masters.newest is not None, "a job is over under a master"
        job = self.masters.newest.job
        self.store.check(job)
        self.saves.check(job)
        # A simulation that was cut off may have ended in the middle of a turn.
        data = self.data
        is_replayed = (self.plan.is_thorough or self.plan.seed % REPLAY_EVERY == 0) and not self.plan.is_cut_off
        if is_replayed and self.masters.journal.restore_from_the_beginning().encode() != job.encode():
            raise Violation("I5", "a replay of the whole journal leads to another state")
        if data is not None:
            data.check_end(job, is_audited=is_replayed)
        return Result(
            seed=self.plan.seed,
            num_faults=sum(self.troubles.by_kind.values()),
            by_kind=dict(sorted(self.troubles.by_kind.items())),
            node_hours=self.machines.node_micros / 3600 / SECOND,
            virtual_hours=self.events.now / 3600 / SECOND,
            num_events=self.events.num_past,
            num_commands=self.ledger.num_commands,
            num_rounds=job.state.rendezvous.round,
            num_masters=self.masters.num_started,
            num_alarms=self.ledger.num_alarms,
            recovery=self.troubles.recovery / SECOND,
            num_records=0 if data is None else data.num_records,
            is_read_out=data is not None and data.is_read_out(job),
            num_breaths=self.breaths.num_breaths,
            num_breaths_saved=self.breaths.num_saved,
            reason="" if job.end is None else job.end.reason.value,
            trace=f"{self.masters.journal.trace}-{self.events.num_past:x}-{self.events.now:x}",
        )

    def _describe(self) -> str:
        if self.masters.newest is None:
            return "there is no master"
        status = self.masters.newest.job.status()
        nodes = ", ".join(f"{node.node_rank}:{node.status}/{node.wish}" for node in status.nodes)
        return f"stage {status.stage}, round {status.round}: {status.verdict} [{nodes}]"

    def note(self, text: str) -> None:
        """For the timeline."""
        if self._on_note is not None:
            self._on_note(self.events.now, text)

    def job_over(self) -> None:
        self.note("the job is over")
        if isinstance(self.platform, VirtualCloud):
            self.platform.check_removed()
        self.is_over = True
