"""
Random lives of checkpoints against a model of the storage.

Three nodes write the shards of several attempts in any order, die, come back, fail and are slow; whoever was told to commit may do so
much later, when somebody else was told as well. The model does what the files would: it knows which shards were really written, and
what the tracker names.
"""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.commit_order import replay
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import CommitCheckpoint
from tests.core.checkpoints.test_commits import DIRECTORY, saving

NAMES = "abc"
SHARDS = {0, 1}


class CheckpointLife:
    """A job whose nodes save, and beside it what their storage would hold. Every chance comes from `chance`."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.scene = saving(*NAMES, join_timeout=1e6, last_call=1.0)
        self.seconds = 0.0
        self.written: dict[str, set[int]] = {}
        self.told: list[tuple[str, CommitCheckpoint]] = []
        self.tracker = (0, 0)
        """Round and step of what it names."""
        self.checkpoints: list[str] = []
        """Attempts in the order in which the job took them for committed."""
        self.seen: set[int] = set()
        """Duties that were looked at when they were given."""

    def live(self, num_steps: int) -> None:
        acts = {
            self.write: 10,
            self.listen: 6,
            self.commit: 6,
            self.fail: 1,
            self.lose: 1,
            self.come_back: 2,
            self.meet: 3,
            self.wait: 3,
            self.restart_master: 1,
        }
        for act in self.chance.choices(list(acts), list(acts.values()), k=num_steps):
            with contextlib.suppress(Rejected):
                act()
            self.check()

    def write(self) -> None:
        step = self.chance.choice([10, 20, 30])
        attempt = f"r{self.scene.job.state.rendezvous.round}-{step}"
        for shard in self.chance.choice([{0}, {1}, SHARDS]):
            self.written.setdefault(attempt, set()).add(shard)  # in the storage, whatever the job says
            self.scene.wrote(self.chance.choice(NAMES), shard, step, num_shards=len(SHARDS), attempt=attempt)

    def listen(self) -> None:
        for name in NAMES:
            with contextlib.suppress(Rejected):
                self.told += [(name, duty) for duty in self.scene.duties(name).commits]

    def commit(self) -> None:
        if not self.told:
            return
        name, duty = self.told.pop(self.chance.randrange(len(self.told)))
        assert self.written[duty.attempt] == SHARDS, "told to commit with a shard missing"
        room = self.scene.job.state.checkpoints
        attempt = next((each for each in room.attempts.values() if each.attempt == duty.attempt), None)
        self.scene.committed(name, duty.step, attempt=duty.attempt)
        if attempt is not None:
            self.checkpoints.append(duty.attempt)
            place = (int(attempt.round), attempt.step)
            assert duty.is_newest or place < self.tracker, "the tracker would stay behind"
            self.tracker = max(self.tracker, place)  # who was told long ago finds the newer one in the storage

    def fail(self) -> None:
        if self.told:
            name, duty = self.told.pop()
            self.scene.failed(name, duty.step)

    def lose(self) -> None:
        if len(self.scene.job.state.nodes.live) > 1:
            self.scene.silent(self.chance.choice(NAMES))

    def come_back(self) -> None:
        self.scene.restart_agent(self.chance.choice(NAMES))

    def meet(self) -> None:
        for name in NAMES:
            with contextlib.suppress(Rejected):
                self.scene.obey(name)

    def wait(self) -> None:
        self.seconds += self.chance.choice([1.0, 1.0, 70.0, 700.0])
        self.scene.tick(self.seconds)

    def restart_master(self) -> None:
        self.scene.restart_master()

    def check(self) -> None:
        room = self.scene.job.state.checkpoints
        assert len(self.checkpoints) == len(set(self.checkpoints)), "committed twice"
        committers = [each.committer for each in room.attempts.values() if each.committer is not None]
        assert len(committers) <= 1, "two committers in one directory"
        assert all(node in self.scene.job.state.nodes.live for node in committers)
        for each in room.attempts.values():
            if each.committer is not None and each.duty not in self.seen:
                self.seen.add(each.duty)
                assert each.is_newest == ((each.round, each.step) > self.tracker), "the tracker would go back"
        newest = room.committed.get(DIRECTORY)
        assert newest is None or newest.order[:2] == self.tracker


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_what_is_committed_is_whole_and_the_tracker_never_goes_back(seed: int) -> None:
    life = CheckpointLife(random.Random(seed))
    life.live(150)
    assert replay(None, life.scene.journal).job.digest() == life.scene.job.digest()


def test_such_lives_do_commit() -> None:
    """Or the property above would hold of nothing."""
    num_committed = 0
    for seed in range(4):
        life = CheckpointLife(random.Random(seed))
        life.live(300)
        num_committed += len(life.checkpoints)
    assert num_committed >= 5
