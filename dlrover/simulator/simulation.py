"""
One life of one job, from a seed: its nodes, its network, its masters and everything that goes wrong.

While the faults of the plan happen, invariants are checked on what each command touched. Then faults stop: cuts heal,
whoever slept wakes up, the platform gives what it owes. From there on the job has to make progress and to end well, within
bounded virtual time, or to have ended before for a reason that the faults explain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dlrover.core.job import Job
from dlrover.core.sequence import CoreFault, JournalCorrupt
from dlrover.simulator import worlds
from dlrover.simulator.agents import VirtualAgent
from dlrover.simulator.beside import Beside
from dlrover.simulator.checks import CheckRuns
from dlrover.simulator.cloud import VirtualCloud
from dlrover.simulator.data import DataTraffic
from dlrover.simulator.events import SECOND, Chance, Events, span
from dlrover.simulator.invariants import Violation, bound_of, check_in_full
from dlrover.simulator.journal import VirtualJournal
from dlrover.simulator.ledger import Ledger
from dlrover.simulator.machines import Machines
from dlrover.simulator.master import FENCE_PERIOD, CrashPoint, VirtualMaster
from dlrover.simulator.network import Network
from dlrover.simulator.people import People
from dlrover.simulator.plan import Plan, Result
from dlrover.simulator.platform import Platform, VirtualPlatform
from dlrover.simulator.saves import SaveTraffic
from dlrover.simulator.store import StoreTraffic
from dlrover.simulator.syncs import SyncTraffic
from dlrover.simulator.training import Training
from dlrover.simulator.troubles import Troubles

FULL_CHECK_EVERY = 1000
"""Events between two checks of everything."""
REPLAY_EVERY = 10
"""Seeds: of one in so many the whole journal is replayed at the end. What a new master replays is compared always."""
LONGEST_PAUSE = 2.0


class Simulation:
    """Use `run`."""

    def __init__(self, plan: Plan, *, on_note: Callable[[int, str], None] | None = None) -> None:
        self.plan = plan
        self.shape = plan.shape
        self.terms = plan.shape.terms
        self.events = Events()
        self.chance = Chance(plan.seed)
        self.digest_every = 1 if plan.is_thorough else plan.digest_every
        self.snapshot_every = random.Random(f"{plan.seed}/snapshots").choice([50, 300, 2000])
        self._on_note = on_note
        self.ledger = Ledger()
        self.training = Training(
            self.shape, self.events, lambda world: worlds.finish(self, world), lambda world: worlds.began(self, world)
        )
        self.network = Network(self.events, self.chance.network, self.shape.costs)
        self.journal = VirtualJournal()
        fleet = plan.shape.fleet
        self.platform: Platform = VirtualPlatform(self) if fleet is None else VirtualCloud(self, fleet)
        self.troubles = Troubles(self)
        self.machines = Machines(self)
        self.people = People(self)
        self.beside = Beside(self)
        self.checks = CheckRuns(self)
        self.store = StoreTraffic(self)
        self.saves = SaveTraffic(self)
        self.syncs = SyncTraffic(self)
        dataset = plan.shape.dataset
        self.data = None if dataset is None else DataTraffic(self, dataset)
        self.check_began_at = 0
        self.num_journals_lost = 0
        self.bound = bound_of(plan.shape)
        """I8: virtual time from the end of the last trouble to new progress."""
        self.is_disk_slow = False
        self.is_over = False
        self.master: VirtualMaster | None = None
        self.is_serving = False
        self._num_masters = 0
        self.seekers: dict[VirtualAgent, None] = {}
        self.ended_at: int | None = None
        self._master_disturbed_at = 0
        self.limits = self.terms.limits
        self._durable: bytes | None = None
        """The state that the next master has to find; None: not known for certain."""

    # The whole.

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
        self._start_master()
        self.platform.begin()
        faults_end_at = round(self.plan.hours * 3600 * SECOND)
        self.events.at(faults_end_at, self.troubles.stop)
        next_check = FULL_CHECK_EVERY
        while not self.is_over and self.events.happen():
            if self.events.num_past >= next_check:
                next_check = self.events.num_past + FULL_CHECK_EVERY
                self._check()
                self._check_bounds(faults_end_at)
        if not self.is_over:
            raise Violation("I8", f"nothing will ever happen again; {self._describe()}")
        return self._conclude()

    def _check(self) -> None:
        self.machines.count()
        if self.master is not None and self.is_serving:
            check_in_full(self, self.master.job)

    def _check_bounds(self, faults_end_at: int) -> None:
        now = self.events.now
        if self.ended_at is not None and self.troubles.calm_for() > self.bound and now - self.ended_at > self.bound:
            raise Violation("I8", f"the job ended {(now - self.ended_at) / SECOND:.0f} s ago and is not over")
        slowest = self.shape.costs.step * self.shape.max_nodes / self.shape.node_unit
        limit = faults_end_at + 2 * self.bound + round(self.shape.num_steps * slowest * SECOND)
        if now > limit:
            raise Violation("I8", f"the job should have finished; {self._describe()}")

    def _conclude(self) -> Result:
        self._check()
        if self.troubles.recovery > self.bound:
            raise Violation(
                "I8", f"the first step came {self.troubles.recovery / SECOND:.0f} s after the faults had stopped"
            )
        assert self.master is not None, "a job is over under a master"
        job = self.master.job
        self.store.check(job)
        self.saves.check(job)
        # A simulation that was cut off may have ended in the middle of a turn.
        data = self.data
        is_replayed = (self.plan.is_thorough or self.plan.seed % REPLAY_EVERY == 0) and not self.plan.is_cut_off
        if is_replayed and self.journal.restore_from_the_beginning().encode() != job.encode():
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
            num_masters=self._num_masters,
            num_alarms=self.ledger.num_alarms,
            recovery=self.troubles.recovery / SECOND,
            num_records=0 if data is None else data.num_records,
            is_read_out=data is not None and data.is_read_out(job),
            reason="" if job.end is None else job.end.reason.value,
            trace=f"{self.journal.trace}-{self.events.num_past:x}-{self.events.now:x}",
        )

    def _describe(self) -> str:
        if self.master is None:
            return "there is no master"
        status = self.master.job.status()
        nodes = ", ".join(f"{node.node_rank}:{node.status}/{node.wish}" for node in status.nodes)
        return f"stage {status.stage}, round {status.round}: {status.verdict} [{nodes}]"

    @property
    def has_timeline(self) -> bool:
        """Whether somebody reads the notes."""
        return self._on_note is not None

    def note(self, text: str) -> None:
        """For the timeline."""
        if self._on_note is not None:
            self._on_note(self.events.now, text)

    # Masters.

    def free_disk(self) -> None:
        self.journal.is_full = False
        self.disturb_master()

    def disturb_master(self) -> None:
        self._master_disturbed_at = self.events.now

    def was_master_disturbed_since(self, when: int) -> bool:
        return self.journal.is_full or self.is_disk_slow or self._master_disturbed_at > when

    def _start_master(self) -> None:
        if self.is_over or (self.master is not None and self.master.is_alive):
            return
        epoch = self.journal.take_over()
        job = self.journal.restore()
        if self._durable is not None:
            self.compare_restored(job, self._durable)
        elif job.number != self.journal.last_number:
            raise Violation("I5", f"the journal has {self.journal.last_number} records, the replay gave {job.number}")
        self._check_answered(job)
        self.store.check(job)
        self.saves.check(job)
        self._num_masters += 1
        self.is_serving = False
        self.note(f"master epoch {epoch} starts")
        self.troubles.add()
        self.disturb_master()
        self.master = VirtualMaster(self, job, epoch)
        self.master.begin()

    def _check_answered(self, job: Job) -> None:
        """What was answered is durable, whenever the master died."""
        for node, sender in job.state.senders.by_node.items():
            answered = self.ledger.answered.get((node, sender.incarnation), 0)
            if answered > sender.highest:
                raise Violation("I5", f"command {answered} of node {node} was answered, and {sender.highest} is known")

    def heard_answer(self, agent: VirtualAgent, sequence: int) -> None:
        if agent.channel.connection is None or agent.channel.connection.master.journal is not self.journal:
            return  # it was on its way when the journal was lost, and nobody knows of it any more
        life = (agent.id, agent.incarnation)
        self.ledger.answered[life] = max(sequence, self.ledger.answered.get(life, 0))

    def compare_restored(self, job: Job, durable: bytes) -> None:
        if job.encode() != durable:
            raise Violation("I5", f"after the replay of {job.number} commands the state is not what it was")

    def crash_master(self, point: CrashPoint | None, *, downtime: int, is_seen: bool = True) -> bool:
        """Now, or at that point of the next turn; the next master comes after a while."""
        master = self.master
        if master is None or not master.is_alive or master.crash_point is not None:
            return False
        master.downtime = downtime
        if point is None:
            self.master_died(master, durable=None, why="at rest", is_seen=is_seen)
        else:
            master.crash_point = point
        return True

    def master_died(self, master: VirtualMaster, *, durable: bytes | None, why: str, is_seen: bool = True) -> None:
        """`durable`: the state that the next one has to find, if that is known for certain."""
        self.note(f"master epoch {master.master_epoch} dies {why}")
        master.die(is_seen=is_seen)
        if self.master is master:
            self._durable = durable
            self.is_serving = False
            self.troubles.add()
            self.troubles.pass_by(master.downtime, self._start_master)

    def stall_master(self, duration: int) -> bool:
        master = self.master
        if master is None or not master.stall():
            return False
        self._answer_nobody()
        self.troubles.pass_by(duration, lambda: self._resume(master))
        return True

    def _resume(self, master: VirtualMaster) -> None:
        self.disturb_master()
        master.resume()
        if master is self.master:
            self.call_seekers()

    def replace_master(self, *, sleep: int) -> bool:
        """The master sleeps, another takes over, and then the first one wakes up and goes on where it was."""
        old = self.master
        if old is None or not self.is_serving or not old.stall():
            return False
        self.note(f"master epoch {old.master_epoch} sleeps and is replaced")
        self._answer_nobody()
        self._durable = None
        self.master = None
        self._start_master()
        self.troubles.pass_by(sleep, lambda: self._wake_replaced(old))
        return True

    def _wake_replaced(self, old: VirtualMaster) -> None:
        old.resume()
        self.events.after(FENCE_PERIOD, old.look_at_the_fence)

    def _answer_nobody(self) -> None:
        for node in self.machines.nodes:
            if node.agent is not None:
                node.agent.channel.keepalive_soon()

    def lose_journal(self, *, downtime: int) -> bool:
        """
        What was known only to the journal is known to nobody now. That a job had ended cannot be told again, though, nor
        what was read of its data.
        """
        master = self.master
        is_late = self.ended_at is not None or self.training.best_step >= self.shape.num_steps
        if master is None or not master.is_alive or not self.is_serving or is_late or self.data is not None:
            return False
        master.downtime = downtime
        self.master_died(master, durable=None, why="and its journal is lost")
        self.journal = VirtualJournal()
        self.num_journals_lost += 1
        self.store.journal_lost()
        self.saves.journal_lost()
        self.syncs.journal_lost()
        self.people.journal_lost()
        self.ledger.lives.clear()
        self.ledger.applied.clear()
        self.ledger.answered.clear()
        self.machines.journal_lost()
        return True

    def fenced(self, master: VirtualMaster) -> None:
        self.note(f"master epoch {master.master_epoch} is fenced")
        if master is self.master:
            raise Violation("I6", "the newest master was fenced")
        master.die(is_seen=True)

    def listening_master(self) -> VirtualMaster | None:
        master = self.master
        return master if master is not None and self.is_serving and master.is_awake else None

    def wait_for_master(self, agent: VirtualAgent) -> None:
        self.seekers[agent] = None

    def call_seekers(self) -> None:
        seekers, self.seekers = self.seekers, {}
        for agent in seekers:
            self.events.after(span(self.chance.network, 0.0, LONGEST_PAUSE), agent.channel.attempt)

    # What masters do.

    def job_over(self, master: VirtualMaster) -> None:
        self.note("the job is over")
        if isinstance(self.platform, VirtualCloud):
            self.platform.check_removed()
        self.is_over = True
