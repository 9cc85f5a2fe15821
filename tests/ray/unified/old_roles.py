"""Entry points as scripts of the original have them: imported by their old paths."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.python.unified.api.runtime import (
    DataQueue,
    PrimeMasterApi,
    RoleGroup,
    create_rpc_proxy,
    current_worker,
    rpc,
)

from dlrover.unified.runtime.current import current, is_inside


def folder() -> Path:
    return Path(current_worker().job_info.user_config["folder"])


def train() -> None:
    """Two ranks and more, one sum, until its file `stop` is there."""
    me = current_worker().actor_info
    assert (os.environ["RANK"], os.environ["ROLE"]) == (str(me.rank), me.role)
    names = ("JOB", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "ACCELERATE_TORCH_DEVICE")
    assert [os.environ[name] for name in names] == ["old", str(me.local_rank), "2", str(me.rank // 2), "cpu"]
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    fresh = folder() / f"fresh-{os.getpid()}"
    fresh.write_text(os.environ["NAME"])
    fresh.rename(folder() / f"{me.role}-{me.rank}-{os.getpid()}")
    while not (folder() / "stop").exists():
        if current().ending.is_set():
            return
        time.sleep(0.02)
    dist.barrier()


class Forked:
    """No actor: its worker is forked, and sets up the process group itself."""

    def run(self) -> None:
        me = current_worker().actor_info
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        (
            folder()
            / f"{me.role}-{me.rank} sum {value.item():g}, below {'agent' * ('DLROVER_AGENT_SOCKET' in os.environ)}"
        ).touch()


def checked() -> None:
    """After the communication check: see below."""
    (folder() / f"checked-{current_worker().actor_info.rank}-{current().incarnation}").touch()


def _trouble_check() -> None:
    """A rank that fails once, and a rank whose multiplications are slow."""
    if not is_inside():
        return
    if (current().role, current().rank, current().incarnation) == ("broken", 1, 1):
        torch.distributed.all_reduce = _fails
    if (current().role, current().rank) == ("slow", 2):
        torch.Tensor.__matmul__ = _slowly


def _fails(*args: object, **more: object) -> None:
    raise RuntimeError("a cable is out")


def _slowly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW)
    return torch.mm(left, right)


SLOW = 0.2
_trouble_check()


def fail() -> None:
    with (folder() / "tries").open("a") as file:
        file.write("x")
    raise ValueError("always")


class Rollout:
    @rpc
    def generate(self, prompts: list[int]) -> list[int]:
        return [prompt + 1 for prompt in prompts]


class Trainer:
    def run(self) -> None:
        queue: DataQueue[int] = DataQueue("numbers", is_master=True, size=3)
        assert RoleGroup("ROLLOUT").call_batch("generate", 5, [1, 2, 3, 4, 5]).wait() == [2, 3, 4, 5, 6]
        first = create_rpc_proxy("ROLLOUT-0", None, Rollout)
        assert first.generate([7]) == [8]
        putting = queue.put_async(*range(10))
        found: list[int] = []
        while len(found) < 10:
            found += queue.get(4)
        putting.result(30)
        assert found == list(range(10))
        assert queue.get_nowait() == []
        ask_the_controller()
        (folder() / "trainer").write_text("done")


def ask_the_controller() -> None:
    assert PrimeMasterApi.get_status().stage == "RUNNING"
    assert PrimeMasterApi.get_all_roles() == ["TRAINER", "ACTOR", "ROLLOUT"]
    assert [each.rank for each in PrimeMasterApi.get_workers_by_role("ROLLOUT")] == [0, 1]
    assert PrimeMasterApi.get_workers_by_role("CRITIC", optional=True) == []
    assert PrimeMasterApi.get_actor_info("ROLLOUT_2-1_1-0").rank == 1
    PrimeMasterApi.report_diagnostic_info(
        "ROLLOUT-1", {"responsibility": "ROOT_CAUSE", "code": 7, "reason": "its device is hot"}
    )
    PrimeMasterApi.report_diagnostic_info("ROLLOUT-0", {"responsibility": "BE_AFFECTED", "reason": "it waits"})
    for ask in (
        lambda: PrimeMasterApi.get_workers_by_role("CRITIC"),
        lambda: PrimeMasterApi.get_actor_info("CRITIC-0"),
        lambda: PrimeMasterApi.report_execution_result("CRITIC-0", {"result": "SUCCESS"}),
        lambda: PrimeMasterApi.report_diagnostic_info("ROLLOUT-0", {"responsibility": "NOBODY"}),
    ):
        try:
            ask()
        except ValueError:
            continue
        raise AssertionError("what the job does not have was taken")


class Actor:
    def run(self) -> None:
        assert dist.is_initialized()
