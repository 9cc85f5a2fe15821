"""The journal of a multi-role job: killed at any call, raced by another conductor, and still one history."""

from __future__ import annotations

import random

import pytest

from dlrover.core.machine_journal import JournalCorrupt
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.machine import EnsembleMachine
from dlrover.unified.core.messages import (
    BeginEnsemble,
    BundlesPlaced,
    Command,
    CreateInstance,
    InstanceGone,
    InstanceReady,
    StageOfJob,
    StopEnsemble,
)
from dlrover.unified.core.spec import EnsembleSpec, OnFailure, RoleSpec
from dlrover.unified.core.state import ENSEMBLE_DECISIONS
from dlrover.unified.store import SMALL_BYTES, ConductorFenced, DurableEnsemble, EnsembleJournal
from tests.unified.key_values import FakeKeyValues, Killed, MortalKeyValues

SPEC = EnsembleSpec(
    name="job", roles=(RoleSpec(name="worker", count=2, on_failure=OnFailure.INSTANCE, max_restarts=100),)
)
BEGIN = BeginEnsemble(SPEC)
NOW = Micros(1)


def journal(store: object, snapshot_every: int = 200, *, small_bytes: int = 0) -> EnsembleJournal:
    """As of a large job, if `small_bytes` is not given: most records have no snapshot of their own."""
    return EnsembleJournal(store, "uid", snapshot_every=snapshot_every, small_bytes=small_bytes)  # type: ignore[arg-type]


def age(store: FakeKeyValues) -> None:
    """As if another decision version had written the journal."""
    newest = max(store.keys("uid/ensemble/snap/"))
    machine = EnsembleMachine.decode(store.values[newest])
    machine.state.decision_version = ENSEMBLE_DECISIONS - 1
    store.values[newest] = machine.encode()


def next_command(ensemble: DurableEnsemble, chance: random.Random) -> Command:
    """Something that fits."""
    if not ensemble.machine.state.is_placed:
        return BundlesPlaced()
    living = [each for each in ensemble.machine.instances() if each[1].life != "absent"]
    if not living:
        return ensemble.machine.due(Micros(10**12))[0]
    instance_id, instance = chance.choice(living)
    return (
        InstanceReady(instance_id) if instance.life == "starting" else InstanceGone(instance_id, str(chance.random()))
    )


def test_what_was_decided_is_there_for_the_next_conductor():
    store = FakeKeyValues()
    first = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    effects = first.decide(BundlesPlaced(), NOW).effects
    second = DurableEnsemble.take_over(journal(store), NOW)
    assert (first.epoch, second.epoch) == (1, 2)
    assert [effect for effect in second.machine.open_effects() if isinstance(effect, CreateInstance)] == list(effects)
    with pytest.raises(ConductorFenced, match="Conductor 1 was replaced"):
        first.decide(StopEnsemble("too late"), NOW)
    assert second.machine.stage is StageOfJob.INIT
    assert second.decide(StopEnsemble("in time"), NOW)


def test_a_refused_command_leaves_no_record():
    store = FakeKeyValues()
    ensemble = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    before = dict(store.values)
    with pytest.raises(Rejected):
        ensemble.decide(BEGIN, NOW)
    assert store.values == before


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_conductor_that_is_killed_at_any_call_loses_nothing_that_it_told(is_done: bool, small_bytes: int):
    has_survived = False
    for dies_at in range(1, 200):
        store, chance = FakeKeyValues(), random.Random(dies_at)
        told = 0
        try:
            mortal = MortalKeyValues(store, dies_at=dies_at, is_done=is_done)
            own = journal(mortal, snapshot_every=4, small_bytes=small_bytes)
            ensemble = DurableEnsemble.take_over(own, NOW, first=BEGIN)
            for _ in range(12):
                told = ensemble.machine.number
                ensemble.decide(next_command(ensemble, chance), NOW)
            has_survived = True
        except Killed:
            pass
        again = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
        assert again.machine.number > told
        assert again.machine.master_epoch == again.epoch
        once_more = journal(store).load()
        assert once_more.encode() == again.machine.encode()
    assert has_survived, "the last rounds reach the end"


@pytest.mark.parametrize("is_done", [False, True])
def test_a_conductor_of_an_upgraded_package_knows_all_that_was_told(is_done: bool):
    """The one before it is killed at any call. Records are never replayed by other rules."""
    num_dropped = 0
    for dies_at in range(1, 150):
        store, chance = FakeKeyValues(), random.Random(dies_at)
        told: bytes = b""
        try:
            mortal = MortalKeyValues(store, dies_at=dies_at, is_done=is_done)
            ensemble = DurableEnsemble.take_over(
                journal(mortal, snapshot_every=4, small_bytes=SMALL_BYTES), NOW, first=BEGIN
            )
            for _ in range(12):
                told = ensemble.machine.encode()
                ensemble.decide(next_command(ensemble, chance), NOW)
        except Killed:
            pass
        if store.keys("uid/ensemble/snap/"):
            age(store)
        newest = max(store.keys("uid/ensemble/rec/"), default="")
        num_dropped += newest > max(store.keys("uid/ensemble/snap/"), default="").replace("/snap/", "/rec/")
        again = DurableEnsemble.take_over(journal(store, small_bytes=SMALL_BYTES), NOW, first=BEGIN)
        assert again.machine.state.decision_version == ENSEMBLE_DECISIONS
        if told:
            before = EnsembleMachine.decode(told)
            assert again.machine.number > before.number
            is_same = again.machine.number == before.number + 1  # but for the new conductor itself
            assert not is_same or again.machine.status().roles == before.status().roles
        assert journal(store).load().encode() == again.machine.encode(), "and the next one agrees"
    assert num_dropped, "some died between a record and its snapshot"


def test_a_large_job_of_another_decision_version_ends_with_a_sentence():
    store, chance = FakeKeyValues(), random.Random(1)
    ensemble = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    for _ in range(3):
        ensemble.decide(next_command(ensemble, chance), NOW)
    assert journal(store).load().digest() == ensemble.machine.digest(), "its own version replays it"
    age(store)
    with pytest.raises(
        JournalCorrupt,
        match=f"decision version {ENSEMBLE_DECISIONS - 1}, and this dlrover decides by version {ENSEMBLE_DECISIONS}",
    ):
        journal(store).load()


def test_a_large_job_that_an_upgraded_conductor_continued_outlives_that_conductor():
    store, chance = FakeKeyValues(), random.Random(1)
    ensemble = DurableEnsemble.take_over(journal(store, snapshot_every=3), NOW, first=BEGIN)
    while ensemble.machine.number % 3:
        ensemble.decide(next_command(ensemble, chance), NOW)
    age(store)
    upgraded = DurableEnsemble.take_over(journal(store), NOW)
    upgraded.decide(next_command(upgraded, chance), NOW)
    assert journal(store).load().digest() == upgraded.machine.digest()


def test_a_journal_of_records_without_any_snapshot_is_not_taken_for_an_empty_one():
    store, chance = FakeKeyValues(), random.Random(1)
    ensemble = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    for _ in range(3):
        ensemble.decide(next_command(ensemble, chance), NOW)
    for key in store.keys("uid/ensemble/snap/"):
        del store.values[key]
    num_records = len(store.keys("uid/ensemble/rec/"))
    with pytest.raises(JournalCorrupt, match="Submit it again"):
        journal(store).load()
    assert len(store.keys("uid/ensemble/rec/")) == num_records


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
def test_of_two_conductors_at_once_one_is_fenced_and_there_is_one_history(small_bytes: int):
    def own() -> EnsembleJournal:
        return journal(store, snapshot_every=3, small_bytes=small_bytes)

    for seed in range(200):
        store, chance = FakeKeyValues(), random.Random(seed)
        conductors = [DurableEnsemble.take_over(own(), NOW, first=BEGIN)]
        history: list[bytes] = []
        for _ in range(30):
            if chance.random() < 0.15:
                conductors.append(DurableEnsemble.take_over(own(), NOW))
            conductor = chance.choice(conductors)
            try:
                conductor.decide(next_command(conductor, chance), NOW)
            except ConductorFenced:
                assert conductor is not conductors[-1], "the newest one drives"
                conductors.remove(conductor)
                continue
            assert conductor is conductors[-1], "a former conductor decided something"
            history.append(conductor.machine.digest())
        assert journal(store).load().digest() == conductors[-1].machine.digest()
        assert history


def test_a_conductor_that_is_overtaken_while_it_takes_over_tries_again_or_gives_up():
    store = FakeKeyValues()
    old = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)

    class Racing(FakeKeyValues):
        """The old conductor decides once more, between the new one's look and its first record."""

        has_raced = False

        def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
            if "/rec/" in key and not self.has_raced:
                self.has_raced = True
                old.decide(BundlesPlaced(), NOW)
            return super().put(key, value, overwrite=overwrite)

    racing = Racing()
    racing.values = store.values
    new = DurableEnsemble.take_over(journal(racing), NOW)
    assert new.machine.state.is_placed, "what the old one decided in time counts"
    with pytest.raises(ConductorFenced):
        old.decide(StopEnsemble("too late"), NOW)


def test_a_conductor_gives_up_when_a_newer_one_has_come_whatever_became_of_that():
    store = FakeKeyValues()
    DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    slow = DurableEnsemble(journal(store), journal(store).claim_epoch())
    assert journal(store).claim_epoch() == slow.epoch + 1  # and its conductor is killed
    with pytest.raises(ConductorFenced):
        slow.decide(BundlesPlaced(), NOW)
    next_one = DurableEnsemble.take_over(journal(store), NOW)
    assert next_one.decide(StopEnsemble("it drives"), NOW)


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
def test_old_records_go_with_a_snapshot_and_nothing_is_left_at_the_end(small_bytes: int):
    store, chance = FakeKeyValues(), random.Random(1)
    own = journal(store, snapshot_every=10, small_bytes=small_bytes)
    ensemble = DurableEnsemble.take_over(own, NOW, first=BEGIN)
    for _ in range(60):
        ensemble.decide(next_command(ensemble, chance), NOW)
    assert len(store.keys("uid/ensemble/rec/")) <= 11
    assert len(store.keys("uid/ensemble/snap/")) == 1
    own.clear()
    assert store.values == {}


def test_a_journal_that_contradicts_itself_is_said():
    store = FakeKeyValues()
    ensemble = DurableEnsemble.take_over(journal(store), NOW, first=BEGIN)
    ensemble.decide(BundlesPlaced(), NOW)
    _, second, _ = sorted(store.keys("uid/ensemble/rec/"))
    store.delete(second)
    with pytest.raises(JournalCorrupt, match="Record 3 follows command 1"):
        journal(store).load()
