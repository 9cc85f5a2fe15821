"""Entry points as scripts of the original have them: imported by their old paths."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.python.unified.api.runtime import DataQueue, RoleGroup, create_rpc_proxy, current_worker, rpc

from dlrover.unified.runtime.current import current, is_inside


def folder() -> Path:
    return Path(current_worker().job_info.user_config["folder"])


def train() -> None:
    """Two ranks and more, one sum, until its file `stop` is there."""
    me = current_worker().actor_info
    assert (os.environ["RANK"], os.environ["ROLE"]) == (str(me.rank), me.role)
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


def checked() -> None:
    """Its communication check fails in the first life: see below."""
    (folder() / f"checked-{current_worker().actor_info.rank}-{current().incarnation}").touch()


def _break_check_once() -> None:
    if is_inside() and current().role == "broken" and current().incarnation == 1:
        torch.distributed.all_reduce = _fails


def _fails(*args: object) -> None:
    raise RuntimeError("a cable is out")


_break_check_once()


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
        (folder() / "trainer").write_text("done")


class Actor:
    def run(self) -> None:
        assert dist.is_initialized()
