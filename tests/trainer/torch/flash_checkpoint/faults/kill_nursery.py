"""
Forks trainers that do nothing but save, kills each at a random instant of a save, and lets the next one say what it finds.

    python -m tests.trainer.torch.flash_checkpoint.faults.kill_nursery HOME DIRECTORY NUM_KILLS SEED [lazy]

A process of its own, because it forks: torch is imported once, and it has no threads. Each trainer saves every step into memory and every third
to storage, by a thread of its own, so that kills hit copies, files, commits and the deletion of old checkpoints alike. A state is a function of its step in
every number, so a mixture of two steps cannot look like one. With `lazy` the state is that of an optimizer, which steps while it is copied.

Prints NUM_KILLS, how many of them hit a slot in writing, how many a checkpoint being staged, and the newest step in storage.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlrover.snapshot.memory.segment import Segment, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import SlotState
from dlrover.snapshot.storage.commit import find_damage, locate
from dlrover.snapshot.storage.persist import SaveRequest, finish, persist, pin_newest, release
from dlrover.snapshot.storage.places import SavePlace
from dlrover.snapshot.storage.retention import KeepLatest
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine

PART = "model_states"
NUM_NUMBERS = 200_000


class StandingOutlet:
    """Segments at a place that the next trainer knows, as an agent's are; a thread writes the files."""

    fallback = None
    settled: ClassVar[dict[str, Any]] = {}  # nobody asks how a save ended

    def __init__(self, home: Path, announce: int) -> None:
        self.home = home
        self._announce = announce
        self._writer = ThreadPoolExecutor(1)

    def saved(self, name: SlotName, request: SaveRequest) -> None:
        if request.is_storage:
            pinned = pin_newest(name.path, name.slot, name.generation)
            assert pinned is not None, "nobody else writes here"
            self._writer.submit(self._write, pinned, request)

    def _write(self, pinned: Any, request: SaveRequest) -> None:
        try:
            persist(pinned, request)
        finally:
            release(pinned)
        finish(request)
        os.write(self._announce, b"stored %d\n" % request.step)

    def open(self, place: SavePlace) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None:
        self._writer.shutdown()


def state_of(step: int) -> dict[str, Any]:
    """Its size changes now and then, so that segments have to grow."""
    size = NUM_NUMBERS + (step // 40 % 3) * 5000
    return {
        "weights": torch.arange(size, dtype=torch.float32) * (step + 1),
        "moments": [torch.full((size,), step, dtype=torch.int32), {"late": torch.tensor(step)}],
        "step": step,
        "tail": torch.full((50_000,), -step, dtype=torch.int64),
    }


def check(state: dict[str, Any]) -> int:
    """The step that this state is, in every bit."""
    expected = state_of(state["step"])
    found = (state["weights"], state["moments"][0], state["moments"][1]["late"], state["tail"])
    wanted = (expected["weights"], expected["moments"][0], expected["moments"][1]["late"], expected["tail"])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), f"{state['step']} is torn"
    return int(state["step"])


def train(home: Path, directory: Path, announce: int) -> None:
    engine = CheckpointEngine(
        str(directory), outlet=StandingOutlet(home, announce), num_slots=3, deletion_strategy=KeepLatest(2)
    )
    state = engine.load(PART)
    step = 0 if state is None else check(state) + 1
    os.write(announce, b"restored %d\n" % (step - 1))
    while True:
        state = state_of(step)
        os.write(announce, b"begin %d\n" % step)
        result = engine.save(step, {PART: state}, {PART: "rank_0.pt"}, is_storage=step % 3 == 0, on_busy="block")
        os.write(announce, b"done %d %d\n" % (step, int(result.blocking * 1e6)))
        assert result, result
        step += 1


class Counting:
    """A model whose every number says how often its optimizer has stepped: the sum of momenta that grow by one."""

    def __init__(self) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(NUM_NUMBERS)) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.weights, lr=1.0, momentum=1.0)

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()

    def state(self, step: int) -> dict[str, Any]:
        weights = {str(number): weight.detach() for number, weight in enumerate(self.weights)}
        return {"weights": weights, "optimizer": self.optimizer.state_dict(), "step": step}

    def load(self, state: dict[str, Any]) -> None:
        for number, weight in enumerate(self.weights):
            weight.data.copy_(state["weights"][str(number)])
        self.optimizer.load_state_dict(state["optimizer"])


def check_counting(state: dict[str, Any]) -> int:
    step = int(state["step"])
    num_steps = step + 1
    assert all(bool((weight == -num_steps * (num_steps + 1) / 2).all()) for weight in state["weights"].values()), "torn"
    momenta = [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
    assert len(momenta) == 3
    assert all(bool((momentum == num_steps).all()) for momentum in momenta), f"step {step} is torn"
    return step


def train_lazily(home: Path, directory: Path, announce: int) -> None:
    engine = CheckpointEngine(
        str(directory), outlet=StandingOutlet(home, announce), num_slots=3, deletion_strategy=KeepLatest(2), lazy=True
    )
    model = Counting()
    state = engine.load(PART)
    step = -1
    if state is not None:
        step = check_counting(state)
        model.load(state)
    os.write(announce, b"restored %d\n" % step)
    while True:
        model.step()
        step += 1
        os.write(announce, b"begin %d\n" % step)
        state = model.state(step)
        result = engine.save(step, {PART: state}, {PART: "rank_0.pt"}, is_storage=step % 3 == 0, on_busy="block")
        os.write(announce, b"done %d %d\n" % (step, int(result.blocking * 1e6)))
        assert result, result


class Life:
    """One trainer, and what it told."""

    def __init__(self, home: Path, directory: Path, *, is_lazy: bool) -> None:
        self._heard, announce = os.pipe()
        self._rest = b""
        self.restored = self.begun = self.done = self.stored = -1
        self.blocking = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                (train_lazily if is_lazy else train)(home, directory, announce)
            except BaseException as error:
                os.write(announce, f"failed {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.close(announce)

    def read_until(self, num_begun: int, *, is_stored: bool) -> None:
        """Until it has begun so many saves, and if wanted until one of them is in storage."""
        seen = 0
        while seen < num_begun or (is_stored and self.stored < 0):
            seen += self._take(self._wait())

    def kill(self, after: float) -> None:
        select.select([], [], [], after)  # the instant of the kill
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        while part := os.read(self._heard, 65536):
            self._take(part)
        os.close(self._heard)

    def _wait(self) -> bytes:
        assert select.select([self._heard], [], [], 60)[0], "the trainer is silent"
        part = os.read(self._heard, 65536)
        assert part, "the trainer ended by itself"
        return part

    def _take(self, part: bytes) -> int:
        *lines, self._rest = (self._rest + part).split(b"\n")
        num_begun = 0
        for words in (line.decode().split() for line in lines):
            assert words[0] != "failed", " ".join(words)
            setattr(self, {"begin": "begun"}.get(words[0], words[0]), int(words[1]))
            if words[0] == "done":
                self.blocking = int(words[2]) / 1e6
            num_begun += words[0] == "begin"
        return num_begun


def check_storage(directory: Path, *, is_lazy: bool) -> int:
    """What the tracker names is whole, in every byte; -1 without a tracker. Looked at by a stranger."""
    storage = LocalStorage()
    found = locate(storage, str(directory))
    if found is None:
        return -1
    assert find_damage(storage, found) == []
    state = torch.load(f"{found.path}/rank_0.pt")
    assert (check_counting(state) if is_lazy else check(state)) == found.manifest.step
    return found.manifest.step


def is_slot_in_writing(home: Path) -> bool:
    with Segment(segment_paths(home)[-1]) as segment:
        slots = range(segment.geometry.num_slots)
        return any(segment.view[segment.geometry.record_at(slot)] == SlotState.WRITING for slot in slots)


def main(home: Path, directory: Path, num_kills: int, seed: int, *, is_lazy: bool) -> None:
    dice = random.Random(seed)
    Counting()  # the first optimizer of a process imports for seconds; the trainers inherit that
    last: Life | None = None
    known: set[str] = set()
    num_in_slot = num_staged = newest_stored = 0
    for number in range(num_kills):
        life = Life(home, directory, is_lazy=is_lazy)
        # Where the disk is slow next to the memory, kills after some saves would leave no checkpoint to be looked at.
        life.read_until(2 + dice.randrange(4), is_stored=number % 10 == 9)
        if last is not None:
            # A lazy save is in memory when the next step of the optimizer begins, so the one before the last certainly is.
            possible = (last.done - 1, last.done, last.begun) if is_lazy else (last.done, last.begun)
            assert life.restored in possible, f"kill {number}: {vars(last)}, {vars(life)}"
        life.kill(dice.random() * (0.04 if is_lazy else 2 * (life.blocking or 0.002)))
        num_in_slot += is_slot_in_writing(home)
        staged = {path.name for path in directory.glob("*.tmp-*")}
        num_staged += not staged <= known
        known |= staged
        stored = check_storage(directory, is_lazy=is_lazy)
        assert stored >= newest_stored or newest_stored == 0, "the tracker went back"
        newest_stored = max(stored, newest_stored)
        last = life
    print(num_kills, num_in_slot, num_staged, newest_stored)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), is_lazy="lazy" in sys.argv)
