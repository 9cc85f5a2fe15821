"""What a checkpoint's manifest says of the data, and books that go back to it."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from dlrover.core.data.audit import Audit
from dlrover.core.data.books import RESTORE_PATIENCE
from dlrover.core.data.commands import QUICK_LOOK
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties, CheckpointCommitted, SaveDuties, ShardWritten
from dlrover.protocol.messages.data import (
    MAX_STATE_BYTES,
    AskDataCheckpoint,
    AwaitRestore,
    Consumption,
    DataCheckpoint,
    RestoreAgreed,
    RestoreState,
    StorageKind,
    Supply,
)
from dlrover.protocol.messages.job import Round
from tests.core.data.test_books import SPEC, Reading, commit, places
from tests.core.scene import terms


@pytest.fixture
def scene() -> Reading:
    return Reading(terms(1)).begin("a")


def read_steps(scene: Reading, *steps: int) -> list[tuple[int, int]]:
    """One shard for each."""
    taken = []
    for step in steps:
        [shard] = scene.take("a")
        scene.consume("a", shard, step)
        taken.append((shard.start, shard.end))
    return taken


def rest(scene: Reading) -> list[tuple[int, int]]:
    taken = []
    while shards := scene.take("a"):
        taken += places(shards)
        scene.consume("a", shards[0], 1000)
    return sorted(taken)


def state_of(scene: Reading, step: int) -> str:
    return scene.job.state.data.state_for_manifest(step, scene.round)


def test_the_committer_is_told_what_the_model_has_still_to_read(scene: Reading) -> None:
    read_steps(scene, 1, 2, 3)
    agent = scene.agents["a"]
    who = {"node": agent.node, "incarnation": agent.incarnation}
    written = ShardWritten(
        directory="/c", target="2", step=2, attempt="t-1", shard=0, num_shards=1, round=scene.round, digest="d", **who
    )
    scene.send("a", written)
    duties = scene.job.ask(AwaitSaveDuties(**who))
    assert isinstance(duties, SaveDuties)
    [duty] = duties.commits
    state = json.loads(duty.data_state)
    assert (state["step"], state["datasets"]["d"]["num_consumed"]) == (2, 20)
    assert state["datasets"]["d"]["todo"] == [], "nothing is listed that can be computed"


def test_an_older_checkpoint_brings_the_data_back_behind_a_newer_one(scene: Reading) -> None:
    read_steps(scene, 1, 2)
    text = state_of(scene, 2)
    read_steps(scene, 3, 4, 5)
    commit(scene, 5, scene.round)
    scene.new_round("a")
    scene.restored("a", 2, data_state=text)
    assert scene.state().num_consumed == 20
    assert rest(scene) == [(start, start + 10) for start in range(20, 100, 10)]


def test_books_that_know_it_themselves_are_not_replaced(scene: Reading) -> None:
    read_steps(scene, 1, 2)
    text = state_of(scene, 2)
    read_steps(scene, 3)
    scene.new_round("a")
    scene.restored("a", 2, data_state=text)
    assert scene.job.state.data.datasets["d"].num_returns == 0
    assert scene.state().num_consumed == 20


def test_a_checkpoint_that_somebody_names_counts_in_any_case(scene: Reading) -> None:
    read_steps(scene, 1)
    other = Reading(terms(1)).begin("a")
    skipped = other.take("a", 2)
    other.consume("a", skipped[1], 1)
    text = state_of(other, 1)  # the same number of records, but others
    scene.new_round("a")
    scene.restored("a", 1, data_state=text, is_explicit=True)
    assert rest(scene) == [(start, start + 10) for start in range(0, 100, 10) if start != 10]


def test_who_has_loaded_a_model_waits_for_the_word_about_it() -> None:
    """Nobody has ever named a step here, so only the workers themselves know that a word is under way."""
    former = Reading(terms(1)).begin("a")
    read_steps(former, 1, 2)
    text = state_of(former, 2)
    scene = Reading(terms(2)).begin("a", "b")
    scene.exchange("a", want=0)
    given = scene.exchange("b", want=2, has_model=True)
    assert (given.supply, given.shards) == (Supply.WAIT, ())
    assert (given.retry_after, given.held_back_for) == (QUICK_LOOK, RESTORE_PATIENCE)
    question = AwaitRestore(round=scene.job.state.rendezvous.round)
    waiting = scene.job.ask(question)
    assert isinstance(waiting, NotYet)
    assert waiting.otherwise == RestoreState(False)
    scene.restored("a", 2, data_state=text, is_explicit=True)
    assert scene.job.ask(question) == RestoreState(True)
    assert scene.job.ask(AwaitRestore(round=Round(question.round + 1))) == RestoreState(True), (
        "no such round is waited for"
    )
    given = scene.exchange("b", want=2, has_model=True)
    assert places(list(given.shards)) == [(20, 30), (30, 40)]


def test_a_word_that_never_comes_is_not_waited_for_for_ever() -> None:
    scene = Reading(terms(2)).begin("a", "b")
    assert not scene.exchange("b", want=1, has_model=True).shards
    scene.at(RESTORE_PATIENCE + 1)
    assert places(list(scene.exchange("b", want=1, has_model=True).shards)) == [(0, 10)]
    assert "did not say in time which model" in " ".join(scene.verdicts)


@pytest.mark.parametrize("is_explicit", [True, False])
def test_workers_keep_what_the_restored_model_has_not_seen(is_explicit: bool) -> None:
    """They took it before they loaded the model. What the model has seen is not theirs any more."""
    former = Reading(terms(1)).begin("a")
    one, two, _ = former.take("a", 3)
    former.consume("a", one, 1)
    former.consume("a", two, 2, count=4)
    text = state_of(former, 2)
    scene = Reading(terms(2)).begin("a", "b")
    mine, others = scene.take("a", 5), scene.take("b", 2)
    assert places(others) == [(50, 60), (60, 70)]
    scene.consume("b", others[0], count=3)
    scene.restored("a", 2, data_state=text, is_explicit=is_explicit)
    for shard in mine[:2]:
        with pytest.raises(Rejected) as caught:
            scene.consume("a", shard, 3)
        assert caught.value.code == "stale-lease"
    scene.exchange("b", consumed=(Consumption(others[0].id, 7, 3), Consumption(others[1].id, 10, 3)))
    for shard in mine[2:]:
        scene.consume("a", shard, 3)
    assert scene.state().num_doing == 0
    assert rest(scene) == [(14, 20), (50, 53), (70, 80), (80, 90), (90, 100)], "what b had read is in no model"


def test_workers_of_a_stream_keep_what_the_restored_model_has_not_seen() -> None:
    spec = replace(SPEC, size=-1, storage=StorageKind.STREAM, partitions={"p": 0, "q": 0})
    former = Reading(terms(1)).begin("a", spec=spec)
    [shard] = former.take("a")
    former.consume("a", shard, 1)
    text = state_of(former, 1)
    scene = Reading(terms(2)).begin("a", "b", spec=spec)
    [mine], [others] = scene.take("a"), scene.take("b")
    scene.restored("a", 1, data_state=text)
    scene.consume("b", others, 2)
    with pytest.raises(Rejected):
        scene.consume("a", mine, 2)
    assert [(each.partition, each.start) for each in scene.take("a", 2)] == [("p", 10), ("q", 10)]


@pytest.mark.parametrize("is_registered_first", [True, False])
def test_a_new_job_goes_on_where_the_checkpoint_of_a_former_one_was(is_registered_first: bool) -> None:
    former = Reading(terms(1)).begin("a", spec=replace(SPEC, shuffle=True, seed=3))
    read = read_steps(former, 1, 2, 3)
    text = state_of(former, 3)
    scene = Reading(terms(1))
    scene.attach("a")
    scene.join("a")
    spec = replace(SPEC, shuffle=True, seed=3)
    if is_registered_first:
        scene.register("a", spec)
    scene.restored("a", 3, data_state=text)
    scene.register("a", spec)
    assert scene.state().num_consumed == 30
    assert sorted([*read, *rest(scene)]) == [(start, start + 10) for start in range(0, 100, 10)]


def test_the_audit_counts_from_the_return_on() -> None:
    scene = Reading(terms(1)).begin("a")
    read_steps(scene, 1, 2)
    text = state_of(scene, 2)
    read_steps(scene, 3, 4)
    commit(scene, 4, scene.round)
    scene.new_round("a")
    audit = Audit(scene.job.state.data.datasets)
    datasets = scene.job.state.data.datasets
    command = RestoreAgreed(step=2, data_state=text, **scene.who("a"))  # type: ignore[arg-type]
    reply = scene.send("a", command).reply
    audit.follow(command, reply, datasets)
    [finding] = audit.findings(datasets)
    assert finding.is_clean
    assert finding.num_trusted == 20


@pytest.mark.parametrize("text", ["nonsense", '{"step": 1}', '{"step": 1, "datasets": {"d": {"version": 2}}}'])
def test_a_state_that_cannot_be_read_is_said_and_keeps_nobody_from_training(scene: Reading, text: str) -> None:
    read_steps(scene, 1, 2)
    scene.new_round("a")
    scene.restored("a", 1, data_state=text, is_explicit=True)
    assert "cannot be read" in " ".join(scene.verdicts)
    assert scene.state().num_consumed == 10


def test_a_state_of_another_cut_is_said_and_changes_nothing(scene: Reading) -> None:
    other = Reading(terms(1)).begin("a", spec=replace(SPEC, size=200))
    read_steps(other, 1)
    scene.restored("a", 1, data_state=state_of(other, 1))
    assert "goes on from the master's journal of what was read" in " ".join(scene.verdicts)
    assert scene.state().num_todo == 100


def test_a_model_behind_what_is_final_without_a_state_is_said(scene: Reading) -> None:
    read_steps(scene, 1, 2, 3)
    commit(scene, 3, scene.round)
    scene.new_round("a")
    scene.restored("a", 1)
    assert "no record says what it had read of 'd'" in " ".join(scene.verdicts)


@pytest.mark.parametrize("is_registered_first", [True, False])
def test_a_trained_model_of_which_nothing_is_known_is_said(is_registered_first: bool) -> None:
    scene = Reading(terms(1))
    scene.attach("a")
    scene.join("a")
    if is_registered_first:
        scene.register("a")
    scene.restored("a", 3)
    if not is_registered_first:
        scene.register("a")
    assert "model of step 3 had read of 'd'" in " ".join(scene.verdicts)
    assert scene.state().num_todo == 100


@pytest.mark.parametrize("is_registered_first", [True, False])
def test_of_a_lost_journal_the_newest_checkpoint_is_left(is_registered_first: bool) -> None:
    """The model comes from memory and is newer: what it has read since is read again, and nothing is lost."""
    former = Reading(terms(1)).begin("a")
    read_steps(former, 1, 2, 3)
    text = state_of(former, 2)
    scene = Reading(terms(1))
    scene.attach("a")
    scene.join("a")
    if is_registered_first:
        scene.register("a")
    scene.restored("a", 3, data_state=text)
    assert "between these steps is read again" in " ".join(scene.verdicts)
    scene.register("a")
    assert rest(scene) == [(start, start + 10) for start in range(20, 100, 10)]


def test_books_that_know_anything_know_more_than_an_older_checkpoint(scene: Reading) -> None:
    read_steps(scene, 1, 2)
    text = state_of(scene, 1)
    scene.new_round("a")
    scene.restored("a", 2, data_state=text)
    assert scene.job.state.data.datasets["d"].num_returns == 0
    assert scene.state().num_consumed == 20


def test_a_worker_can_ask_for_what_the_manifest_says(scene: Reading) -> None:
    read_steps(scene, 1, 2)
    reply = scene.job.ask(AskDataCheckpoint(dataset="", step=1, round=scene.round))
    assert reply == DataCheckpoint(state_of(scene, 1))


def test_nobody_vouches_for_a_save_of_a_history_that_was_given_up(scene: Reading) -> None:
    read_steps(scene, 1, 2, 3)
    old = scene.round
    scene.new_round("a")
    scene.restored("a", 1)
    assert scene.job.state.data.state_for_manifest(3, old) == ""
    assert scene.job.state.data.state_for_manifest(1, old)
    commit(scene, 5, scene.round)
    assert state_of(scene, 4) == "", "a later one is final already"


def test_after_a_step_back_behind_a_checkpoint_later_saves_have_their_state_again(scene: Reading) -> None:
    read_steps(scene, 1, 2)
    text = state_of(scene, 2)
    read_steps(scene, 3, 4, 5)
    commit(scene, 5, scene.round)
    assert scene.job.state.data.folded == 5
    scene.new_round("a")
    scene.restored("a", 2, data_state=text)
    assert scene.job.state.data.folded == 2
    read_steps(scene, 3)
    assert json.loads(state_of(scene, 3))["step"] == 3
    scene.new_round("a")
    scene.restored("a", 3)
    assert scene.job.state.data.folded == 2, "a step forward makes nothing final"


def test_a_commit_of_a_later_round_is_final_as_well(scene: Reading) -> None:
    """Committers do not name the round; the attempt does."""
    read_steps(scene, 1)
    scene.new_round("a")
    scene.restored("a", 1)
    read_steps(scene, 2)
    agent = scene.agents["a"]
    who = {"node": agent.node, "incarnation": agent.incarnation}
    scene.send(
        "a",
        ShardWritten(
            directory="/c", target="2", step=2, attempt="t-1", shard=0, num_shards=1, round=scene.round, digest="d",
            **who,
        ),
    )  # fmt: skip
    scene.send("a", CheckpointCommitted(directory="/c", attempt="t-1", step=2, **who))
    assert scene.state().num_committed == 20


def test_an_endless_state_is_refused(scene: Reading) -> None:
    with pytest.raises(Rejected):
        scene.restored("a", 1, data_state="x" * (MAX_STATE_BYTES + 1))
