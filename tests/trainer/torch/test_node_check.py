"""The task of a node check: real processes on the CPU, and every other device through a stand-in for torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover.agent.config import EntryKind
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch import run_network_check
from dlrover.trainer.torch.node_check import ascend_npu, cpu, mthreads_gpu, nvidia_gpu, registry, settings, task
from dlrover.trainer.torch.node_check.accelerator import CPU_WORKLOAD, CollectiveKind, Cpu, TorchDevice
from dlrover.trainer.torch.node_check.task import ExitCode
from tests.agent.lab import Ended, environment, run_worker

CPU_MODULE = "dlrover.trainer.torch.node_check.cpu"
PATIENCE = 60


Reserve = Callable[[], int]


@pytest.fixture
def reserve_port() -> Iterator[Reserve]:
    """A port that stays bound until the end of the test, so that no other process is given it; a store may listen there, for it reuses addresses."""
    with contextlib.ExitStack() as held:

        def reserve() -> int:
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            return int(holder.getsockname()[1])

        yield reserve


def variables(rank: int, world_size: int, port: int, directory: Path, **more: str) -> dict[str, str]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DLROVER_CHECK_DIR": str(directory),
        "OMP_NUM_THREADS": "1",
        "NETWORK_CHECK_TIMEOUT": "30",
    }
    return {**own, **more}


Group = Callable[..., Awaitable[list[Ended]]]


@pytest.fixture
def group(spawner: Spawner, tree: ProcessTree, tmp_path: Path, reserve_port: Reserve) -> Group:
    """Runs a whole group, each rank forked from the warm zygote as an agent would do it."""
    scratch = tmp_path / "streams"
    scratch.mkdir()
    (tmp_path / "results").mkdir()

    async def run_group(world_size: int = 2, module: str = CPU_MODULE, **more: str) -> list[Ended]:
        port = reserve_port()
        environs = [variables(rank, world_size, port, tmp_path / "results", **more) for rank in range(world_size)]
        return await asyncio.gather(
            *(
                run_worker(
                    spawner, tree, module, scratch=scratch, environ=environment(**environ), kind=EntryKind.MODULE
                )
                for environ in environs
            )
        )

    return run_group


def results(directory: Path) -> dict[str, dict[str, float]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((directory / "results").iterdir())}


async def test_two_ranks_pass_and_leave_their_times(group: Group, tmp_path: Path) -> None:
    ended = await group()
    assert [one.code for one in ended] == [0, 0], ended
    found = results(tmp_path)
    assert sorted(found) == ["0.json", "1.json"], "nothing half-written stays"
    for rank, result in enumerate(found.values()):
        assert result["local_rank"] == rank
        assert result["time"] == pytest.approx(result["compute_ms"] + result["communication_ms"], abs=0.01)
        assert 0 < result["compute_ms"] < 30_000
        assert result["bandwidth_gbps"] > 0
    assert "algorithm bandwidth" in ended[0].stdout
    assert "elapsed" in ended[0].stdout
    assert ended[1].stdout == ""


async def test_forked_from_a_warm_zygote_it_takes_a_moment(group: Group) -> None:
    """0.3 s on an idle machine of two cores; the imports alone of a cold start take ten times as long."""
    await group()
    began_at = time.perf_counter()
    ended = await group()
    took = time.perf_counter() - began_at
    assert [one.code for one in ended] == [0, 0], ended
    assert took < 20


@pytest.mark.parametrize("module", list(dict.fromkeys(registry.BUILT_IN.values())))
async def test_a_node_alone_is_a_group_too(group: Group, tmp_path: Path, module: str) -> None:
    """Every module falls back to the CPU where its device is missing."""
    (ended,) = await group(1, module)
    assert ended.code == 0, ended
    assert results(tmp_path)["0.json"]["bandwidth_gbps"] == 0


def test_the_oldest_name_works_as_a_program(tmp_path: Path, reserve_port: Reserve) -> None:
    (tmp_path / "results").mkdir()
    environ = {**os.environ, **variables(0, 1, reserve_port(), tmp_path / "results")}
    command = [sys.executable, "-m", "dlrover.trainer.torch.run_network_check"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert list(results(tmp_path)) == ["0.json"]


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("compute", [ExitCode.COMMUNICATION, ExitCode.COMPUTE]),
        ("", [ExitCode.OK, ExitCode.COMMUNICATION]),
    ],
)
async def test_an_injected_fault_shows_in_the_exit_codes(
    group: Group, tmp_path: Path, kind: str, codes: list[ExitCode]
) -> None:
    """The partner of a node whose computation failed sees a failed collective, and sees it at once."""
    ended = await group(MOCK_ERR_RANK="1", MOCK_ERR_KIND=kind)
    assert [one.code for one in ended] == codes, ended
    assert "MOCK_ERR_RANK: injected" in ended[1].stderr
    assert "1.json" not in results(tmp_path)


async def test_the_partner_of_a_node_that_hangs_gives_up_in_time(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, reserve_port: Reserve
) -> None:
    (tmp_path / "results").mkdir()
    port = reserve_port()
    more = {"MOCK_ERR_RANK": "1", "MOCK_ERR_KIND": "hang", "NETWORK_CHECK_TIMEOUT": "6"}

    def run(rank: int) -> Awaitable[Ended]:
        environ = environment(**variables(rank, 2, port, tmp_path / "results", **more))
        return run_worker(spawner, tree, CPU_MODULE, scratch=tmp_path, environ=environ, kind=EntryKind.MODULE)

    frozen = asyncio.ensure_future(run(1))
    partner = await run(0)
    assert partner.code == ExitCode.COMMUNICATION, partner
    assert not frozen.done()
    await tree.sweep()
    assert (await frozen).code < 0
    assert results(tmp_path) == {}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"MOCK_ERR_RANK": "0", "MOCK_ERR_KIND": "setup"}, "injected setup failure"),
        ({"MASTER_PORT": "none"}, "MASTER_PORT=none is not a number"),
        ({"RANK": "1"}, "a rank must be at least 0"),
        ({"WORLD_SIZE": "2", "NETWORK_CHECK_TIMEOUT": "1"}, "Node check failed (setup)"),
        ({"DLROVER_CHECK_DIR": "/no/such/directory"}, "No such file"),
    ],
)
async def test_a_task_that_cannot_begin_says_why(group: Group, more: dict[str, str], said: str) -> None:
    (ended,) = await group(1, **more)
    assert ended.code == ExitCode.SETUP
    assert said in ended.stderr


async def test_an_injected_delay_is_part_of_the_time(group: Group, tmp_path: Path) -> None:
    (ended,) = await group(1, MOCK_STRAGGLER_RANK="0", MOCK_STRAGGLER_SECONDS="0.3")
    assert ended.code == 0, ended
    assert results(tmp_path)["0.json"]["compute_ms"] >= 300


class TestSettings:
    def base(self, **more: str) -> dict[str, str]:
        return {**variables(0, 1, 1234, Path("d")), "NETWORK_CHECK_TIMEOUT": "", **more}

    @pytest.mark.parametrize(("word", "seconds"), [("", 180), ("0", 180), ("-5", 180), ("20", 20), ("0.5", 0.5)])
    def test_the_timeout(self, word: str, seconds: float) -> None:
        assert settings.read(self.base(NETWORK_CHECK_TIMEOUT=word)).timeout == seconds

    def test_a_result_is_named_after_the_real_position_on_the_node(self) -> None:
        read = settings.read(self.base(DLROVER_LOCAL_RANK="3"))
        assert (read.local_rank, read.slot) == (0, 3)

    @pytest.mark.parametrize(
        ("more", "is_meant"),
        [
            ({}, False),
            ({"MOCK_ERR_RANK": "0"}, True),
            ({"MOCK_ERR_RANK": "1"}, False),
            ({"MOCK_ERR_RANK": "1,0"}, True),
            ({"MOCK_ERR_RANK": "0", "MOCK_ERR_NODE_RANK": "2", "NODE_RANK": "2"}, True),
            ({"MOCK_ERR_RANK": "0", "MOCK_ERR_NODE_RANK": "1, 2", "NODE_RANK": "2"}, True),
            ({"MOCK_ERR_RANK": "0", "MOCK_ERR_NODE_RANK": "2", "NODE_RANK": "0"}, False),
            ({"MOCK_ERR_RANK": "0", "MOCK_ERR_NODE_RANK": "2"}, False),
        ],
    )
    def test_who_is_meant_by_a_fault(self, more: dict[str, str], is_meant: bool) -> None:
        assert (settings.read(self.base(**more)).faults.kind is not None) is is_meant

    def test_a_slow_node(self) -> None:
        more = {"MOCK_STRAGGLER_RANK": "0", "MOCK_STRAGGLER_NODE_RANK": "1"}
        assert settings.read(self.base(**more, NODE_RANK="1")).faults.delay == 5.0
        assert settings.read(self.base(**more, NODE_RANK="1", MOCK_STRAGGLER_SECONDS="0.2")).faults.delay == 0.2
        assert settings.read(self.base(**more, NODE_RANK="0")).faults.delay == 0.0

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"MOCK_ERR_RANK": "x"}, "MOCK_ERR_RANK=x"),
            ({"MOCK_ERR_RANK": "0", "MOCK_ERR_KIND": "odd"}, "MOCK_ERR_KIND=odd"),
            ({"MOCK_STRAGGLER_RANK": "0", "MOCK_STRAGGLER_SECONDS": "soon"}, "MOCK_STRAGGLER_SECONDS=soon"),
            ({"NETWORK_CHECK_TIMEOUT": "nan"}, "NETWORK_CHECK_TIMEOUT=nan"),
            ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ],
    )
    def test_bad_values_are_named(self, more: dict[str, str], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            settings.read(self.base(**more))

    def test_settings_of_the_communication_library(self) -> None:
        environ = {"NCCL_SETTINGS": "NCCL_DEBUG=INFO, NCCL_IB_HCA==mlx5_0,"}
        settings.apply_library_settings(environ, "NCCL_SETTINGS")
        assert (environ["NCCL_DEBUG"], environ["NCCL_IB_HCA"]) == ("INFO", "=mlx5_0")
        with pytest.raises(ValueError, match="'NCCL_DEBUG' is not NAME=VALUE"):
            settings.apply_library_settings({"NCCL_SETTINGS": "NCCL_DEBUG"}, "NCCL_SETTINGS")
        settings.apply_library_settings({}, "NCCL_SETTINGS")


def test_bandwidth() -> None:
    """Bus bandwidth of an allreduce is algorithm bandwidth times 2(n-1)/n, of an allgather times (n-1)/n."""
    reduce = task.bandwidth_of(1_000_000_000, 1000, 4, CollectiveKind.ALL_REDUCE)
    assert (reduce.algorithm, reduce.bus) == (1.0, 1.5)
    assert task.bandwidth_of(1_000_000_000, 1000, 4, CollectiveKind.ALL_GATHER).bus == 0.75
    assert task.bandwidth_of(1_000_000_000, 1000, 1, CollectiveKind.ALL_REDUCE).bus == 0
    for time_ms in (0.0, -1.0):
        assert task.bandwidth_of(1, time_ms, 4, CollectiveKind.ALL_REDUCE).algorithm == 0


class StandInEvent:
    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0
        self.is_reached = False

    def record(self) -> None:
        StandInEvent.clock += 250
        self.at = StandInEvent.clock

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, other: StandInEvent) -> float:
        assert other.is_reached, "the device has not got there yet"
        return other.at - self.at


class StandInDevices:
    """What `torch.cuda`, `torch.npu` and `torch.musa` have in common."""

    Event = StandInEvent

    def __init__(self, count: int = 2, name: str = "Ascend910B", *, has_bfloat16: bool = True) -> None:
        self.count = count
        self.name = name
        self.has_bfloat16 = has_bfloat16
        self.chosen: list[int] = []
        self.num_synchronized = 0

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.chosen.append(index)

    def get_device_name(self, index: int) -> str:
        return f"{self.name}-{index}"

    def is_bf16_supported(self) -> bool:
        return self.has_bfloat16

    def synchronize(self) -> None:
        self.num_synchronized += 1


def stand_in(**namespaces: Any) -> Any:
    """A torch with these device namespaces and nothing behind them."""
    version = SimpleNamespace(cuda="12.6", cann="8.0", musa="4.0")
    none = StandInDevices(count=0)
    return SimpleNamespace(
        __version__="2.x",
        version=version,
        bfloat16="bf16",
        float32="f32",
        device=str,
        cuda=namespaces.pop("cuda", none),
        **namespaces,
    )


class TestDevices:
    @pytest.mark.parametrize(
        ("module", "kind", "backend", "said"),
        [
            (nvidia_gpu, "cuda", "nccl", "cuda:1 Ascend910B-1, torch 2.x, CUDA 12.6"),
            (mthreads_gpu, "musa", "mccl", "musa:1 Ascend910B-1, torch 2.x, MUSA 4.0"),
            (ascend_npu, "npu", "hccl", "npu:1 Ascend910B-1, torch 2.x, CANN 8.0"),
        ],
    )
    def test_each_kind(self, module: Any, kind: str, backend: str, said: str) -> None:
        devices = StandInDevices()
        accelerator = module.choose(stand_in(**{kind: devices}))
        accelerator.use(1)
        assert devices.chosen == [1]
        assert accelerator.backend == backend
        assert accelerator.describe() == said
        assert accelerator.device() == f"{kind}:1"
        assert accelerator.dtype() == "bf16"
        start = accelerator.mark()
        assert accelerator.elapsed_ms(start, accelerator.mark()) == 250
        accelerator.synchronize()
        assert devices.num_synchronized == 1

    @pytest.mark.parametrize("module", [nvidia_gpu, mthreads_gpu, ascend_npu])
    def test_without_a_device_it_is_the_cpu(self, module: Any) -> None:
        for torch in (stand_in(), stand_in(musa=StandInDevices(0), npu=StandInDevices(0))):
            accelerator = module.choose(torch)
            assert isinstance(accelerator, Cpu)
            assert accelerator.backend == "gloo"

    def test_an_npu_of_another_make_is_the_cpu(self) -> None:
        assert isinstance(ascend_npu.choose(stand_in(npu=StandInDevices(name="Other"))), Cpu)

    def test_ascend_gathers_where_others_reduce(self) -> None:
        ascend = ascend_npu.choose(stand_in(npu=StandInDevices()))
        assert ascend.workload.collective is CollectiveKind.ALL_GATHER
        assert nvidia_gpu.choose(stand_in(cuda=StandInDevices())).workload.collective is CollectiveKind.ALL_REDUCE

    def test_a_rank_without_a_device_is_told_so(self) -> None:
        accelerator = TorchDevice(stand_in(cuda=StandInDevices(2)), "cuda", "nccl")
        with pytest.raises(ValueError, match="LOCAL_RANK is 2, but this node has 2 cuda devices"):
            accelerator.use(2)

    def test_without_bfloat16(self) -> None:
        accelerator = TorchDevice(stand_in(cuda=StandInDevices(has_bfloat16=False)), "cuda", "nccl")
        assert accelerator.dtype() == "f32"

    def test_the_timeouts_of_hccl_are_set_before_anything_is_loaded(self) -> None:
        environ = {"HCCL_EXEC_TIMEOUT": "60"}
        ascend_npu.prepare(environ)
        assert environ == {"HCCL_EXEC_TIMEOUT": "60", "HCCL_CONNECT_TIMEOUT": "120"}

    def test_nccl_settings_are_set_for_nvidia_and_mccl_settings_for_moore_threads(self) -> None:
        environ = {"NCCL_SETTINGS": "A=1", "MCCL_SETTINGS": "B=2"}
        nvidia_gpu.prepare(environ)
        assert (environ.get("A"), environ.get("B")) == ("1", None)
        mthreads_gpu.prepare(environ)
        assert environ["B"] == "2"


class TimedCpu(Cpu):
    """Runs on the CPU, but gathers and takes its time from events, as a device does."""

    def mark(self) -> Any:
        event = StandInEvent(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop))


@pytest.fixture
def no_group_left() -> Iterator[None]:
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
def test_the_task_takes_its_times_from_the_device(tmp_path: Path, reserve_port: Reserve) -> None:
    """The result is the sum of both parts, whatever the collective."""
    import msgspec
    import torch

    workload = msgspec.structs.replace(CPU_WORKLOAD, collective=CollectiveKind.ALL_GATHER)
    (tmp_path / "results").mkdir()
    environ = variables(0, 1, reserve_port(), tmp_path / "results")
    code = task.run(lambda environ: TimedCpu(torch, workload), environ)
    assert code is ExitCode.OK
    result = results(tmp_path)["0.json"]
    assert (result["time"], result["compute_ms"], result["communication_ms"]) == (500, 250, 250)
    assert environ["TORCH_DIST_INIT_BARRIER"] == "1", "nobody begins before all are in the group"


class TestRegistry:
    def test_each_built_in_module_can_be_run(self) -> None:
        modules = {cpu, nvidia_gpu, ascend_npu, mthreads_gpu}
        assert set(registry.BUILT_IN.values()) == {module.__name__ for module in modules}
        for module in (*modules, run_network_check):
            assert callable(module.main)

    def test_a_package_adds_its_own(self) -> None:
        plugin = EntryPoint("acme.com/tpu", "acme.node_check", registry.ENTRY_POINTS)
        assert registry.module_of("acme.com/tpu", [plugin]) == "acme.node_check"
        assert registry.module_of("nvidia.com/gpu", [plugin]) == registry.BUILT_IN["nvidia.com/gpu"]
        assert registry.module_of("unheard.of/chip", [plugin]) is None
        assert registry.module_of("cpu") == CPU_MODULE

    def test_two_offers_for_one_device_are_refused(self) -> None:
        plugin = EntryPoint("cpu", "acme.node_check", registry.ENTRY_POINTS)
        with pytest.raises(ConfigError, match=r"cpu, acme\.node_check"):
            registry.module_of("cpu", [plugin])


def test_nothing_is_loaded_before_it_is_needed() -> None:
    """The registry is asked by a launcher that must not import torch."""
    code = "import dlrover.trainer.torch.run_network_check, dlrover.trainer.torch.node_check.registry, sys; print('torch' in sys.modules, 'grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.split() == ["False", "False"]
