"""What the benchmark reads out of the event files: only a step that nobody had completed before ends the clock."""

import json
from pathlib import Path

import pytest
from timeline import PHASES, Event, EventFolder, Recovery, first_step_at_ns, lives, num_steps_since, recovery

MS = 1_000_000


def life(rank: int, pid: int, born: int, *, restored: int, steps: dict[int, int]) -> list[Event]:
    """A process that is born at `born` ms, restores `restored` and completes each step at its given ms."""
    names = ("process", "script", "imported", "initialised", "built")
    events = [Event(name, (born + offset) * MS, rank, pid) for offset, name in enumerate(names)]
    events.append(Event("restored", (born + 5) * MS, rank, pid, restored))
    return events + [Event("step", at * MS, rank, pid, step) for step, at in steps.items()]


BEFORE = [
    *life(0, 10, 0, restored=0, steps={1: 100, 2: 150, 3: 200}),
    *life(1, 11, 0, restored=0, steps={1: 101, 2: 151}),
]


def recovered(*later: Event) -> Recovery | None:
    return recovery(
        [*BEFORE, *later], killed_at_ns=190 * MS, survivors_gone_at_ns=220 * MS, old_pids={10, 11}, num_ranks=2
    )


def test_the_first_step_counts_when_the_last_rank_has_done_it() -> None:
    assert first_step_at_ns(BEFORE, 2) == 101 * MS
    assert first_step_at_ns([event for event in BEFORE if event.rank == 0], 2) is None


def test_redone_steps_do_not_end_the_clock() -> None:
    # The survivor completed step 3 after the kill, but the checkpoint holds step 2.
    redone = [*life(0, 20, 230, restored=2, steps={3: 300}), *life(1, 21, 230, restored=2, steps={3: 301})]
    assert recovered(*redone) is None


def test_a_new_step_of_only_one_rank_is_not_a_recovery() -> None:
    later = [*life(0, 20, 230, restored=3, steps={4: 300}), *life(1, 21, 230, restored=3, steps={})]
    assert recovered(*later) is None


def test_a_recovery_ends_with_the_slowest_rank_and_its_phases_add_up() -> None:
    found = recovery(
        [
            *BEFORE,
            *life(0, 20, 230, restored=2, steps={3: 300, 4: 350}),
            *life(1, 21, 240, restored=2, steps={3: 301, 4: 352}),
        ],
        killed_at_ns=190 * MS,
        survivors_gone_at_ns=220 * MS,
        old_pids={10, 11},
        num_ranks=2,
        detected_at_ns=202 * MS,
    )
    assert found is not None
    assert found.seconds == 0.162
    assert found.num_steps_lost == 1
    assert list(found.phases) == [phase for _, phase in PHASES]
    assert found.phases["detect"] == 0.012
    assert found.phases["stop"] == 0.018
    assert found.phases["rendezvous"] == 0.020
    assert found.phases["start"] == 0.001
    assert found.phases["to new step"] == 0.107
    assert round(sum(found.phases.values()), 9) == found.seconds


def test_a_birth_rounded_into_the_past_does_not_make_a_phase_negative() -> None:
    found = recovery(
        [*BEFORE, *life(0, 20, 215, restored=3, steps={4: 300}), *life(1, 21, 215, restored=3, steps={4: 300})],
        killed_at_ns=190 * MS,
        survivors_gone_at_ns=220 * MS,
        old_pids={10, 11},
        num_ranks=2,
    )
    assert found is not None
    assert min(found.phases.values()) >= 0
    assert round(sum(found.phases.values()), 9) == found.seconds == 0.110


def test_waking_a_worker_forked_ahead_is_spawning_not_an_interpreter_start() -> None:
    later = [*life(0, 20, 235, restored=3, steps={4: 300}), *life(1, 21, 235, restored=3, steps={4: 300})]
    ahead = [Event(e.name, 50 * MS, e.rank, e.pid) if e.name == "process" else e for e in later]
    found = recovery(
        [*BEFORE, *ahead], killed_at_ns=190 * MS, survivors_gone_at_ns=220 * MS, old_pids={10, 11}, num_ranks=2
    )
    assert found is not None
    assert found.phases["rendezvous"] == 0.016  # from the survivors' end at 220 to the first line at 236
    assert found.phases["start"] == 0


@pytest.mark.parametrize(
    ("met_at", "rendezvous", "start"),
    [(210, 0.0, 0.016), (226, 0.006, 0.010)],
    ids=["while survivors still stop", "afterwards"],
)
def test_a_launcher_that_tells_when_its_world_was_complete_ends_the_rendezvous(
    met_at: int, rendezvous: float, start: float
) -> None:
    later = [*life(0, 20, 235, restored=3, steps={4: 300}), *life(1, 21, 235, restored=3, steps={4: 300})]
    found = recovery(
        [*BEFORE, *later],
        killed_at_ns=190 * MS,
        survivors_gone_at_ns=220 * MS,
        old_pids={10, 11},
        num_ranks=2,
        met_at_ns=met_at * MS,
    )
    assert found is not None
    assert (found.phases["rendezvous"], found.phases["start"]) == (rendezvous, start)
    assert round(sum(found.phases.values()), 9) == found.seconds


def test_survivors_that_die_by_themselves_before_the_launcher_looks_leave_nothing_to_stop() -> None:
    found = recovery(
        [*BEFORE, *life(0, 20, 260, restored=3, steps={4: 300}), *life(1, 21, 260, restored=3, steps={4: 300})],
        killed_at_ns=190 * MS,
        survivors_gone_at_ns=220 * MS,
        old_pids={10, 11},
        num_ranks=2,
        detected_at_ns=250 * MS,
    )
    assert found is not None
    assert (found.phases["detect"], found.phases["stop"]) == (0.060, 0)


def test_without_the_launchers_word_detection_is_part_of_the_stop() -> None:
    found = recovered(*life(0, 20, 235, restored=3, steps={4: 300}), *life(1, 21, 235, restored=3, steps={4: 300}))
    assert found is not None
    assert "detect" not in found.phases
    assert found.phases["stop"] == 0.030


def test_a_job_has_lives_to_kill_once_every_rank_trains() -> None:
    assert lives(BEFORE, 2) == {0: 10, 1: 11}
    assert lives([*BEFORE, *life(1, 21, 230, restored=2, steps={})], 2) == {}
    assert num_steps_since(BEFORE, [10, 11]) == 2


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = json.dumps({"event": "step", "at_ns": 5, "rank": 0, "pid": 10, "restart": 0, "step": 1})
    file = tmp_path / "rank0.jsonl"
    file.write_text(line + "\n" + line[:7])
    folder = EventFolder(tmp_path)
    assert folder.refresh() == [Event("step", 5, 0, 10, 1)]
    file.write_text(line + "\n" + line + "\n")
    assert len(folder.refresh()) == 2
