"""Lazy saves: what is copied when, who waits for whom, and what happens to a tensor that somebody changes too early."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.layout import plan_state
from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.encoding.frozen import freeze, freeze_again
from dlrover.trainer.torch.flash_checkpoint.encoding.lazy import LAZY_FROM_BYTES, reason_against
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import make_skeleton
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import TorchTensors
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement, own_ranks
from tests.trainer.torch.flash_checkpoint.test_saves import assert_same

WIDTH = 256
DEADLINE = 20


class GatedCopier(Copier):
    """Copies large blocks only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(2, library=None)  # the loop asks nobody between two blocks
        self.gate = threading.Event()
        self.gate.set()

    def _copy_one(self, target: int, source: int, num_bytes: int) -> None:
        if num_bytes >= LAZY_FROM_BYTES:
            assert self.gate.wait(DEADLINE), "nobody opened the gate"
        super()._copy_one(target, source, num_bytes)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(WIDTH, WIDTH)
        self.two = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, 32))  # small enough for the gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())


class Training:
    """A model with its optimizer, a checkpointer, and the gate of its copies."""

    def __init__(self, directory, kind, **options) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = kind(self.model.parameters())
        self.checkpointer = DdpCheckpointer(directory, **{"lazy": True} | options)
        self.engine = self.checkpointer._engine
        self.engine._copier.close()
        self.engine._copier = self.copier = GatedCopier()

    @property
    def gate(self) -> threading.Event:
        return self.copier.gate

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, WIDTH)).square().mean().backward()

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.forward_and_backward()
            self.optimizer.step()

    def state(self, step: int) -> dict[str, object]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict(), "step": step}

    def copy_of_state(self, step: int) -> dict[str, object]:

        return copy.deepcopy(self.state(step))

    def save(self, step: int, **options):
        return self.checkpointer.save_checkpoint(
            step, self.state(step), **{"storage_type": StorageType.MEMORY} | options
        )

    def steps_in_memory(self) -> list[int]:
        found = []
        for path in segment_paths(self.engine.outlet.home):
            with Segment(path) as segment:
                found += [name.step for name in segment.complete_slots()]
        return sorted(found)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def foreach_adam(params):
    return torch.optim.Adam(params, lr=0.01, foreach=True)


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    return place


@pytest.fixture
def begin(tmp_path):
    made: list[Training] = []

    def build(kind=adamw, **options) -> Training:
        made.append(Training(tmp_path / "checkpoints", kind, **options))
        return made[-1]

    yield build
    for training in made:
        training.gate.set()
        training.checkpointer.close()


@pytest.mark.parametrize("kind", [adamw, fused_adamw, foreach_adam, sgd])
def test_a_lazy_save_holds_the_state_of_its_call_whatever_the_optimizer_does_next(begin, kind):
    training = begin(kind)
    training.train(2)
    expected = training.copy_of_state(2)
    training.gate.clear()
    result = training.save(2)
    assert result
    assert (result.is_lazy, result.is_done) == (True, False)
    assert training.steps_in_memory() == []
    training.model.average += 1  # a buffer: copied before the save returned
    opener = threading.Timer(0.0, training.gate.set)
    training.forward_and_backward()
    opener.start()
    training.optimizer.step()  # waits for the gate, then for the copy
    opener.join()
    assert (result.is_done, result.reason) == (True, SaveReason.SAVED)
    assert result.waited > 0
    assert_same(training.checkpointer.load_checkpoint(), expected)
    training.train(3)
    assert training.save(6)
    assert_same(training.checkpointer.load_checkpoint(), training.state(6))


def test_a_thread_completes_the_save_while_training_goes_on(begin):
    training = begin()
    training.train()
    result = training.save(1)
    training.engine._lazily._stager.submit(lambda: None).result(DEADLINE)
    assert result.is_done
    assert training.checkpointer.poll()
    assert training.steps_in_memory() == [1]
    assert result.waited == 0


def test_a_tensor_that_is_changed_during_its_copy_discards_the_save_and_is_named(begin, caplog):
    training = begin(fused_adamw)
    training.train()
    assert training.save(1)
    assert training.checkpointer.wait_for_staging()
    training.train()
    training.gate.clear()
    result = training.save(2)
    with torch.no_grad():
        training.model.two.weight.add_(1)  # no optimizer did that
    training.gate.set()
    assert not training.checkpointer.wait_for_staging()
    assert not result
    assert result.reason is SaveReason.ERROR
    assert "model.two.weight" in result.message
    assert "model.two.weight" in caplog.text
    assert training.steps_in_memory() == [1]
    training.train()
    later = training.save(3)
    assert later
    assert not later.is_lazy  # never again
    assert training.checkpointer.wait_for_staging()
    assert_same(training.checkpointer.load_checkpoint(), training.state(3))


def test_loading_a_state_dict_during_the_copy_is_noticed_too(begin):
    training = begin()
    training.train()
    other = Model()
    training.gate.clear()
    result = training.save(1)
    training.model.load_state_dict(other.state_dict())
    training.gate.set()
    assert not training.checkpointer.wait_for_staging()
    assert "changed while it was copied" in result.message


def test_state_that_the_optimizer_replaces_is_saved_as_it_was(begin):
    training = begin()
    training.train()
    expected = training.copy_of_state(1)
    training.gate.clear()
    assert training.save(1)
    training.optimizer.load_state_dict(training.copy_of_state(1)["optimizer"])  # new tensors: the old ones stay
    training.gate.set()
    assert training.checkpointer.wait_for_staging()
    assert_same(training.checkpointer.load_checkpoint(), expected)


def test_the_next_save_and_a_restore_finish_the_copy_first(begin):
    training = begin()
    training.train()
    first = training.save(1)
    second = training.save(2)  # no step between the two: not lazy, and after the first
    assert first.is_done
    assert not second.is_lazy
    assert training.steps_in_memory() == [1, 2]
    training.train()
    expected = training.copy_of_state(3)
    assert training.save(3).is_lazy
    assert_same(training.checkpointer.load_checkpoint(), expected)


def test_memory_that_is_prepared_late_does_not_replace_what_a_save_uses(begin):
    """The thread that prepares it guesses more than the state turned out to need, and may come at any moment."""
    training = begin()
    training.train()
    training.engine._preparation.wait()
    [home] = segment_paths(training.engine.outlet.home)
    stage, prepared = training.engine._lazily.stage, []

    def stage_after_a_preparation(*arguments: object) -> None:
        thread = threading.Thread(target=lambda: prepared.append(training.engine.reserve(100_000_000).nbytes))
        thread.start()
        thread.join(0.2)  # it has its chance, and has to wait for more
        assert thread.is_alive()
        stage(*arguments)
        prepared.append(thread)

    training.engine._lazily.stage = stage_after_a_preparation
    training.gate.clear()
    expected = training.copy_of_state(1)
    assert training.save(1).is_lazy
    prepared[0].join(DEADLINE)
    assert prepared[1:] == [0], "nothing to be touched while a copy is under way"
    training.gate.set()
    assert training.checkpointer.wait_for_staging()
    training.engine.reserve(100_000_000)
    assert segment_paths(training.engine.outlet.home) == [home]
    assert_same(training.checkpointer.load_checkpoint(), expected)


def test_a_lazy_save_to_storage_is_written_once_it_is_whole(begin, tmp_path):
    training = begin()
    training.train()
    expected = training.copy_of_state(1)
    training.gate.clear()
    assert training.save(1, storage_type=StorageType.DISK).is_lazy
    assert not (tmp_path / "checkpoints").exists()
    training.gate.set()
    assert training.checkpointer.wait_latest_checkpoint(DEADLINE)
    assert_same(torch.load(tmp_path / "checkpoints" / "1" / "rank_0.pt"), expected)


class TwoRanks(Agreement):
    """As if there were another saving rank, which is always ready but whose lazy copies fail on demand."""

    def __init__(self) -> None:
        super().__init__(own_ranks(), 1, 1)
        self.has_other_failed = False

    def decide(self, *, is_ready: bool, is_giving_up: bool = False) -> tuple[bool, bool]:
        failed, self.has_other_failed = self.has_other_failed, False
        return is_ready and not failed, is_giving_up


def test_a_save_that_another_rank_could_not_finish_is_given_up_before_an_older_one(begin, caplog):
    training = begin()
    training.engine._agreement = ranks = TwoRanks()
    for step in (1, 2):
        training.train()
        assert training.save(step)
        assert training.checkpointer.wait_for_staging()
    assert training.steps_in_memory() == [1, 2]
    ranks.has_other_failed = True  # it holds step 1 only
    training.train()
    assert training.save(3)
    assert training.checkpointer.wait_for_staging()
    assert "step 2 is discarded" in caplog.text
    assert training.steps_in_memory() == [1, 3]


class OwnAdam(torch.optim.Adam):
    """An optimizer of the user's: nobody knows what it does outside of `step`."""


def test_what_is_not_known_to_be_safe_is_copied_at_once(begin, caplog):
    training = begin(OwnAdam)
    assert not training.save(0).is_lazy  # no step yet
    training.train()
    assert not training.save(1).is_lazy
    assert "OwnAdam is not an optimizer of torch.optim" in caplog.text
    assert_same(training.checkpointer.load_checkpoint(), training.state(1))


def test_reasons_against_an_optimizer():
    model = Model()
    assert reason_against(adamw(model.parameters())) == ""
    assert "graph" in reason_against(torch.optim.AdamW(model.parameters(), capturable=True))
    model.one.weight.register_post_accumulate_grad_hook(lambda param: None)
    assert "backward" in reason_against(adamw(model.parameters()))


def test_memory_that_an_optimizer_shares_with_others_is_copied_at_once(tmp_path):
    flat = torch.zeros(2 * WIDTH, WIDTH)
    param = torch.nn.Parameter(flat[:WIDTH])  # the other half is somebody else's
    optimizer = torch.optim.SGD([param], lr=0.1)
    checkpointer = DdpCheckpointer(tmp_path / "checkpoints", lazy=True)
    param.sum().backward()
    optimizer.step()
    result = checkpointer.save_checkpoint(1, {"param": param.detach()}, storage_type=StorageType.MEMORY)
    checkpointer.close()
    assert result
    assert not result.is_lazy


def test_lazy_is_off_unless_it_is_asked_for(begin):
    training = begin(lazy=False)
    training.train()
    assert not training.save(1).is_lazy
    training.train()
    assert training.save(2, lazy="auto").is_lazy
    training.train()
    assert not training.save(3, lazy=False).is_lazy
    with pytest.raises(ValueError, match="lazy must be True"):
        training.save(4, lazy="perhaps")


SCRIPT = """
import sys, torch
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

model = torch.nn.Linear(600, 600)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = DdpCheckpointer(sys.argv[1], lazy=True)
model(torch.ones(2, 600)).sum().backward()
optimizer.step()
result = checkpointer.save_checkpoint(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
assert result.is_lazy, result
"""


def test_a_script_that_just_ends_has_its_last_lazy_save_in_storage(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out")], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "dlrover_latest.txt").read_text() == "1"


def test_what_a_lazy_save_pickles_later_is_the_state_of_its_call(begin):
    training = begin()
    training.train()
    assert training.save(1)  # the first one learns how much room it takes
    assert training.checkpointer.wait_for_staging()
    training.train()
    state = training.state(2)
    state["notes"] = notes = {"lr": [0.5], "names": ("a", "b")}
    state["again"] = notes
    expected = training.copy_of_state(2) | {"notes": {"lr": [0.5], "names": ("a", "b")}}
    expected["again"] = expected["notes"]
    training.gate.clear()
    result = training.checkpointer.save_checkpoint(2, state, storage_type=StorageType.MEMORY)
    notes["lr"][0] = 7.0  # the caller's containers are the caller's again
    state["model"].clear()
    training.gate.set()
    assert training.checkpointer.wait_for_staging(), result.message
    restored = training.checkpointer.load_checkpoint()
    assert_same(restored, expected)
    assert restored["again"] is restored["notes"]


def test_only_a_state_of_plain_things_can_be_held_still():
    weight = torch.ones(3)
    parts = {"part": OrderedDict(model=weight, tied=[weight, (1, "x", None)], lr=0.5)}
    frozen = freeze(parts)
    assert frozen is not None
    assert_same(frozen.parts, parts)
    assert frozen.parts["part"] is not parts["part"]
    last = frozen.looks
    again = freeze_again(parts, last)
    assert again is not None
    assert_same(again.parts, parts)
    assert again.parts["part"] is not parts["part"]
    renamed = {"part": OrderedDict(model=weight, bound=[weight, (1, "x", None)], lr=0.5)}
    moved = {"part": OrderedDict(model=weight.clone(), tied=[weight, (1, "x", None)], lr=0.5)}
    turned = {"part": OrderedDict(model=weight, tied=[(1, "x", None), weight], lr=0.5)}
    exchanged = {"part": OrderedDict(model=0.5, tied=[weight, (1, "x", None)], lr=weight)}
    more = {"part": parts["part"], "other": {}}
    reshaped = {"part": OrderedDict(model=weight[:2], tied=[weight, (1, "x", None)], lr=0.5)}
    for other in (renamed, moved, turned, exchanged, more, reshaped):
        assert freeze_again(other, last) is None
    assert freeze({"part": {"object": object()}}) is None
    assert freeze({"part": {"sparse": torch.eye(3).to_sparse()}}) is None


TENSORS = [torch.arange(6.0), torch.ones(2, 3).bfloat16(), torch.tensor(5)]
leaves = some.one_of(
    some.none(), some.booleans(), some.integers(), some.text(max_size=3), some.sampled_from(TENSORS), some.just(0.5)
)
plain_states = some.recursive(
    leaves,
    lambda inside: some.one_of(
        some.lists(inside, max_size=4),
        some.tuples(inside, inside),
        some.dictionaries(some.text(max_size=3), inside, max_size=4),
        some.dictionaries(some.integers(), inside, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(plain_states)
def test_a_state_that_is_held_still_has_the_same_pickle(state):
    frozen = freeze({"part": state})
    assert frozen is not None
    skeleton, expected = make_skeleton(frozen.parts["part"]), make_skeleton(copy.copy(state))
    assert skeleton.content == expected.content
    assert [each._cdata for each in skeleton.storages] == [each._cdata for each in expected.storages]


@settings(max_examples=150, deadline=None)
@given(plain_states, plain_states)
def test_a_state_that_looks_like_the_last_one_is_laid_out_like_it(state, other):
    first = freeze({"part": state})
    assert freeze_again({"part": state}, first.looks) is not None
    again = freeze_again({"part": other}, first.looks)
    if again is not None:
        assert make_skeleton(again.parts["part"]).content == make_skeleton(copy.copy(other)).content
        plans = [plan_state(each, TorchTensors()) for each in (state, other)]
        assert plans[0] == plans[1]


def test_the_shards_of_fsdp2_are_copied_lazily(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(WIDTH, WIDTH)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = adamw(model.parameters())
        checkpointer = DdpCheckpointer(tmp_path / "checkpoints", lazy=True)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        result = checkpointer.save_checkpoint(1, {"model": dict(model.state_dict())}, storage_type=StorageType.MEMORY)
        expected = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        assert result.is_lazy
        optimizer.step()
        restored = checkpointer.load_checkpoint()["model"]
        assert_same({name: value.to_local() for name, value in restored.items()}, expected)
        checkpointer.close()
    finally:
        dist.destroy_process_group()
