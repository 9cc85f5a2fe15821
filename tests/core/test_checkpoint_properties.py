"""
Random lives of checkpoints against a model of the storage.

Three nodes write the shards of several attempts in any order, die, come back, fail and are slow; whoever was ever told to commit may do so at
any time, also long after somebody else was told. The model does what the files would: it knows which shards were really written and
moves the tracker only as the duty says.
"""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dlrover.core.sequence import replay
from dlrover.protocol.checkpoint_messages import CommitCheckpoint
from dlrover.protocol.errors import Rejected
from tests.core.test_checkpoints import Saving, saving

NAMES = st.sampled_from("abc")
STEPS = st.sampled_from([10, 20, 30])
NUM_SHARDS = 3


class CheckpointLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scene: Saving = saving("a")
        self.seconds = 0.0
        self.written: dict[str, set[int]] = {}
        self.told: list[tuple[str, CommitCheckpoint]] = []
        self.tracker = (0, 0)
        """Round and step of what it names."""
        self.checkpoints: list[str] = []
        """Attempts in the order in which the job took them for committed."""

    @initialize()
    def begin(self) -> None:
        self.scene = saving("a", "b", "c", join_timeout=1e6, last_call=1.0)

    def attempt_of(self, step: int) -> str:
        return f"r{self.scene.job.state.rendezvous.round}-{step}"

    @rule(name=NAMES, step=STEPS, shard=st.integers(0, NUM_SHARDS - 1))
    def write(self, name: str, step: int, shard: int) -> None:
        attempt = self.attempt_of(step)
        self.written.setdefault(attempt, set()).add(shard)  # in the storage, whatever the job says
        with contextlib.suppress(Rejected):
            self.scene.wrote(name, shard, step, num_shards=NUM_SHARDS, attempt=attempt)

    @rule(name=NAMES)
    def listen(self, name: str) -> None:
        with contextlib.suppress(Rejected):
            self.told += [(name, duty) for duty in self.scene.duties(name).commits]

    @rule(index=st.integers(0, 50), is_well=st.booleans())
    def commit(self, index: int, is_well: bool) -> None:
        if not self.told:
            return
        name, duty = self.told.pop(index % len(self.told))
        assert self.written[duty.attempt] == set(range(NUM_SHARDS)), "told to commit with a shard missing"
        room = self.scene.job.state.checkpoints
        attempt = next((each for each in room.attempts.values() if each.attempt == duty.attempt), None)
        try:
            if is_well:
                self.scene.committed(name, duty.step, attempt=duty.attempt)
            else:
                self.scene.failed(name, duty.step)
        except Rejected:
            return
        if is_well and attempt is not None:
            self.checkpoints.append(duty.attempt)
            newest = (int(attempt.round), attempt.step)
            is_forward = newest >= self.tracker
            assert attempt.is_newest == is_forward, "the tracker would go back, or stay behind"
            self.tracker = max(self.tracker, newest)

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        with contextlib.suppress(Rejected):
            self.scene.silent(name)

    @rule(name=NAMES)
    def come_back(self, name: str) -> None:
        if self.scene.job.end is None:
            with contextlib.suppress(Rejected):
                self.scene.restart_agent(name)

    @rule()
    def meet(self) -> None:
        for name in "abc":
            with contextlib.suppress(Rejected):
                self.scene.obey(name)

    @rule(seconds=st.sampled_from([1.0, 70.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.scene.tick(self.seconds)

    @rule()
    def restart_master(self) -> None:
        self.scene.restart_master()

    @invariant()
    def nothing_is_committed_twice_or_torn(self) -> None:
        room = self.scene.job.state.checkpoints
        assert len(self.checkpoints) == len(set(self.checkpoints))
        for attempt in self.checkpoints:
            assert self.written[attempt] == set(range(NUM_SHARDS))
        committers = [each.committer for each in room.attempts.values() if each.committer is not None]
        assert len(committers) <= 1, "two committers in one directory"
        for node in committers:
            assert node in self.scene.job.state.nodes.live
        newest = room.committed.get("/shared/run")
        assert newest is None or newest.order[:2] == self.tracker

    def teardown(self) -> None:
        assert replay(None, self.scene.journal).job.digest() == self.scene.job.digest()


TestCheckpointLife = CheckpointLife.TestCase
TestCheckpointLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
