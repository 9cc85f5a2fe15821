"""
Counting devices, and refusing preloads that touched one, on machines that have some.

The zygote is real and imports a stand-in for torch that says what a node with accelerators would say: how many are there, that
asking initialises the driver, and what the visibility variables leave of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.agent.workers.devices import resolve_local_world_size
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.errors import ConfigError
from tests.agent.lab import environment, make_config, run_worker, write

STANDIN = """
    import os, types

    class Device:
        def __init__(self, kind, variable):
            self.total = int(os.environ.get(f"STANDIN_{kind.upper()}", "-1"))
            self.kind, self.variable, self.initialized = kind, variable, False

        def is_available(self):
            return self.total >= 0

        def device_count(self):
            self.initialized = True  # as a driver: from now on no fork may use it
            visible = os.environ.get(self.variable)
            if visible is None:
                return self.total
            return len([number for number in visible.split(",") if number and int(number) < self.total])

        def is_initialized(self):
            return self.initialized

        def current_accelerator(self):
            return types.SimpleNamespace(type=self.kind)

    cuda = Device("cuda", "CUDA_VISIBLE_DEVICES")
    xpu = Device("xpu", "ZE_AFFINITY_MASK")
    npu = Device("npu", "ASCEND_RT_VISIBLE_DEVICES")
    if "STANDIN_IS_OLD" not in os.environ:  # before torch 2.6 there was no such thing
        accelerator = next((device for device in (cuda, xpu, npu) if device.is_available()), cuda)
    distributed = types.SimpleNamespace(is_available=lambda: False)
    _C = types.SimpleNamespace(_get_privateuse1_backend_name=lambda: "npu")
    default_generator = types.SimpleNamespace(seed=lambda: None)
    set_num_threads = lambda number: None
"""

NUM_CPUS = len(os.sched_getaffinity(0))
CHECKOUT = Path(__file__).parents[3]
"""Else the zygote would run the installed code, which may be another one."""


class Node(NamedTuple):
    spawner: Spawner
    tree: ProcessTree


@contextlib.asynccontextmanager
async def node_with(tmp_path: Path, *, preload: tuple[str, ...] = (), **variables: str) -> AsyncIterator[Node]:
    library = tmp_path / "library"
    write(library / "torch" / "__init__.py", STANDIN)
    write(library / "torch" / "_dynamo.py", "")
    hidden = dict.fromkeys((b"CUDA_VISIBLE_DEVICES", b"ZE_AFFINITY_MASK", b"ASCEND_RT_VISIBLE_DEVICES"))
    environ = environment(PYTHONPATH=f"{library}:{CHECKOUT}", **variables)
    spawner = Spawner.start(
        preload=preload,
        search_path=str(tmp_path),
        environ={
            name: value for name, value in environ.items() if name not in hidden or os.fsdecode(name) in variables
        },
    )
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        yield Node(spawner, tree)
    finally:
        spawner.close()
        tree.close()


async def resolve(spawner: Spawner, asked: str, tmp_path: Path) -> int:
    return await resolve_local_world_size(make_config(tmp_path, "t.py", local_world_size=asked), spawner)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STANDIN_CUDA": "8"}, {"gpu": 8, "auto": 8, "cpu": NUM_CPUS}),
        ({"STANDIN_CUDA": "8", "CUDA_VISIBLE_DEVICES": "2,3,9"}, {"gpu": 2, "auto": 2}),
        ({"STANDIN_XPU": "4"}, {"xpu": 4, "auto": 4}),
        ({"STANDIN_XPU": "4", "ZE_AFFINITY_MASK": "1"}, {"xpu": 1, "auto": 1}),
        ({"STANDIN_NPU": "16", "ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, {"npu": 3, "auto": 3}),
        ({"STANDIN_IS_OLD": "1", "STANDIN_CUDA": "2"}, {"gpu": 2, "auto": 2}),
        ({"STANDIN_IS_OLD": "1"}, {"auto": NUM_CPUS}),
        ({}, {"auto": NUM_CPUS}),
    ],
    ids=["cuda", "cuda, some visible", "xpu", "xpu, one visible", "custom", "old torch", "old torch, none", "none"],
)
async def test_words_are_answered_by_the_devices_that_are_visible(
    tmp_path: Path, variables: dict[str, str], expected: dict[str, int]
) -> None:
    async with node_with(tmp_path, **variables) as node:
        assert {asked: await resolve(node.spawner, asked, tmp_path) for asked in expected} == expected


@pytest.mark.parametrize(
    ("asked", "variables", "message"),
    [
        ("gpu", {}, "--nproc-per-node=gpu: Cuda is not available. Give a number, or auto."),
        ("gpu", {"STANDIN_CUDA": "0"}, "--nproc-per-node=gpu: this node has no gpu device. Give a number, or auto."),
        (
            "gpu",
            {"STANDIN_CUDA": "8", "CUDA_VISIBLE_DEVICES": ""},
            "--nproc-per-node=gpu: this node has no gpu device. Give a number, or auto.",
        ),
        ("auto", {"STANDIN_CUDA": "0"}, "--nproc-per-node=auto: this node has no cuda device. Give a number."),
        ("xpu", {"STANDIN_CUDA": "8"}, "--nproc-per-node=xpu: Xpu is not available. Give a number, or auto."),
        ("xpu", {"STANDIN_XPU": "0"}, "--nproc-per-node=xpu: this node has no xpu device. Give a number, or auto."),
        ("npu", {"STANDIN_CUDA": "8"}, "--nproc-per-node=npu: npu is not available. Give a number, or auto."),
        (
            "cuda",
            {"STANDIN_CUDA": "8"},
            "--nproc-per-node=cuda: torch has no device type cuda here, only gpu, xpu and npu. Give a number, or auto.",
        ),
    ],
)
async def test_no_device_of_the_kind_is_an_error_that_says_what_to_give(
    tmp_path: Path, asked: str, variables: dict[str, str], message: str
) -> None:
    async with node_with(tmp_path, **variables) as node:
        with pytest.raises(ConfigError) as raised:
            await resolve(node.spawner, asked, tmp_path)
    assert str(raised.value) == message


async def test_counting_leaves_the_devices_to_the_workers(tmp_path: Path) -> None:
    script = write(
        tmp_path / "s.py", "import os, torch; print(torch.cuda.is_initialized(), os.environ['STANDIN_CUDA'])"
    )
    async with node_with(tmp_path, STANDIN_CUDA="8") as node:
        assert await resolve(node.spawner, "gpu", tmp_path) == 8
        environ = {os.fsencode(name): os.fsencode(value) for name, value in node.spawner.environ.items()}
        ended = await run_worker(node.spawner, node.tree, script, scratch=tmp_path, environ=environ)
        assert node.spawner.is_warm
    assert (ended.code, ended.stdout) == (0, "False 8\n"), ended.stderr


@pytest.mark.parametrize("preload", ["counts_devices", "imports_only"])
async def test_a_preload_that_initialised_cuda_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, preload: str
) -> None:
    write(tmp_path / "counts_devices.py", "import torch; num_devices = torch.cuda.device_count()")
    write(tmp_path / "imports_only.py", "import torch; num_devices = torch.cuda.device_count")
    script = write(tmp_path / "s.py", f"import sys; print('torch' in sys.modules, {preload!r} in sys.modules)")
    async with node_with(tmp_path, preload=(preload,), STANDIN_CUDA="8") as node:
        environ = {os.fsencode(name): os.fsencode(value) for name, value in node.spawner.environ.items()}
        ended = await run_worker(node.spawner, node.tree, script, scratch=tmp_path, environ=environ)
        is_warm = node.spawner.is_warm
    assert (is_warm, ended.stdout) == (True, f"True {preload == 'imports_only'}\n")
    complaint = "--preload counts_devices initialised CUDA when imported; a forked worker could not use the device"
    assert (complaint in caplog.text) == (preload == "counts_devices")
