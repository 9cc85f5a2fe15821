"""Ranks whose collectives run on a device: the stack shows a line of the script, and the processor spins."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.protocol.messages.watch import Collective, FaultClass, Phase, WorkerDump
from tests.core.diagnosis.watch_lab import IN_LOCK, Lab, dump

AT_ITEM = ("/job/train.py:47 log_loss", "/job/train.py:60 main")
IN_SYNCHRONIZE = ("/venv/torch/cuda/__init__.py:1040 synchronize", "/job/train.py:49 step", "/job/train.py:60 main")


def record(number: int, *, backend: str = "nccl", has_started: bool = True) -> tuple[Collective, ...]:
    """The newest does not end."""
    return tuple(
        Collective(
            sequence=sequence,
            operation="all_reduce",
            group="default_pg",
            shape="float[1153]",
            is_inside=sequence == number,
            backend=backend,
            has_started=has_started or sequence < number,
        )
        for sequence in (number - 1, number)
    )


def spins(rank: int, frames: tuple[str, ...] = AT_ITEM, number: int = 38, **details: bool) -> WorkerDump:
    return dump(rank, frames, Phase.FORWARD, state="R", recorded=record(number, **details))


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    lab.train()
    return lab


def look(lab: Lab, *dumps: WorkerDump) -> None:
    """All that spin have used a core between the two dumps."""
    lab.look(*dumps, second=tuple(replace(each, cpu_seconds=4.0 if each.state == "R" else 0.0) for each in dumps))


def test_a_deadlocked_rank_is_found_although_the_others_spin_for_their_device(lab: Lab) -> None:
    done = tuple(each for each in record(38) if not each.is_inside)
    look(lab, spins(0), spins(1, IN_SYNCHRONIZE), dump(2, IN_LOCK, Phase.FORWARD, recorded=done), spins(3))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.DEADLOCK, [2])
    assert len(lab.acts()) == 1
    assert "Ranks 0-1, 3 wait in all_reduce of float[1153], number 38 in group default_pg." in lab.told()[-1].evidence


def test_a_rank_whose_device_has_not_begun_keeps_the_others_waiting(lab: Lab) -> None:
    look(lab, spins(0), spins(1, has_started=False), spins(2), spins(3))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.BUSY, [1])
    assert lab.acts() == [], "its device may compute"


def test_all_in_the_same_collective_of_their_devices_is_the_network(lab: Lab) -> None:
    look(lab, *(spins(rank, AT_ITEM if rank else IN_SYNCHRONIZE) for rank in range(4)))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.NETWORK, [])


def test_the_rank_in_another_collective_is_the_odd_one(lab: Lab) -> None:
    look(lab, spins(0), spins(1), spins(2), spins(3, number=39))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.SKIPPED_COLLECTIVE, [3])
    assert len(lab.acts()) == 1


def test_what_computes_on_the_host_is_no_wait(lab: Lab) -> None:
    look(lab, dump(0), dump(1), dump(2), spins(3, backend="gloo"))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.BUSY, [3])
