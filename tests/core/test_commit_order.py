"""Apply, append, commit, release; and the same again from the journal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dlrover.core.commit_order import (
    BrokenQuestion,
    CommitSequence,
    CoreFault,
    JournalCorrupt,
    Record,
    decode_record,
    load,
    replay,
    trimmed_for_journal,
    walk,
)
from dlrover.core.job import Job, Origin
from dlrover.core.outcome import NotYet, Outcome
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    MAX_JOURNALLED_FAILURE_BYTES,
    AskStatus,
    Attach,
    Attached,
    Command,
    Done,
    Incarnation,
    JobStatus,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    MasterStarted,
    Micros,
    NodeId,
    Ping,
    Pong,
    Query,
    Reply,
    ReportFailure,
    Round,
    StopJob,
    WorkerFailure,
)
from tests.core.scene import Scene, failure, micros, terms

ATTACH = Attach(launch="a", host="host-a", terms=terms(1), local_world_size=1)
JOIN = JoinRendezvous(node=NodeId(1), incarnation=Incarnation(1), round=Round(1), local_world_size=1, offer="host-a:1")
ORIGIN = Origin(NodeId(1), Incarnation(1), 1)


def begin() -> CommitSequence:
    sequence = CommitSequence(Job(), master_epoch=1, next_number=1)
    sequence.stage(MasterStarted(1, "a-job"), micros(0))
    return sequence


def a_journal() -> list[bytes]:
    scene = Scene(terms(2)).gather("a", "b")
    scene.at(10).fail("b", step=7)
    scene.rejoin("a", "b")
    scene.at(20).finish("a")
    scene.finish("b")
    return scene.journal


class TestOrder:
    def test_nothing_is_seen_before_it_is_committed(self) -> None:
        sequence = begin()
        tickets = [sequence.stage(ATTACH, micros(1)), sequence.stage(JOIN, micros(2), ORIGIN)]
        batch = sequence.take()
        assert batch is not None
        assert sequence.take() is None
        assert not sequence.is_settled
        released = sequence.committed(batch)
        assert [one.ticket for one in released][1:] == tickets
        assert isinstance(released[1].outcome.reply, Attached)
        assert released[2].outcome.reply == Done()
        assert sequence.is_settled

    def test_a_batch_says_which_master_epoch_its_records_lead_to(self) -> None:
        """Raised by an agent that knows a later master: it has to be stored together with the record that raised it."""
        sequence = begin()
        first = sequence.take()
        sequence.stage(replace(ATTACH, master_epoch=7), micros(1))
        second = sequence.take()
        sequence.stage(JOIN, micros(2), ORIGIN)
        third = sequence.take()
        assert first is not None
        assert second is not None
        assert third is not None
        assert [batch.master_epoch for batch in (first, second, third)] == [1, 8, 8]
        assert decode_record(third.records[0]).master_epoch == 8

    def test_batches_are_committed_in_order(self) -> None:
        sequence = begin()
        first = sequence.take()
        sequence.stage(ATTACH, micros(1))
        second = sequence.take()
        assert first is not None
        assert second is not None
        with pytest.raises(AssertionError, match="batch 2 before batch 1"):
            sequence.committed(second)
        sequence.committed(first)
        sequence.committed(second)

    def test_numbers_follow_without_a_gap_and_only_the_last_of_a_batch_has_a_digest(self) -> None:
        sequence = begin()
        sequence.stage(ATTACH, micros(1))
        with pytest.raises(Rejected):
            sequence.stage(msgspec.structs.replace(JOIN, round=Round(9)), micros(2))
        sequence.stage(JOIN, micros(2), ORIGIN)
        batch = sequence.take()
        assert batch is not None
        records = [decode_record(data) for data in batch.records]
        assert [record.number for record in records] == [1, 2, 3]
        assert batch.first_number == 1
        assert [len(record.digest) for record in records] == [0, 0, 8]
        assert records[2] == Record(
            number=3, now=micros(2), master_epoch=1, origin=ORIGIN, command=JOIN, digest=sequence.job.digest()[:8]
        )

    def test_records_of_a_large_job_share_a_digest(self) -> None:
        sequence = begin()
        for number in range(60):
            attach = replace(ATTACH, launch=str(number), terms=terms(60))
            sequence.stage(attach, micros(1))
        sequence.take()
        digests = []
        for second in range(2, 9):
            sequence.stage(MasterStarted(second, "a-job"), micros(second))
            batch = sequence.take()
            assert batch is not None
            digests.append(bool(decode_record(batch.records[-1]).digest))
        assert digests == [False, False, True, False, False, True, False]

    def test_a_repeated_command_leaves_no_record(self) -> None:
        sequence = begin()
        sequence.stage(ATTACH, micros(1))
        sequence.stage(JOIN, micros(2), ORIGIN)
        sequence.take()
        sequence.stage(JOIN, micros(3), ORIGIN)
        batch = sequence.take()
        assert batch is not None
        assert batch.records == ()
        assert batch.first_number == 4
        assert batch.released[0].outcome.reply == Done()

    def test_a_query_sees_what_was_staged_before_and_is_released_with_it(self) -> None:
        sequence = begin()
        sequence.stage(ATTACH, micros(1))
        ticket = sequence.stage_query(AskStatus())
        sequence.stage_query(Ping())
        sequence.stage(JOIN, micros(2), ORIGIN)
        batch = sequence.take()
        assert batch is not None
        released = {one.ticket: one.outcome.reply for one in sequence.committed(batch)}
        status = released[ticket]
        assert isinstance(status, JobStatus)
        assert [node.wish for node in status.nodes] == ["join"]
        assert released[ticket + 1] == Pong(job_name="a-job", master_epoch=1)

    def test_the_next_number_must_fit_the_job(self) -> None:
        with pytest.raises(AssertionError, match="record 5 cannot follow command 0"):
            CommitSequence(Job(), master_epoch=1, next_number=5)


class TestFault:
    def test_what_was_staged_before_a_fault_is_not_lost(self) -> None:
        sequence = begin()
        sequence.stage(ATTACH, micros(1))
        back_in_time = StopJob()
        with pytest.raises(CoreFault) as fault:
            sequence.stage(back_in_time, micros(0))
        assert fault.value.command == back_in_time
        assert isinstance(fault.value.__cause__, AssertionError)
        with pytest.raises(AssertionError, match="unknown state"):
            sequence.stage(StopJob(), micros(2))
        batch = sequence.take()
        assert batch is not None
        assert len(sequence.committed(batch)) == 2
        assert not sequence.is_settled, "no snapshot of a state that nobody knows"
        rebuilt = replay(None, batch.records)
        assert rebuilt.next_number == 3
        assert rebuilt.job.status().nodes[0].host == "host-a"


class TestReplay:
    def test_a_replay_gives_the_same_job_bit_for_bit(self) -> None:
        journal = a_journal()
        once, twice = replay(None, journal), replay(None, journal)
        assert once.job.encode() == twice.job.encode()
        assert once.next_number == len(journal) + 1
        assert once.num_records == len(journal)

    @pytest.mark.parametrize("at", [1, 4, 8])
    def test_a_snapshot_and_the_rest_give_the_same_job(self, at: int) -> None:
        journal = a_journal()
        snapshot = replay(None, journal[:at]).job.encode()
        resumed = replay(snapshot, journal[at:])
        assert resumed.job.encode() == replay(None, journal).job.encode()
        overlapping = replay(snapshot, journal)
        assert overlapping.num_records == len(journal) - at
        assert overlapping.job.digest() == resumed.job.digest()

    def test_walking_tells_what_each_record_led_to(self) -> None:
        steps = list(walk(load(None), a_journal()))
        assert any("starts: 2 of 2" in verdict for step in steps for verdict in step.outcome.verdicts)

    def test_a_missing_record_is_named(self) -> None:
        journal = a_journal()
        with pytest.raises(JournalCorrupt, match="Record 4 follows command 2"):
            replay(None, journal[:2] + journal[3:])

    def test_a_record_that_cannot_be_read_is_named(self) -> None:
        with pytest.raises(JournalCorrupt, match="after record 1 cannot be read"):
            replay(None, [a_journal()[0], b"\xc1 rubbish"])

    def test_a_record_that_leads_elsewhere_is_named(self) -> None:
        journal = a_journal()
        record = decode_record(journal[1])
        assert isinstance(record.command, Attach)
        forged = msgspec.structs.replace(record, command=msgspec.structs.replace(record.command, host="elsewhere"))
        with pytest.raises(JournalCorrupt, match=r"After record 2 \(Attach\) the state's digest"):
            replay(None, [journal[0], msgspec.msgpack.encode(forged)])

    def test_a_record_that_is_refused_now_is_named(self) -> None:
        journal = a_journal()
        record = decode_record(journal[1])
        refused = msgspec.structs.replace(record, command=MasterStarted(1))
        with pytest.raises(JournalCorrupt, match=r"Record 2 \(MasterStarted\) was accepted once"):
            replay(None, [journal[0], msgspec.msgpack.encode(refused)])

    def test_a_snapshot_that_cannot_be_read_is_an_error_of_the_journal(self) -> None:
        with pytest.raises(JournalCorrupt, match="snapshot"):
            replay(b"\xc1", [])


class TestTrimming:
    @staticmethod
    def report(**texts: Any) -> WorkerFailure:
        command = ReportFailure(
            node=NodeId(1), incarnation=Incarnation(1), round=Round(1), failures=(failure(**texts),)
        )
        trimmed = trimmed_for_journal(command)
        assert trimmed_for_journal(trimmed) == trimmed, "trimming again changes nothing"
        assert isinstance(trimmed, ReportFailure)
        return trimmed.failures[0]

    @staticmethod
    def size(trimmed: WorkerFailure) -> int:
        texts = (trimmed.message, trimmed.traceback, trimmed.log_tail, trimmed.log_file, trimmed.error_file)
        return sum(len(text.encode()) for text in texts)

    def test_short_texts_stay_as_they_are(self) -> None:
        texts = {"message": "boom", "traceback": "t" * 1000, "log_tail": "l" * 2000, "log_file": "/logs/0"}
        trimmed = self.report(**texts)
        assert {name: getattr(trimmed, name) for name in texts} == texts

    def test_of_long_ones_the_tail_is_kept_and_the_traceback_matters_most(self) -> None:
        """Ten megabytes of failure do not enter the state."""
        trimmed = self.report(
            message="m" * 5000,
            traceback="t" * 1_000_000 + "END",
            log_tail="l" * 10_000_000 + "END",
            log_file="f" * 9000,
        )
        assert self.size(trimmed) <= MAX_JOURNALLED_FAILURE_BYTES
        assert trimmed.traceback.endswith("END")
        assert trimmed.log_tail.endswith("END")
        assert len(trimmed.traceback) > len(trimmed.log_tail)

    def test_letters_are_never_cut_in_half(self) -> None:
        trimmed = self.report(message="ü" * 5000, traceback="€" * 5000, log_tail="𝄞" * 5000)
        assert self.size(trimmed) <= MAX_JOURNALLED_FAILURE_BYTES
        assert set(trimmed.traceback) == {"€"}
        assert set(trimmed.log_tail) == {"𝄞"}
        assert set(trimmed.message) == {"ü"}

    def test_it_happens_before_the_command_is_applied(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.fail("a", failure(traceback="x" * 100_000))
        assert len(scene.journal[-1]) < 2 * MAX_JOURNALLED_FAILURE_BYTES
        assert len(scene.job.encode()) < 4 * MAX_JOURNALLED_FAILURE_BYTES

    def test_last_words_are_cut_too(self) -> None:
        leave = LeaveJob(node=NodeId(1), incarnation=Incarnation(1), reason=LeaveReason.FAILED, message="w" * 100_000)
        trimmed = trimmed_for_journal(leave)
        assert isinstance(trimmed, LeaveJob)
        assert len(trimmed.message) == 1024


@pytest.mark.parametrize("command", [StopJob(message="caf\udce9"), MasterStarted(1 << 64, "a-job")])
def test_what_no_record_can_hold_is_refused_before_it_is_applied(command: Command) -> None:
    sequence = begin()
    digest = sequence.job.digest()
    with pytest.raises(Rejected, match="cannot be written") as caught:
        sequence.stage(command, micros(1))
    assert caught.value.code == "malformed"
    assert sequence.job.digest() == digest
    sequence.stage(ATTACH, micros(1))
    batch = sequence.take()
    assert batch is not None
    assert replay(None, batch.records).job.digest() == sequence.job.digest()


def test_a_reply_that_no_message_can_hold_is_a_fault_of_its_command() -> None:
    """It is part of the state: the digest of the whole batch would fail by it, and nobody could tell which command it was."""

    class Talkative(Job):
        def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
            super().apply(command, now, origin)
            return Outcome(Pong(job_name="", master_epoch=1 << 64))

    sequence = begin()
    sequence.stage(ATTACH, micros(1))
    talkative = CommitSequence(Talkative(sequence.job.state), master_epoch=1, next_number=3)
    with pytest.raises(CoreFault):
        talkative.stage(JOIN, micros(2), ORIGIN)


def test_a_question_on_which_the_core_fails_breaks_nothing() -> None:
    class Mute(Job):
        def ask(self, query: Query) -> Reply | NotYet:
            raise ZeroDivisionError("a bug")

    sequence = CommitSequence(Mute(), master_epoch=1, next_number=1)
    with pytest.raises(BrokenQuestion, match="AskStatus cannot be answered") as caught:
        sequence.stage_query(AskStatus())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    sequence.stage(MasterStarted(1, "a-job"), micros(0))
