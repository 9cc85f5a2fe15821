"""
The books of a job: its datasets, and which of the records that were read count.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.data.checkpoint_text import write_states
from dlrover.core.data.dataset import Dataset
from dlrover.core.membership.nodes import after_outage
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import NO_STEP, TaskType, last_shared
from dlrover.protocol.messages.identity import NodeId, Round, micros
from dlrover.protocol.messages.job import Micros

RESTORE_PATIENCE = 120.0
"""Seconds from the first worker that asks for which shards are held back until the ranks say which model they go on with."""
MAX_RESTORED = 64


class DataBooks(Struct):
    datasets: dict[str, Dataset] = {}
    lease_looks: dict[int, Micros] = {}
    """When leases that run out by time are looked at next, by number of the dataset."""
    restored: dict[Round, int] = {}
    """
    The steps that the ranks of rounds restored, oldest first. Only those that tell how far two histories are shared: one that went back
    further makes all before it superfluous.
    """
    history_from: Round = Round(0)
    """The ranks of this round took up a model of another history. It is unknown what older rounds share with it, so nothing of theirs counts."""
    held_back_since: Micros | None = None
    """When a worker first had to wait in this round for the word about its model; None: none did."""
    folded: int = NO_STEP
    """The newest step of a checkpoint in storage: what its model contains is not listed any more."""
    late: dict[Round, int] = {}
    """The newest step in storage of each round whose checkpoints do not count yet."""
    awaited: dict[str, str] = {}
    """What the restored checkpoint says of datasets that are not registered yet."""

    def find(self, name: str) -> Dataset:
        dataset = self.datasets.get(name)
        if dataset is None:
            raise Rejected(
                f"There is no dataset {name!r}; register it first. Known: {', '.join(sorted(self.datasets)) or 'none'}.",
                code=ErrorCode.UNKNOWN_DATASET,
            )
        return dataset

    def note_restored(self, round_: Round, step: int) -> None:
        kept = {former: at for former, at in self.restored.items() if at < step}
        self.restored = kept | {round_: step}
        if len(self.restored) > MAX_RESTORED:
            # Of the oldest two the older step counts: then less is taken for shared than could be, never more.
            (_, least), (second, _), *others = self.restored.items()
            self.restored = {second: least} | dict(others)

    def last_shared(self, step: int, round_: Round) -> int:
        """The last step up to which a model of that step, trained in that round, has the history that counts now."""
        return last_shared(step, round_, self.turns())

    def turns(self) -> tuple[tuple[Round, int], ...]:
        """For all who hold models: which of them belong to the history that counts."""
        other = ((self.history_from, NO_STEP),) if self.history_from else ()
        return (*other, *self.restored.items())

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        """No process could report meanwhile."""
        if self.held_back_since is not None:
            ends_at = after_outage(Micros(self.held_back_since + micros(RESTORE_PATIENCE)), last_command_at, now)
            self.held_back_since = Micros(ends_at - micros(RESTORE_PATIENCE))

    def is_reading(self, node: NodeId) -> bool:
        """Whether workers of the node have something that they have not told the end of."""
        return any(node in dataset.readers for dataset in self.datasets.values())

    def fold(self) -> None:
        """What storage has of the history that counts is never read again."""
        late, self.late = self.late, {}
        step = max((self.last_shared(step, round_) for round_, step in late.items()), default=NO_STEP)
        self.folded = max(self.folded, step)
        for dataset in self.datasets.values():
            if dataset.spec.task_type is TaskType.TRAINING:
                dataset.commit(step)

    def state_for_manifest(self, step: int, round_: Round) -> str:
        """
        What the model of a save has still to read. Empty: the job reads no shards for training, the ranks went back behind that model, or
        a later one is in storage already, so that it is not known any more.
        """
        if self.last_shared(step, round_) < step or step < self.folded:
            return ""
        datasets = [each for each in self.datasets.values() if each.spec.task_type is TaskType.TRAINING]
        return write_states(datasets, step) if datasets else ""
