"""
What troubles a job, and how long it has had calm: faults that hit, troubles that last, and the moment when all stops.

No check can hold a job to progress while something goes wrong. So a fault that the job has to recover from is noted
here, and the checks ask here what they may expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover.simulator.faults.kinds import FAULTS, Fault
from dlrover.simulator.parts import SimulationPart
from dlrover.simulator.virtual_time import span

STIRRED = 0.006
"""Seconds within which a fault follows the traffic that it shall meet."""


class Troubles:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._num_ongoing = 0
        self._ongoing: dict[Callable[[], None], None] = {}
        """How to end the troubles that last."""
        self._newest_at = 0
        self._progress_then = 0
        self._has_quiet = False
        self._quiet_at: int | None = None
        """When faults stopped and no worker trained; None: that is not so, or over."""
        self.recovery = 0
        self.by_kind: dict[str, int] = {}
        """Faults that hit something."""
        self.num_ports_taken = 0
        """So many of the next coordinators find their port taken."""

    # Faults.

    def inject(self, fault: Fault) -> None:
        sim = self._sim
        if self._has_quiet or sim.is_over:
            return
        # It shall hit while commands are under way, or while they are written.
        if sim.data is not None:
            sim.data.stir()
        elif sim.shape.has_store_traffic:
            sim.saves.stir()
        if sim.shape.has_store_traffic:
            sim.store.stir()
        if sim.shape.has_sync_traffic:
            sim.syncs.stir()
        if sim.shape.has_store_traffic or sim.shape.has_sync_traffic or sim.data is not None:
            sim.events.after(span(sim.chance.disk, 0.0, STIRRED), self._hit, fault)
        else:
            self._hit(fault)

    def _hit(self, fault: Fault) -> None:
        if self._has_quiet or self._sim.is_over or not FAULTS[fault.kind](self._sim, fault):
            return
        self.by_kind[fault.kind] = self.by_kind.get(fault.kind, 0) + 1
        self._sim.note(f"FAULT {fault.kind}")
        self.add()

    def add(self) -> None:
        """Something happened that the job has to recover from."""
        self._sim.machines.count()
        self._newest_at = self._sim.events.now
        self._progress_then = self._sim.training.progress()

    def pass_by(self, duration: int, heal: Callable[[], Any], *, is_trouble: bool = True) -> None:
        """A trouble that ends by itself, or with all others when faults stop. Or no trouble, though it ends like one."""
        self._num_ongoing += is_trouble
        is_healed = False

        def end() -> None:
            nonlocal is_healed
            if not is_healed:
                is_healed = True
                self._num_ongoing -= is_trouble
                self._ongoing.pop(end, None)
                heal()
                self.add()

        self._ongoing[end] = None
        self._sim.events.after(duration, end)

    def is_port_taken(self) -> bool:
        if not self.num_ports_taken:
            return False
        self.num_ports_taken -= 1
        self._sim.ledger.num_ports_taken += 1
        return True

    # Calm.

    def stop(self) -> None:
        """No more faults."""
        sim, training = self._sim, self._sim.training
        self._has_quiet = True
        sim.is_over |= sim.plan.is_cut_off
        self.num_ports_taken = 0
        for end in list(self._ongoing):
            end()
        sim.note("faults stop")
        self.add()
        if sim.ended_at is None and not any(training.is_training(world) for world in training.worlds):
            self._quiet_at = sim.events.now

    def world_began(self) -> None:
        """The first one after the faults had stopped shows how long the recovery took."""
        if self._quiet_at is not None:
            self.recovery = self._sim.events.now - self._quiet_at
            self._quiet_at = None

    def was_calm_since(self, when: int) -> bool:
        """Whether nothing at all went wrong since then."""
        return not self._num_ongoing and self._newest_at < when

    def calm_for(self) -> int:
        """Since when nothing troubles the job."""
        sim = self._sim
        return 0 if self._num_ongoing or sim.platform.num_pending else sim.events.now - self._newest_at

    def progress_since(self) -> int:
        """Steps since the newest trouble."""
        return self._sim.training.progress() - self._progress_then
