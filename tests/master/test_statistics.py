"""From observations to runs: what counts, what is told, and what it costs. Virtual time, the real job."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import pytest

from dlrover.master.statistics import (
    MAX_BYTES,
    PERIOD,
    RunStatistics,
    configuration_of,
    fitted,
    has_moved,
    quartiles,
    slope,
)
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId
from dlrover.protocol.messages.scaling import MemoryPoint, NodeUse, RunMeasured, ScaleMode, SetScaling, TypeUse
from dlrover.protocol.messages.watch import (
    DeviceSample,
    Phase,
    ProgressReport,
    ResourceReport,
    StepShape,
    WorkerProgress,
)
from dlrover.protocol.units import MIB
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import failure, micros

BEAT = 5.0
UNKNOWN = StepShape()


class Lab:
    """A job of one or more nodes whose first worker takes steps of a given length, told with each heartbeat."""

    def __init__(self, count: int = 2, **spec: object) -> None:
        self.scene = FleetScene.of(count, 1, **spec)  # type: ignore[arg-type]
        self.scene.train(*range(count))
        self.runs = RunStatistics()
        self.runs.began(self.scene.job.state)
        self.told: list[RunMeasured] = []
        self.seconds = 0.0
        self.begin_life()

    def begin_life(self) -> None:
        """Workers begin anew: their sums too."""
        self.life_began = self.seconds
        self.num_steps = 0
        self.spent = 0.0
        self.step = getattr(self, "step", 0)
        self.pid = getattr(self, "pid", 100) + 1

    def look(self) -> None:
        found = self.runs.measure(self.scene.job.state, micros(self.seconds))
        if found is not None:
            self.told.append(found)
            self.scene.do(found)

    def train(
        self,
        seconds: float,
        step_time: float = 0.1,
        *,
        shape: StepShape = UNKNOWN,
        is_stalled: bool = False,
        slow: str = "",
    ) -> None:
        """Heartbeats of all nodes for so long. The slow one computes in each step for twice as long as the others."""
        state = self.scene.job.state
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds += BEAT
            self.scene.at(self.seconds)
            while self.spent + step_time <= self.seconds - self.life_began:
                self.spent += step_time
                self.num_steps += 1
                self.step += 1
            worker = WorkerProgress(
                local_rank=0,
                global_rank=0,
                pid=self.pid,
                step=self.step,
                num_steps=self.num_steps,
                num_plain_steps=self.num_steps,
                plain_seconds=self.spent / 2,
                num_timed_steps=self.num_steps,
                timed_seconds=self.spent,
                seconds={Phase.DATA: self.spent / 4, Phase.FORWARD: 3 * self.spent / 4},
                shape=shape,
                is_stalled=is_stalled,
            )
            for name, agent in self.scene.agents.items():
                if agent.node in state.nodes.live:
                    own = msgspec.structs.replace(worker, plain_seconds=self.spent) if name == slow else worker
                    report = ProgressReport(
                        node=agent.node,
                        incarnation=agent.incarnation,
                        round=state.rendezvous.round,
                        workers=(own,),
                    )
                    self.runs.heard_progress(report, state, micros(self.seconds))
            self.look()

    def use(self, name: str, *, cpu: float, mib: float, **details: object) -> None:
        agent = self.scene.agents[name]
        report = ResourceReport(
            node=agent.node,
            incarnation=agent.incarnation,
            cpu=cpu,
            memory_bytes=round(mib * MIB),
            **details,  # type: ignore[arg-type]
        )
        self.runs.heard_resources(report, self.scene.job.state, micros(self.seconds))


class TestWhatIsTold:
    def test_a_run_is_told_after_a_minute_and_then_only_if_it_moved(self) -> None:
        lab = Lab()
        lab.train(60)
        assert lab.told == [], "a minute of counted steps is not over"
        lab.train(20)
        [first] = lab.told
        assert first.step_time == pytest.approx(0.1)
        assert first.configuration.count(NodeType.WORKER) == 2
        assert first.seconds >= PERIOD
        assert not first.is_over
        lab.train(600)
        assert lab.told == [first], "nothing moved"
        lab.train(900, step_time=0.15)
        assert lab.told[-1].step_time == pytest.approx(0.15)
        assert {each.number for each in lab.told} == {1}, "it is still the same run"

    def test_the_start_of_a_worker_does_not_count(self) -> None:
        lab = Lab()
        lab.train(10, step_time=2.0)
        lab.train(120, step_time=0.2)
        assert lab.told[-1].step_time == pytest.approx(0.2)
        assert lab.told[-1].step_time_high == pytest.approx(0.2)

    def test_the_end_of_a_run_is_told_and_the_next_has_another_number(self) -> None:
        lab = Lab(3)
        lab.train(45)
        lab.scene.scale(1, 2)
        lab.scene.obey("n0", "n1", "n2")
        lab.begin_life()
        lab.train(100, step_time=0.3)
        assert [(each.number, each.configuration.count(NodeType.WORKER), each.is_over) for each in lab.told] == [
            (1, 3, True),
            (2, 2, False),
        ]
        assert [each.step_time for each in lab.told] == [pytest.approx(0.1), pytest.approx(0.3)]

    def test_a_run_that_was_too_short_is_not_told(self) -> None:
        lab = Lab(3)
        lab.train(25)
        lab.scene.scale(1, 2)
        lab.scene.obey("n0", "n1", "n2")
        lab.begin_life()
        lab.train(20)
        assert lab.told == []

    def test_workers_that_start_again_go_on_with_the_run(self) -> None:
        lab = Lab()
        lab.train(80)
        lab.scene.fail("n0", failure(at=80))
        lab.look()
        lab.seconds += 30
        lab.scene.at(lab.seconds).rejoin("n0", "n1")
        lab.begin_life()
        lab.train(600)
        assert {each.number for each in lab.told} == {1}
        assert all(each.step_time == pytest.approx(0.1) for each in lab.told), "the pause is not in it"

    def test_a_stall_is_no_step_time(self) -> None:
        lab = Lab()
        lab.train(40)
        lab.train(5, is_stalled=True)
        lab.train(120)
        assert lab.told[-1].step_time == pytest.approx(0.1)
        assert not lab.told[-1].is_disturbed

    def test_a_run_that_stalls_most_of_the_time_is_no_evidence(self) -> None:
        lab = Lab()
        for _ in range(20):
            lab.train(10)
            lab.train(10, is_stalled=True)
        assert lab.told[-1].is_disturbed

    def test_a_new_master_begins_the_next_run(self) -> None:
        lab = Lab()
        lab.train(80)
        lab.runs = RunStatistics()
        lab.runs.began(lab.scene.job.state)
        lab.train(100)
        assert [each.number for each in lab.told] == [1, 2]

    def test_nothing_is_measured_without_a_platform_and_after_the_end(self) -> None:
        lab = Lab()
        lab.scene.stop()
        lab.train(200)
        assert lab.told == []

    def test_long_steps_are_measured_from_end_to_end(self) -> None:
        """Heartbeats and steps are not in step: no part of a step may count as one."""
        lab = Lab()
        lab.train(400, step_time=7.3)
        assert lab.told[-1].step_time == pytest.approx(7.3)


class TestRecords:
    def test_records_come_from_the_batch_of_each_worker(self) -> None:
        lab = Lab()
        lab.train(100, shape=StepShape(micro_batch=8, accumulation=2, loader_workers=3))
        assert lab.told[-1].records_per_second == pytest.approx(2 * 8 * 2 / 0.1)
        assert lab.told[-1].configuration.micro_batch == 8
        assert lab.told[-1].loader_workers == 3
        assert lab.told[-1].data_wait == pytest.approx(0.25)

    def test_a_fixed_total_batch_counts_as_it_is(self) -> None:
        lab = Lab()
        lab.train(100, shape=StepShape(micro_batch=8, accumulation=4, total_batch=64))
        assert lab.told[-1].records_per_second == pytest.approx(64 / 0.1)
        assert lab.told[-1].configuration.total_batch == 64

    def test_a_job_that_tells_no_batch_has_no_records(self) -> None:
        lab = Lab()
        lab.train(100)
        assert lab.told[-1].records_per_second == 0


class TestResources:
    def test_a_type_is_told_by_mean_percentile_and_maximum(self) -> None:
        lab = Lab(resource=Resource(cpu=4, memory_mb=2048))
        lab.train(40)
        for cpu in (1.0, 2.0):
            lab.use("n0", cpu=cpu, mib=512)
            lab.use("n1", cpu=cpu + 1, mib=700)
        lab.train(60)
        [use] = lab.told[-1].types
        assert (use.cpu, use.cpu_max, use.cpu_most, use.memory_mb) == (2.0, 2.5, 3.0, 700)
        [group] = lab.told[-1].configuration.groups
        assert (group.cpu, group.memory_mb) == (4, 2048)

    def test_a_node_for_which_the_others_wait_is_named_with_its_use_of_three_minutes(self) -> None:
        lab = Lab(3)
        lab.train(30)
        for cpu in range(12):
            lab.use("n1", cpu=float(cpu), mib=512)
            lab.train(20, slow="n1")
        [named] = lab.told[-1].nodes
        assert (named.rank, named.seconds) == (1, 180.0), "readings come at any moment, the window is full all the same"
        assert named.wait_per_step == pytest.approx(0.05, rel=0.1)
        assert named.cpu_max == 11.0 >= named.cpu > 5.5, "the first minute does not count any more"

    def test_growing_memory_is_told_with_its_slope_and_points(self) -> None:
        lab = Lab()
        for number in range(60):
            lab.train(5)
            lab.use("n0", cpu=1, mib=1000 + 10 * number)
        points = [point for each in lab.told for point in each.types[0].memory]
        assert len(points) >= 8
        assert all(before.at < after.at for before, after in pairwise(points)), "each point is told once"
        assert lab.told[-1].types[0].memory_slope == pytest.approx(10 / 50, rel=0.05)

    def test_devices_are_told(self) -> None:
        lab = Lab()
        lab.train(40)
        devices = tuple(
            DeviceSample(index=index, used_memory_bytes=used * MIB, total_memory_bytes=24_000 * MIB, utilization=use)
            for index, used, use in ((0, 4000, 50.0), (1, 6000, 100.0))
        )
        lab.use("n0", cpu=1, mib=10, devices=devices)
        lab.train(60)
        [use] = lab.told[-1].types
        assert (use.device_memory_mb, use.device_total_mb, use.device_use) == (6000, 24_000, 75)

    def test_no_run_is_longer_than_two_kilobytes(self) -> None:
        node = NodeUse(
            platform_node=PlatformId(2**40), rank=NodeRank(2**30), cpu=1 / 3, memory_mb=1e5 / 3, seconds=180.0
        )
        points = tuple(MemoryPoint(Micros(2**60 + each), 2**50, 1e5 / 3) for each in range(16))
        types = tuple(TypeUse(node_type=each, cpu=1 / 3, memory=points) for each in NodeType)
        lab = Lab()
        lab.train(100)
        whole = msgspec.structs.replace(lab.told[-1], nodes=(node,) * 16, types=types)
        assert len(msgspec.msgpack.encode(whole)) > MAX_BYTES
        small = fitted(whole)
        assert len(msgspec.msgpack.encode(small)) <= MAX_BYTES
        assert len(small.types) == 4, "what all types use is what matters most"
        assert all(use.memory[-1] == points[-1] for use in small.types), "the newest point stays"


def test_quartiles_count_steps_and_not_reports() -> None:
    assert quartiles([(1.0, 98), (5.0, 1), (9.0, 1)]) == (1.0, 1.0, 1.0)
    assert quartiles([(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]) == (1.0, 2.0, 3.0)


def test_one_outlier_does_not_bend_the_slope() -> None:
    points = [MemoryPoint(Micros(each), each, 2.0 * each + (500 if each == 5 else 0)) for each in range(12)]
    assert slope(points) == pytest.approx(2.0, rel=0.2)


def test_servers_are_told_until_they_were_watched_for_three_minutes() -> None:
    lab = Lab()
    lab.train(100)
    run = lab.told[-1]
    watched = msgspec.structs.replace(run, nodes=(NodeUse(node_type=NodeType.PS, seconds=60, cpu=3.0),))
    later = msgspec.structs.replace(run, nodes=(NodeUse(node_type=NodeType.PS, seconds=120, cpu=3.0),))
    assert has_moved(watched, later)
    assert not has_moved(later, later)


def test_a_thousand_nodes_cost_little_and_write_at_most_two_records_a_minute() -> None:
    """
    A minute of 1,000 nodes: a progress report of each every five seconds, a resource report every thirty, and what the job decides when it hears of
    a run. Promised is 0.1 s on a quiet machine; a busy one may take ten times that.
    """
    # Checked after each of the thousands of commands that lead here, they would be most of what this test does.
    lab = Lab(1000, is_checked=False)
    lab.scene.do(SetScaling(mode=ScaleMode.ON))
    lab.train(70)
    num_before, state = len(lab.told), lab.scene.job.state
    reports = []
    for agent in lab.scene.agents.values():
        worker = WorkerProgress(
            local_rank=0,
            global_rank=0,
            pid=1,
            step=5,
            num_steps=5,
            num_plain_steps=5,
            num_timed_steps=5,
            timed_seconds=0.5,
        )
        reports.append(
            ProgressReport(
                node=agent.node, incarnation=agent.incarnation, round=state.rendezvous.round, workers=(worker,)
            )
        )
    uses = [ResourceReport(node=each.node, incarnation=each.incarnation, cpu=1.0, memory_bytes=MIB) for each in reports]
    began_at = time.process_time()
    for number in range(12):
        now = micros(lab.seconds + 5 * number)
        for report in reports:
            lab.runs.heard_progress(report, state, now)
        if number % 6 == 0:
            for use in uses:
                lab.runs.heard_resources(use, state, now)
        for _ in range(20):  # turns of the loop
            found = lab.runs.measure(state, now)
            if found is not None:
                lab.told.append(found)
                lab.scene.do(found)
    spent = time.process_time() - began_at
    print(f"\n1,000 nodes: {spent:.3f} CPU seconds in a minute")
    assert state.scaling.decisions, "it has decided, and there was nothing to do"
    assert len(state.rendezvous.world.members) == 1000 if state.rendezvous.world else False
    assert len(lab.told) - num_before <= 2
    assert all(len(msgspec.msgpack.encode(each)) <= MAX_BYTES for each in lab.told)
    assert spent < 1.0


def test_the_configuration_is_that_of_the_world_and_not_of_the_plan() -> None:
    scene = FleetScene.of(3, 1)
    scene.train(0, 1)
    scene.tick(600)
    found = configuration_of(scene.job.state, StepShape())
    assert found is not None
    assert found.count(NodeType.WORKER) == 2
