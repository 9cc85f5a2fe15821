"""
Many seeds: which plan a seed means, running them on all cores, and what a failing one boils down to.

Most seeds are small jobs for depth, one in five is a sprint of some minutes, one in twenty is larger, one in five hundred
is a cluster. One seed in fifty is checked in full after each command.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

from msgspec import Struct
from msgspec.structs import replace

from dlrover.host.lifeline import follow_parent
from dlrover.simulator.faults.kinds import (
    CHECK_MIX,
    CLOUD_MIX,
    FLEET_MIX,
    MASTER_MIX,
    MASTER_PAUSES,
    PAUSES,
    PEOPLE_MIX,
    POD_MASTER_MIX,
    POD_MIX,
    STANDARD_MIX,
    Fault,
    draw_faults,
)
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import (
    Shape,
    add_agents,
    add_guards,
    add_pods,
    add_rooms,
    add_scaling,
    add_server_scaling,
    add_syncs,
    add_types,
    draw_large_shape,
    draw_shape,
    draw_task_shape,
)
from dlrover.simulator.simulation import Simulation
from dlrover.simulator.truth.invariants import Violation

THOROUGH_EVERY = 50
LARGER_EVERY = 20
CLUSTER_EVERY = 500
SPRINT_EVERY = 5
"""Jobs of some minutes under a hail of faults: their begin and their end are where most can go wrong."""
FULL_LIST = 8.0
"""Nodes: a larger job gets as many faults as one of this size, or it would never train."""
MAX_SHRINK_RUNS = 120


class Failure(Struct, frozen=True, kw_only=True):
    """A seed that broke something."""

    seed: int
    invariant: str
    sentence: str
    num_faults: int


Outcome = Result | Failure


def draw_plan(seed: int, *, is_standard: bool = False) -> SeedPlan:
    """What this seed means. `is_standard`: small jobs under the standard mix only, for measuring speed."""
    chance = random.Random(f"{seed}/plan")
    hours, intensity = 1.0, 1.0
    if is_standard:
        return _plan(seed, chance, draw_shape(chance, hours), hours, intensity)
    if seed % CLUSTER_EVERY == CLUSTER_EVERY - 1:
        hours, intensity = 0.25, 6.0
        shape = draw_large_shape(chance, hours, size=chance.choice([200, 500, 1000]))
    elif seed % LARGER_EVERY == LARGER_EVERY - 1:
        hours = 0.5
        shape = draw_large_shape(chance, hours, size=chance.randint(10, 40))
        intensity = chance.choice([1.0, 4.0])
    elif seed % SPRINT_EVERY == SPRINT_EVERY - 1:
        hours = chance.choice([0.02, 0.05, 0.1])
        shape = replace(draw_shape(chance, hours), num_steps=chance.randint(5, round(hours * 3600)))
        intensity = chance.choice([10.0, 30.0, 80.0])
    else:
        shape = draw_shape(chance, hours)
        intensity = chance.choice([1.0, 3.0, 8.0, 16.0])
    shape = add_rooms(random.Random(f"{seed}/rooms"), shape)
    shape = add_types(random.Random(f"{seed}/types"), shape)
    shape = add_scaling(random.Random(f"{seed}/scaling"), shape)
    shape = add_pods(random.Random(f"{seed}/pods"), shape)
    shape = add_syncs(random.Random(f"{seed}/syncs"), shape)
    shape = add_agents(random.Random(f"{seed}/agents"), shape)
    shape = add_guards(random.Random(f"{seed}/guards"), shape)
    plan = _plan(seed, chance, shape, hours, intensity)
    return replace(plan, is_thorough=seed % THOROUGH_EVERY == 0, digest_every=16 if shape.num_nodes < 100 else 64)


def _plan(seed: int, chance: random.Random, shape: Shape, hours: float, intensity: float) -> SeedPlan:
    num_nodes = shape.num_nodes
    spread = intensity * min(1.0, FULL_LIST / num_nodes)
    mix, master_mix = STANDARD_MIX, MASTER_MIX
    if shape.fleet is not None:
        mix, master_mix = mix | FLEET_MIX, master_mix | CLOUD_MIX
    if shape.check is not None:
        mix = mix | CHECK_MIX
    faults = draw_faults(chance, hours=hours, num_nodes=num_nodes, intensity=spread, mix=mix, master_mix=master_mix)
    if shape.fleet is not None:
        people = random.Random(f"{seed}/people")
        wishes = draw_faults(people, hours=hours, num_nodes=num_nodes, intensity=spread, mix={}, master_mix=PEOPLE_MIX)
        faults = tuple(sorted((*faults, *wishes), key=lambda fault: fault.at))
    if shape.has_pods:
        chance = random.Random(f"{seed}/pod-faults")
        more = draw_faults(
            chance, hours=hours, num_nodes=num_nodes, intensity=spread, mix=POD_MIX, master_mix=POD_MASTER_MIX
        )
        faults = tuple(sorted((*faults, *more), key=lambda fault: fault.at))
    return SeedPlan(seed=seed, shape=shape, faults=faults, hours=hours)


TASK_MASTER_MIX: dict[str, float] = {kind: rate for kind, rate in MASTER_MIX.items() if kind != "journal-lost"} | {
    "scaling": 4.0,
    "master-crash": 3.0,
}
"""Per hour of a parameter-server job: what it is scaled, and its masters die. Without its journal no master takes such a job up."""
TASK_MIX: dict[str, float] = {"worker-crash": 1.0, "exchange": 0.5}


def draw_task_plan(seed: int) -> SeedPlan:
    """A parameter-server job whose servers, chief and workers are lost, scaled and exchanged."""
    chance = random.Random(f"{seed}/tasks/plan")
    is_sprint = seed % SPRINT_EVERY == SPRINT_EVERY - 1
    hours = chance.choice([0.05, 0.1]) if is_sprint else 1.0
    intensity = chance.choice([10.0, 30.0]) if is_sprint else chance.choice([0.5, 1.0, 3.0, 8.0])
    shape = add_pods(random.Random(f"{seed}/tasks/pods"), draw_task_shape(chance, hours))
    shape = add_server_scaling(random.Random(f"{seed}/tasks/scaling"), shape)
    assert shape.fleet is not None, "servers are asked for"
    num_nodes = sum(replicas.count for replicas in shape.fleet.replicas.values())
    mix = STANDARD_MIX | FLEET_MIX | TASK_MIX
    faults = draw_faults(
        chance,
        hours=hours,
        num_nodes=num_nodes,
        intensity=intensity * min(1.0, FULL_LIST / num_nodes),
        mix=mix,
        master_mix=TASK_MASTER_MIX | CLOUD_MIX | PEOPLE_MIX,
    )
    plan = SeedPlan(seed=seed, shape=shape, faults=faults, hours=hours)
    return replace(plan, is_thorough=seed % THOROUGH_EVERY == 0)


def draw_pauses(seed: int, *, num_nodes: int, days: float) -> SeedPlan:
    """Healthy nodes that stall, on slow links, with jumping clocks: nothing of it is a reason to do anything."""
    chance = random.Random(f"{seed}/pauses")
    hours = 24 * days
    shape = Shape(min_nodes=num_nodes, max_nodes=num_nodes, num_steps=round(hours * 36_000))
    faults = draw_faults(chance, hours=hours, num_nodes=num_nodes, mix=PAUSES, master_mix=MASTER_PAUSES)
    return SeedPlan(seed=seed, shape=shape, faults=faults, hours=hours, is_cut_off=True, digest_every=1000)


def run_plan(plan: SeedPlan, *, on_note: Callable[[int, str], None] | None = None) -> Outcome:
    try:
        return Simulation(plan, on_note=on_note).run()
    except Violation as violation:
        return Failure(
            seed=plan.seed,
            invariant=violation.invariant,
            sentence=violation.sentence,
            num_faults=len(plan.faults),
        )
    except Exception as error:
        error.add_note(f"The simulator itself failed in seed {plan.seed}.")
        raise


def run_seed(seed: int) -> Outcome:
    return run_plan(draw_plan(seed))


def run_task_seed(seed: int) -> Outcome:
    return run_plan(draw_task_plan(seed))


def run_standard_seed(seed: int) -> Outcome:
    return run_plan(draw_plan(seed, is_standard=True))


class Totals:
    """What a campaign amounts to."""

    def __init__(self) -> None:
        self.num_seeds = 0
        self.num_faults = 0
        self.num_events = 0
        self.num_commands = 0
        self.num_masters = 0
        self.num_rounds = 0
        self.num_alarms = 0
        self.num_records = 0
        self.num_read_out = 0
        self.num_breaths = 0
        self.num_breaths_saved = 0
        self.node_hours = 0.0
        self.slowest_recovery = 0.0
        self.by_kind: dict[str, int] = {}
        self.by_reason: dict[str, int] = {}
        self.failures: list[Failure] = []
        self.is_interrupted = False
        self._began_at = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.num_seeds += 1
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.num_faults += outcome.num_faults
        self.num_events += outcome.num_events
        self.num_commands += outcome.num_commands
        self.num_masters += outcome.num_masters
        self.num_rounds += outcome.num_rounds
        self.num_alarms += outcome.num_alarms
        self.num_records += outcome.num_records
        self.num_read_out += outcome.is_read_out
        self.num_breaths += outcome.num_breaths
        self.num_breaths_saved += outcome.num_breaths_saved
        self.node_hours += outcome.node_hours
        self.slowest_recovery = max(self.slowest_recovery, outcome.recovery)
        self.by_reason[outcome.reason] = self.by_reason.get(outcome.reason, 0) + 1
        for kind, count in outcome.by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + count

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_at


def run_many(
    run: Callable[[int], Outcome], seeds: Iterator[int], *, jobs: int, is_enough: Callable[[Totals], bool]
) -> Iterator[Totals]:
    """Runs seeds until it is enough, and says after each how far it is. A few that were begun are lost at the end."""
    totals = Totals()
    if jobs == 1:
        for seed in seeds:
            totals.add(run(seed))
            yield totals
            if is_enough(totals):
                return
        return
    context = multiprocessing.get_context("fork")
    ours: list[Connection] = []
    processes = []
    for _ in range(jobs):
        end, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(run, theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        ours.append(end)
        processes.append(process)
        end.send(next(seeds))
        end.send(next(seeds))  # one ahead, so that nobody waits for us
    try:
        while not is_enough(totals):
            for ready in wait(ours):
                assert isinstance(ready, Connection), "only pipes are waited for"
                totals.add(ready.recv())
                ready.send(next(seeds))
                yield totals
    finally:
        for end, process in zip(ours, processes, strict=True):
            process.terminate()
            process.join()
            end.close()


def _serve(run: Callable[[int], Outcome], pipe: Connection, campaign: int) -> None:
    """A process of a campaign: seeds in, outcomes out, until the campaign is over, by whatever way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the one who asked; it ends us
    has_campaign = follow_parent(signal.SIGKILL, campaign)
    while has_campaign:
        pipe.send(run(pipe.recv()))


def shrink(plan: SeedPlan, invariant: str) -> tuple[SeedPlan, Failure]:
    """A plan with fewer faults that still breaks the same invariant, as far as some dozens of attempts lead."""
    failure = run_plan(plan)
    assert isinstance(failure, Failure), "only a failing plan can shrink"
    num_runs, size = 0, max(1, len(plan.faults) // 2)
    while num_runs < MAX_SHRINK_RUNS:
        at = 0
        while at < len(plan.faults) and num_runs < MAX_SHRINK_RUNS:
            fewer: tuple[Fault, ...] = plan.faults[:at] + plan.faults[at + size :]
            num_runs += 1
            outcome = run_plan(replace(plan, faults=fewer))
            if isinstance(outcome, Failure) and outcome.invariant == invariant:
                plan, failure = replace(plan, faults=fewer), outcome
            else:
                at += size
        if size == 1:
            break
        size = max(1, size // 2)
    return plan, failure
