"""
The lives of the master, one after the other over one journal, and what happens to them from outside.

They are killed, stall, or sleep while another takes over; their disk fills up, slows down or is lost. Each next one has to
find what its predecessor had made durable. Agents that find no master wait here until there is one.
"""

from __future__ import annotations

from dlrover.simulator.masters import oversight
from dlrover.simulator.masters.journal import CrashPoint, VirtualJournal
from dlrover.simulator.masters.master import FENCE_PERIOD, VirtualMaster
from dlrover.simulator.parts import AgentPart, MasterPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import span

LONGEST_PAUSE = 2.0


class Masters:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self.newest: MasterPart | None = None
        self.is_serving = False
        self.num_started = 0
        self._durable: bytes | None = None
        """The state that the next one has to find; None: not known for certain."""
        self.journal = VirtualJournal()
        self.num_journals_lost = 0
        self.is_disk_slow = False
        self._disturbed_at = 0
        self.seekers: dict[AgentPart, None] = {}

    def start(self) -> None:
        sim = self._sim
        if sim.is_over or (self.newest is not None and self.newest.is_alive):
            return
        master_epoch = self.journal.take_over()
        job = self.journal.restore()
        oversight.check_restored(sim, job, self._durable)
        self.num_started += 1
        self.is_serving = False
        sim.note(f"master epoch {master_epoch} starts")
        sim.troubles.add()
        self._disturb()
        self.newest = VirtualMaster(sim, job, master_epoch)
        self.newest.begin()

    def serve(self) -> None:
        """The newest one has made its first command durable."""
        self.is_serving = True
        self._call_seekers()

    def listening(self) -> MasterPart | None:
        master = self.newest
        return master if master is not None and self.is_serving and master.is_awake else None

    def wait_for_one(self, agent: AgentPart) -> None:
        self.seekers[agent] = None

    def _call_seekers(self) -> None:
        sim = self._sim
        seekers, self.seekers = self.seekers, {}
        for agent in seekers:
            sim.events.after(span(sim.chance.network, 0.0, LONGEST_PAUSE), agent.channel.attempt)

    # Trouble.

    def _disturb(self) -> None:
        self._disturbed_at = self._sim.events.now

    def were_disturbed_since(self, when: int) -> bool:
        return self.journal.is_full or self.is_disk_slow or self._disturbed_at > when

    def free_disk(self) -> None:
        self.journal.is_full = False
        self._disturb()

    def crash(self, point: CrashPoint | None, *, downtime: int, is_seen: bool = True) -> bool:
        """Now, or at that point of the next turn; the next master comes after a while."""
        master = self.newest
        if master is None or not master.is_alive or master.crash_point is not None:
            return False
        master.downtime = downtime
        if point is None:
            self.died(master, durable=None, why="at rest", is_seen=is_seen)
        else:
            master.crash_point = point
        return True

    def died(self, master: MasterPart, *, durable: bytes | None, why: str, is_seen: bool = True) -> None:
        """`durable`: the state that the next one has to find, if that is known for certain."""
        self._sim.note(f"master epoch {master.master_epoch} dies {why}")
        master.die(is_seen=is_seen)
        if self.newest is master:
            self._durable = durable
            self.is_serving = False
            self._sim.troubles.add()
            self._sim.troubles.pass_by(master.downtime, self.start)

    def stall(self, duration: int) -> bool:
        master = self.newest
        if master is None or not master.stall():
            return False
        self._answer_nobody()
        self._sim.troubles.pass_by(duration, lambda: self._resume(master))
        return True

    def _resume(self, master: MasterPart) -> None:
        self._disturb()
        master.resume()
        if master is self.newest:
            self._call_seekers()

    def replace(self, *, sleep: int) -> bool:
        """The master sleeps, another takes over, and then the first one wakes up and goes on where it was."""
        old = self.newest
        if old is None or not self.is_serving or not old.stall():
            return False
        self._sim.note(f"master epoch {old.master_epoch} sleeps and is replaced")
        self._answer_nobody()
        self._durable = None
        self.newest = None
        self.start()
        self._sim.troubles.pass_by(sleep, lambda: self._wake_replaced(old))
        return True

    def _wake_replaced(self, old: MasterPart) -> None:
        old.resume()
        self._sim.events.after(FENCE_PERIOD, old.look_at_the_fence)

    def _answer_nobody(self) -> None:
        for node in self._sim.machines.nodes:
            if node.agent is not None:
                node.agent.channel.keepalive_soon()

    def fenced(self, master: MasterPart) -> None:
        self._sim.note(f"master epoch {master.master_epoch} is fenced")
        if master is self.newest:
            raise Violation("I6", "the newest master was fenced")
        master.die(is_seen=True)

    def lose_journal(self, *, downtime: int) -> bool:
        """
        What was known only to the journal is lost now. That a job had ended cannot be told again, though, nor
        what was read of its data.
        """
        sim, master = self._sim, self.newest
        is_late = sim.ended_at is not None or sim.training.best_step >= sim.shape.num_steps
        if master is None or not master.is_alive or not self.is_serving or is_late or sim.data is not None:
            return False
        master.downtime = downtime
        self.died(master, durable=None, why="and its journal is lost")
        self.journal = VirtualJournal()
        self.num_journals_lost += 1
        sim.store.journal_lost()
        sim.saves.journal_lost()
        sim.syncs.journal_lost()
        sim.restarts.journal_lost()
        sim.people.journal_lost()
        sim.scaling.journal_lost()
        sim.ledger.journal_lost()
        sim.machines.journal_lost()
        return True
