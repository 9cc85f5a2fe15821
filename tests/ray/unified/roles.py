"""Entry points of the roles in these tests. Each test tells them what to do by the configuration of its job."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dlrover.unified import Stream, current, group, rpc


def folder() -> Path:
    return Path(current().config["folder"])


def note(text: str) -> None:
    """One line more in the file of this process."""
    with (folder() / f"{current().name}-{os.getpid()}").open("a") as file:
        file.write(text + "\n")


class Server:
    def __init__(self) -> None:
        note(f"made {current().incarnation}")
        self.hang = threading.Event()

    @rpc(retry=True)
    def add(self, left: int, right: int) -> tuple[int, int, int]:
        return left + right, os.getpid(), current().incarnation

    @rpc()
    def once(self, mark: str) -> str:
        note(f"once {mark}")
        return mark

    @rpc()
    def die(self) -> None:
        os._exit(9)

    @rpc()
    def wait(self) -> None:
        note("waits")
        self.hang.wait(60)

    @rpc()
    def fail(self) -> None:
        raise ValueError("no such answer")

    @rpc()
    def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    @rpc()
    def size(self, payload: Any) -> int:
        return len(payload)


class Driver:
    """Runs until its file `stop` is there; calls the servers meanwhile, if there are any."""

    @rpc()
    def relay(self, role: str, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        """Call another role, and tell what came of it."""
        try:
            return "ok", group(role)[rank].call(method, *args).result(120)
        except Exception as error:
            return type(error).__name__, str(error)

    @rpc()
    def batch(self, role: str, size: int) -> list[int]:
        return group(role).call_batch("double", size, list(range(size))).wait(60)

    @rpc()
    def all(self, role: str) -> list[Any]:
        answers: list[Any] = group(role).call("add", 1, 2).result(60)
        return answers

    def run(self) -> None:
        note("runs")
        while not (folder() / "stop").exists() and not current().ending.is_set():
            time.sleep(0.02)


class Member:
    """A class that each worker of an elastic role is made of."""

    @rpc(retry=True)
    def who(self) -> tuple[int, int, str, bool]:
        return current().rank, os.getpid(), os.environ["WORLD_SIZE"], "ray" in sys.modules

    @rpc(retry=True)
    def size(self, payload: Any) -> int:
        return len(payload)

    @rpc()
    def ask_server(self) -> int:
        answer: int = group("server").call_rank0("add", 1, 2).result(60)[0]
        return answer

    def run(self) -> None:
        while not (folder() / "stop").exists():
            time.sleep(0.02)


class Summing:
    """Ranks that train together in actors: one sum, and then until its file `stop` is there."""

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        note(f"{total.item():g} {os.environ['LOCAL_RANK']} {'ray' in sys.modules}")
        while not (folder() / "stop").exists():
            if current().ending.wait(0.02):
                return


def devices() -> None:
    """What a rank may use: its own device as Ray numbers it, and what it sees at the place of its local rank."""
    import ray

    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    note(f"{ray.get_gpu_ids()[0]} {visible[int(os.environ['LOCAL_RANK'])]} of {len(visible)}")


class Feeder:
    def run(self) -> None:
        for task in Stream("samples").tasks():
            note(f"{task.key}")
            task.put((task.key, task.key * task.key))


class Consumer:
    def run(self) -> None:
        stream = Stream("samples")
        for step in range(current().config["steps"]):
            batch = stream.get(step)
            note(" ".join(f"{key}:{item[1]}" for key, item in batch))
            if (folder() / "stop").exists():
                return


def fails() -> None:
    raise ValueError("a user's mistake")


def ends() -> None:
    note("ends")


class Gate:
    """Each of its states lasts until a file is there: its making, its run, and its end after it was asked to."""

    def __init__(self) -> None:
        note(f"comes {current().incarnation}")
        while not (folder() / f"go-{current().incarnation}").exists():
            time.sleep(0.02)

    def run(self) -> None:
        note("runs")
        while not (folder() / "leave").exists():
            if current().incarnation == 1 and current().ending.is_set():
                return  # of the restart of the whole job
            time.sleep(0.02)


class Stuck:
    """Does not end, whoever asks."""

    def run(self) -> None:
        note("runs")
        while True:
            time.sleep(0.02)


class Owner:
    """Of a queue, when it may be; gives one item in each life, when it may."""

    def run(self) -> None:
        import ray

        from dlrover.unified.api.queue import DataQueue

        note(f"in {ray.util.get_current_placement_group().id.hex()}")
        _await("own")
        queue: DataQueue[int] = DataQueue("numbers", is_master=True)
        _await(f"put-{current().incarnation}")
        queue.put(current().incarnation)
        _await("stop")


class User:
    """Of that queue; looks for it before it is there, and asks before there is an item."""

    def run(self) -> None:
        from dlrover.unified.api.queue import DataQueue

        note("looks")
        queue: DataQueue[int] = DataQueue("numbers")
        note("asks")
        note(f"has {queue.get()}")
        _await("stop")


def _await(name: str) -> None:
    while not (folder() / name).exists() and not current().ending.is_set():
        time.sleep(0.02)
