"""
The datasets of a job, and what rounds, lost workers and checkpoints mean for them.

A lease names a worker's life: its node, incarnation, round and local rank. Whatever a former life held goes back to the head of the
queue when its node is given up or a new round begins. Commands are in `data_commands`, models that come back in `data_restoring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from dlrover.core.data.checkpoint_text import write_states
from dlrover.core.data.dataset import Dataset
from dlrover.core.membership.nodes import after_outage
from dlrover.core.outcome import micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import NO_STEP, TaskType, last_shared
from dlrover.protocol.messages.identity import NodeId, Round
from dlrover.protocol.messages.job import Micros

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

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
    """The ranks of this round took up a model of another history. Nobody can tell what older rounds share with it, so nothing of theirs counts."""
    held_back_since: Micros | None = None
    """When somebody first had to wait in this round for the word about its model; None: nobody did."""
    folded: int = NO_STEP
    """The newest step of a checkpoint in storage: what its model contains is not listed any more."""
    late: dict[Round, int] = {}
    """The newest step in storage of each round whose checkpoints do not count yet."""
    awaited: dict[str, str] = {}
    """What the restored checkpoint says of datasets that nobody has registered yet."""

    def find(self, name: str) -> Dataset:
        dataset = self.datasets.get(name)
        if dataset is None:
            raise Rejected(
                f"There is no dataset {name!r}; register it first. Known: {', '.join(sorted(self.datasets)) or 'none'}.",
                code="unknown-dataset",
            )
        return dataset

    @property
    def num_consumed(self) -> int:
        """Records of all datasets that are in the model now."""
        return sum(dataset.num_consumed for dataset in self.datasets.values())

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
        """Nobody could say anything meanwhile."""
        if self.held_back_since is not None:
            ends_at = after_outage(Micros(self.held_back_since + micros(RESTORE_PATIENCE)), last_command_at, now)
            self.held_back_since = Micros(ends_at - micros(RESTORE_PATIENCE))


def round_began(course: Course, round_: Round) -> None:
    """Workers of older rounds are gone, and with them their leases. What the new ones may go on with is settled now."""
    books = course.state.data
    books.held_back_since = None
    course.state.rendezvous.turns = books.turns()
    for dataset in books.datasets.values():
        dataset.pace = []
        dataset.end_leases([reader for reader in dataset.all_readers() if reader.round < round_])


def workers_ended(course: Course, node: NodeId) -> None:
    """To be called whenever the workers of a node have ended for good."""
    for dataset in course.state.data.datasets.values():
        dataset.end_leases(dataset.readers_of(node))


def is_reading(state: JobState, node: NodeId) -> bool:
    """Whether workers of the node have something that they have not told the end of."""
    return any(node in dataset.readers for dataset in state.data.datasets.values())


def checkpoint_committed(course: Course, step: int, round_: Round) -> None:
    """
    A model of this step is in storage: what it contains is never read again. If it was saved before the ranks went back to an older
    step, only what both histories share counts.

    Of a former round: the ranks of this one may have looked into the storage before it was there. Then it counts when they have said
    what they found.
    """
    books, newest = course.state.data, course.state.rendezvous.round
    books.late[round_] = max(step, books.late.get(round_, NO_STEP))
    if round_ == newest or newest in books.restored:
        fold(books)


def fold(books: DataBooks) -> None:
    late, books.late = books.late, {}
    step = max((books.last_shared(step, round_) for round_, step in late.items()), default=NO_STEP)
    books.folded = max(books.folded, step)
    for dataset in books.datasets.values():
        if dataset.spec.task_type is TaskType.TRAINING:
            dataset.commit(step)


def state_for_manifest(state: JobState, step: int, round_: Round) -> str:
    """
    What the model of a save has still to read. Empty: the job reads no shards for training, the ranks went back behind that model, or
    a later one is in storage already, so that nobody can tell any more.
    """
    books = state.data
    if books.last_shared(step, round_) < step or step < books.folded:
        return ""
    datasets = [each for each in books.datasets.values() if each.spec.task_type is TaskType.TRAINING]
    return write_states(datasets, step) if datasets else ""


def end_overdue_leases(course: Course, number: int) -> str:
    """Workers that evaluate or predict and were not heard of for too long. The sentence that says so, if any."""
    books = course.state.data
    dataset = next((each for each in books.datasets.values() if each.number == number), None)
    if dataset is None or books.lease_looks.get(number, course.now + 1) > course.now:
        return ""
    lease = micros(dataset.spec.lease)
    overdue = [reader for reader in dataset.all_readers() if course.now - reader.heard_at >= lease]
    num_ended = dataset.end_leases(overdue)
    left = [reader.heard_at for reader in dataset.all_readers()]
    if left:
        books.lease_looks[number] = Micros(min(left) + lease)
    else:
        books.lease_looks.pop(number, None)
    if not overdue:
        return ""
    what = f"{num_ended} shards of {dataset.spec.name!r} go to others"
    return f"{what}: their workers were not heard of for {dataset.spec.lease:g} s."
