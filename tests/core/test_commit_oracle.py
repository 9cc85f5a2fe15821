"""The commit order against a plain list of what was staged: each batch as a whole, whatever comes in which order."""

from __future__ import annotations

import random

import pytest

from dlrover.core.commit_order import CommitSequence, decode_record, replay
from dlrover.core.job import Job
from dlrover.core.outcome import Origin
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    AskStatus,
    Attach,
    Incarnation,
    JobTerms,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    Ping,
    UnblockRendezvous,
)


def attach(name: int) -> Attach:
    return Attach(launch=f"l{name}", host=f"h{name}", terms=JobTerms(), local_world_size=1, life=f"f{name}")


@pytest.mark.parametrize("seed", range(16))
def test_batches_are_what_was_staged(seed: int) -> None:
    chance = random.Random(seed)
    digest_every = chance.choice([1, 1, 2, 3])
    job = Job()
    sequence = CommitSequence(job, master_epoch=1, next_number=1, digest_every=digest_every)
    staged: list[int] = []  # tickets that are not taken yet
    commands: list[object] = []
    taken: list[object] = []
    journal: list[bytes] = []
    sent: list[tuple[Origin, UnblockRendezvous]] = []
    ticket, num_batches, num_undigested, epoch, num_attached = 0, 0, 0, 0, 0
    now = Micros(0)
    for _ in range(120):
        now = Micros(now + chance.choice([0, 1, 1_000_000]))
        assert sequence.is_empty == (not staged)
        assert sequence.is_settled == (not staged and not taken)
        match chance.randrange(9) if epoch else 0:
            case 0:
                epoch += 1
                commands.append(MasterStarted(epoch, "a-job"))
                sequence.stage(commands[-1], now)  # type: ignore[arg-type]
                num_undigested += 1
            case 1 | 2:
                num_attached += 1
                commands.append(attach(num_attached))
                sequence.stage(commands[-1], now)  # type: ignore[arg-type]
                num_undigested += 1
            case 3 if job.state.nodes.live:
                node = chance.choice(list(job.state.nodes.live.values()))
                origin = Origin(node.id, node.incarnation, 1 + sum(each.node == node.id for each, _ in sent))
                command = UnblockRendezvous(node=node.id, incarnation=node.incarnation)
                sent.append((origin, command))
                commands.append(command)
                sequence.stage(command, now, origin)
                num_undigested += 1
            case 4 if sent:
                origin, command = chance.choice(sent)
                sequence.stage(command, now, origin)  # again: answered, and no record
            case 5:
                before = job.encode()
                with pytest.raises(Rejected):
                    sequence.stage(NodeDisconnected(node=NodeId(99), incarnation=Incarnation(1)), now)
                assert job.encode() == before
                continue
            case 6:
                sequence.stage_query(chance.choice([AskStatus(), Ping()]))
            case 7:
                batch = sequence.take()
                assert (batch is None) == (not staged)
                if batch is None:
                    continue
                num_batches += 1
                records = [decode_record(record) for record in batch.records]
                assert [record.command for record in records] == commands
                first = len(journal) + 1
                assert batch.first_number == first
                assert [record.number for record in records] == list(range(first, first + len(records)))
                assert batch.number == num_batches
                assert batch.master_epoch == job.master_epoch
                assert [released.ticket for released in batch.released] == staged
                is_due = num_batches % digest_every == 0 and num_undigested >= len(job.state.nodes.live) // 20
                digests = [job.digest()[:8] if is_due and record is records[-1] else b"" for record in records]
                assert [record.digest for record in records] == digests
                if is_due and records:
                    num_undigested = 0
                journal += batch.records
                taken.append(batch)
                commands, staged = [], []
                continue
            case 8 if taken:
                batch = taken.pop(0)
                assert sequence.committed(batch) == batch.released  # type: ignore[arg-type, attr-defined]
                continue
            case _:
                continue
        ticket += 1
        staged.append(ticket)
    digested = replay(None, journal).job
    assert digested.number == len(journal)
    half = replay(None, journal[: len(journal) // 2]).job.encode()
    assert replay(half, journal).job.encode() == digested.encode(), "records that a snapshot contains are skipped"
    assert replay(half, journal).next_number == len(journal) + 1
