"""
How far the job came before each restart, remembered beside the core (I7).

Without `--max-restarts` a job ends after so many restarts in a row without progress. The core counts them, and here each count is
checked against the steps that the training really took and against all restarts before. `agreed/reach.py` says what progress is.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover.agreed.reach import NOTHING_TOLD, furthest, is_further
from dlrover.core.failures.blame import Incident
from dlrover.core.job import Job
from dlrover.protocol.messages.job import RestartPolicy
from dlrover.protocol.messages.watch import Reach
from dlrover.simulator.parts import SimulationPart
from dlrover.simulator.truth.touched import Touched


class Furthest(NamedTuple):
    """The greatest of each count in all rounds that led to a restart."""

    step: int = -1
    reach: Reach = NOTHING_TOLD
    num_records: int = 0

    def after(self, incident: Incident) -> Furthest:
        step = -1 if incident.step is None else incident.step
        reach, num_records = furthest(self.reach, incident.reach), max(self.num_records, incident.num_records)
        return Furthest(max(self.step, step), reach, num_records)


class RestartTruth:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._furthest: dict[int, Furthest] = {0: Furthest()}
        """By the number of restarts: a master that dies before its disk has seen a restart takes it back, and the next one counts it again."""

    def journal_lost(self) -> None:
        self._furthest = {0: Furthest()}

    def explain_count(self, job: Job, touched: Touched) -> str | None:
        """Nothing if the restarts in a row without progress are as many as they were, but for what this command changed."""
        restarts, incident = job.state.restarts, job.state.restarts.incident
        if self._sim.tasks is not None or incident is None or job.state.terms is None:
            return None  # processes of a cluster are counted one by one
        right = 0 if incident.is_node_replaced else touched.num_without_progress
        past = self._furthest[touched.num_restarts]
        if restarts.num_restarts != touched.num_restarts:
            if incident.step is not None and incident.step > self._sim.training.progress():
                return f"round {incident.round} failed at step {incident.step}, and the training never came so far"
            if sum(restarts.spent.values()) > touched.num_spent:
                right = 1 if _is_progress(job.state.terms.restarts, incident, past) else right + 1
            self._furthest[restarts.num_restarts] = past.after(incident)
        if restarts.num_without_progress == right:
            return None
        return (
            f"{restarts.num_without_progress} restarts in a row without progress are counted and there were {right}: "
            f"round {incident.round} failed at step {incident.step}, those before at most at {past.step}"
        )


def _is_progress(policy: RestartPolicy, incident: Incident, past: Furthest) -> bool:
    reach, step = incident.reach, incident.step
    if (
        (step is not None and step > past.step)
        or is_further(reach, past.reach)
        or incident.num_records > past.num_records
    ):
        return True
    if step is None:
        return incident.lived >= policy.lived_long
    return reach.is_counting_anew and reach.has_whole_epoch  # virtual workers never count anew
