"""Workers that run out of memory, of the machine or of a device; micro-batches that grow into the device."""

from __future__ import annotations

import random

import pytest
from msgspec import UNSET, UnsetType

from dlrover.core.scaling import memory, tuning
from dlrover.protocol.messages.fleet import (
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
    Resource,
)
from dlrover.protocol.messages.identity import Micros, Round
from dlrover.protocol.messages.job import ExitReason, FailureKind, ReportFailure, WorkerFailure
from dlrover.protocol.messages.scaling import (
    AskTuning,
    Configuration,
    GroupSize,
    MemoryPoint,
    RunMeasured,
    ScaleMode,
    ScaleTerms,
    TuneOffered,
    Tuner,
    TypeUse,
)
from dlrover.protocol.messages.watch import StepShape
from tests.core.scaling.driver import Driver, family

SIZE = Resource(cpu=4.0, memory_mb=4096)
LAW = family((1, 0, 0, 0))


def world(**more: object) -> Driver:
    return Driver(LAW, 2, 4, start=2, resource=SIZE, **more)  # type: ignore[arg-type]


def run_out(driver: Driver) -> None:
    """The platform says that a worker's node was killed for its memory."""
    fleet = driver.job.state.fleet
    assert fleet is not None
    node = fleet.nodes[next(iter(fleet.workers.running))]
    shown = PlatformNode(
        id=node.id, node_type=NodeType.WORKER, rank=node.rank, phase=NodePhase.FAILED, exit_reason=NodeExit.OOM
    )
    driver.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=shown))


def sizes(driver: Driver) -> list[int]:
    fleet = driver.job.state.fleet
    assert fleet is not None
    return [node.resource.memory_mb for node in fleet.live_nodes(NodeType.WORKER)]


def failed(
    driver: Driver,
    kind: FailureKind,
    *,
    shape: StepShape | UnsetType = UNSET,
    round_: int = 0,
    agent: int = 0,
    **more: object,
) -> None:
    id_, incarnation = list(driver.agents.items())[agent]
    failure = WorkerFailure(global_rank=0, local_rank=0, pid=7, kind=kind, exited_at=driver.now, **more)  # type: ignore[arg-type]
    report = ReportFailure(
        node=id_,
        incarnation=incarnation,
        round=Round(round_ or driver.job.state.rendezvous.round),
        failures=(failure,),
        lived=100.0,
        shape=shape,
    )
    driver.do(report)


@pytest.mark.parametrize("is_told_by_platform", [True, False])
def test_all_workers_come_back_with_more_memory_once(is_told_by_platform: bool) -> None:
    driver = world()
    driver.wait(100)
    if is_told_by_platform:
        run_out(driver)
    else:
        failed(driver, FailureKind.OUT_OF_MEMORY)
    assert sizes(driver) == [8192, 8192]
    assert driver.nodes == 2
    fleet = driver.job.state.fleet
    assert fleet is not None
    assert not fleet.workers.spent, "nobody's budget pays"
    use = TypeUse(node_type=NodeType.WORKER, memory_mb=8000.0)
    driver.minute(types=(use,))
    run_out(driver)
    end = driver.job.end
    assert end is not None
    assert end.reason is ExitReason.WORKER_OOM
    assert "it had 8192 MiB, and 8000 MiB were the most" in end.message


def test_the_limits_of_the_job_hold_for_memory() -> None:
    driver = world(fleet_count=2, limits=Resource(memory_mb=10_000))
    driver.minute()
    run_out(driver)
    assert sizes(driver) == [5000, 5000]


def test_without_scaling_a_worker_is_tried_again_as_it_was() -> None:
    driver = world(terms=ScaleTerms(mode=ScaleMode.OFF))
    run_out(driver)
    assert set(sizes(driver)) == {4096}


def test_a_forecast_needs_points_that_rise() -> None:
    points = [MemoryPoint(Micros(index * 60_000_000), index * 60, 1000 + 10.0 * index) for index in range(10)]
    found = memory.forecast(points, 1.0, None)
    assert found is not None
    assert found.then_mb == pytest.approx(1090 + 300)
    assert memory.forecast(points, 1.0, 60.0) == memory.MemoryForecast(1090, 1100, 60.0)
    assert memory.forecast(points[:7], 1.0, None) is None
    flat = [MemoryPoint(point.at, point.step, 1000.0 + point.step % 120) for point in points]
    assert memory.forecast(flat, 1.0, None) is None


def test_a_worker_whose_memory_will_not_last_is_named() -> None:
    driver = world()
    points = [MemoryPoint(Micros(index * 60_000_000), index * 60, 2000 + 100.0 * index) for index in range(10)]
    driver.minute(types=(TypeUse(node_type=NodeType.WORKER, memory=tuple(points)),), last_step=600)
    (warning,) = driver.status.warnings
    assert "will use 5900 MiB in 30 min" in warning


class Device:
    """Memory and time of a pass follow lines."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.total = 80_000.0
        self.fixed = self.total * chance.uniform(0.05, 0.5)
        self.each = chance.uniform(20.0, 60.0)
        self.overhead, self.time = 0.5, chance.uniform(0.00001, 0.0001)

    def memory(self, batch: int) -> float:
        return self.fixed + self.each * batch

    def pass_time(self, batch: int) -> float:
        return self.overhead + self.time * batch


def test_the_micro_batch_reaches_the_memory_of_the_device_and_never_exceeds_it() -> None:
    records = 2_162_160
    for seed in range(100):
        device, batch = Device(seed), 24
        driver = Driver(LAW, 1, 1, terms=ScaleTerms(mode=ScaleMode.OFF, tuner=Tuner.MEMORY))
        for number in range(1, 40):
            offered = driver.job.ask(AskTuning())
            assert isinstance(offered, TuneOffered)
            batch = offered.micro_batch or batch
            assert records % batch == 0
            assert device.memory(batch) <= 0.9 * device.total, f"seed {seed}: {batch} is too much"
            driver.wait(75)
            accumulation = records // batch
            use = TypeUse(
                node_type=NodeType.WORKER, device_memory_mb=device.memory(batch), device_total_mb=device.total
            )
            driver.do(
                RunMeasured(
                    number=number,
                    configuration=Configuration(
                        groups=(GroupSize(NodeType.WORKER, 1),), micro_batch=batch, accumulation=accumulation
                    ),
                    seconds=60,
                    steps=20,
                    step_time=accumulation * device.pass_time(batch),
                    types=(use,),
                )
            )
        assert device.memory(batch) >= 0.8 * device.total, f"seed {seed}: {batch} uses {device.memory(batch):.0f}"


def test_a_device_without_memory_halves_the_micro_batch_for_good() -> None:
    driver = Driver(LAW, 1, 1, terms=ScaleTerms(mode=ScaleMode.OFF, tuner=Tuner.MEMORY))
    driver.wait(75)
    configuration = Configuration(groups=(GroupSize(NodeType.WORKER, 1),), micro_batch=16, accumulation=4)
    driver.do(RunMeasured(number=1, configuration=configuration, seconds=60, steps=60, step_time=1))
    failed(driver, FailureKind.MEMORY_ERROR, exceptions=("torch.OutOfMemoryError", "RuntimeError"))
    offered = driver.job.ask(AskTuning())
    assert isinstance(offered, TuneOffered)
    assert (offered.micro_batch, offered.accumulation, offered.last_batch, offered.version) == (8, 8, 16, 1)
    assert driver.job.state.scaling.refused_batch == 16
    assert driver.nodes == 1, "and training goes on"


FULL_DEVICE = ("torch.OutOfMemoryError", "RuntimeError")


def tuned(**more: object) -> Driver:
    return Driver(LAW, terms=ScaleTerms(mode=ScaleMode.OFF, tuner=Tuner.MEMORY), **more)  # type: ignore[arg-type]


def test_a_worker_that_fails_before_anything_was_measured_tells_its_batch() -> None:
    """The usual case: the first step does not fit. Each further failure halves what the worker really had."""
    driver = tuned(min_nodes=1, max_nodes=1)
    for batch, accumulation in ((32, 1), (16, 2)):
        shape = StepShape(micro_batch=batch, accumulation=accumulation, total_batch=32)
        failed(driver, FailureKind.MEMORY_ERROR, shape=shape, exceptions=FULL_DEVICE)
        offered = driver.job.ask(AskTuning())
        assert isinstance(offered, TuneOffered)
        assert (offered.micro_batch, offered.accumulation) == (batch // 2, 2 * accumulation)
        driver.wait(75)
    assert driver.job.state.scaling.refused_batch == 16
    assert driver.nodes == 1, "and training goes on"


def test_the_same_full_device_told_by_two_nodes_halves_once() -> None:
    driver = tuned(min_nodes=2, max_nodes=2)
    shape, round_ = StepShape(micro_batch=16, accumulation=2, total_batch=64), driver.job.state.rendezvous.round
    for agent in (0, 1):
        failed(driver, FailureKind.MEMORY_ERROR, shape=shape, round_=round_, agent=agent, exceptions=FULL_DEVICE)
    assert (driver.status.tuning.version, driver.status.tuning.micro_batch) == (1, 8)


def test_a_step_that_the_script_alone_decides_stays_as_it_is() -> None:
    driver = tuned(min_nodes=1, max_nodes=1)
    failed(driver, FailureKind.MEMORY_ERROR, shape=StepShape(micro_batch=16), exceptions=FULL_DEVICE)
    assert driver.status.tuning == TuneOffered()
    assert any("the micro-batch stays" in said for said in driver.verdicts)


def test_waiting_for_data_asks_for_one_more_loader() -> None:
    driver = Driver(LAW, 1, 1, terms=ScaleTerms(mode=ScaleMode.OFF, tuner=Tuner.MEMORY))
    driver.minute(data_wait=0.2, loader_workers=2)
    assert driver.status.tuning.loader_workers == 3
    driver.minute(data_wait=0.2, loader_workers=2)
    assert driver.status.tuning.loader_workers == 3, "the epoch has not ended yet"


def test_a_divisor_keeps_the_records_of_a_step() -> None:
    assert tuning.largest_divisor(48, 31) == 24
    assert tuning.largest_divisor(48, 0) == 1
