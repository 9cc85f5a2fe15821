"""The page that a worker writes and its agent reads, and the hooks that write it: in real processes, with real torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.monitor.worker_view import WatchedWorker
from dlrover.agreed.stall_thresholds import bucket_of
from dlrover.protocol import progress_page as layout
from dlrover.protocol.messages.watch import Phase
from dlrover.protocol.progress_page import ProgressPage
from dlrover.trainer import phases
from dlrover.trainer.phases import PhaseWriter

DEADLINE = 120.0


@pytest.fixture
def page() -> Any:
    page = ProgressPage()
    yield page
    page.close()


def read(page: ProgressPage) -> layout.Reading:
    return page.read(time.monotonic_ns())


def test_every_nanosecond_is_in_one_phase(page: ProgressPage) -> None:
    writer = PhaseWriter(page.path)
    before = writer.enter(phases.DATA)
    writer.leave(before, phases.AFTER_DATA)
    writer.enter(phases.BACKWARD)
    now_ns = time.monotonic_ns()
    reading = page.read(now_ns)
    assert reading.phase is Phase.BACKWARD
    assert reading.pid == os.getpid()
    assert reading.num_changes == 3
    assert sum(reading.phase_ns.values()) == now_ns - reading.started_at_ns
    assert {phase: sum(counts) for phase in Phase if any(counts := reading.buckets(phase))} == {
        Phase.START: 1,
        Phase.DATA: 1,
        Phase.FORWARD: 1,
    }


@pytest.mark.parametrize("ns", [0, 511, 512, 1023, 1024, 50_000_000, 10**13])
def test_the_worker_counts_in_the_buckets_that_the_agent_reads(page: ProgressPage, ns: int) -> None:
    clock = iter([1_000, 1_000 + ns])
    PhaseWriter(page.path, now=lambda: next(clock)).enter(phases.DATA)
    counts = read(page).buckets(Phase.START)
    assert [index for index, count in enumerate(counts) if count] == [min(bucket_of(ns), layout.NUM_BUCKETS - 1)]


def test_numbers_that_are_none_are_carried(page: ProgressPage) -> None:
    writer = PhaseWriter(page.path)
    writer.set_metrics({"loss": math.nan, "grad_norm": math.inf, "x" * 100: 1.5})
    metrics = read(page).metrics
    assert math.isnan(metrics["loss"])
    assert metrics["grad_norm"] == math.inf
    assert metrics["x" * 39] == 1.5
    writer.set_metrics({str(number): float(number) for number in range(100)})
    assert len(read(page).metrics) == 32


def test_the_script_knows_its_step_better_than_a_checkpoint_and_that_better_than_counting(page: ProgressPage) -> None:
    writer = PhaseWriter(page.path)
    writer.set_step(1, layout.INFERRED)
    writer.set_step(100, layout.TOLD)
    writer.set_step(2, layout.INFERRED)
    assert read(page).step == 101
    writer.set_step(7, layout.REPORTED)
    writer.set_step(3, layout.INFERRED)
    writer.set_step(200, layout.TOLD)
    assert read(page).step == 7


def test_what_is_computed_in_a_step_is_told_apart_from_steps_with_a_save(page: ProgressPage) -> None:
    """Around the save files are opened and closed, in a phase that looks like computing."""
    now = [0]
    writer = PhaseWriter(page.path, now=lambda: now[0])
    writer.enter(phases.FORWARD)

    def stay(ns: int) -> None:
        now[0] += ns

    for step in range(1, 7):
        stay(10)
        before = writer.enter(phases.BACKWARD)
        stay(100)
        writer.leave(before)
        stay(2)
        writer.set_step(step, layout.INFERRED)
        if step in (2, 4):
            stay(5000)
            before = writer.enter(phases.CHECKPOINT)
            stay(7000)
            writer.leave(before)
            stay(3000)
    reading = read(page)
    assert reading.num_steps == 6
    assert reading.num_plain_steps == 3, "not the first, whose beginning is the start-up, nor the two with a save"
    assert reading.plain_ns == 3 * 12


def test_where_the_data_are_is_told_by_shards_rather_than_batches(page: ProgressPage) -> None:
    writer = PhaseWriter(page.path)
    writer.count_batch()
    assert read(page).cursor == "batch 1"
    writer.set_cursor("corpus epoch 0 records 5 to 9 " + "é" * 200)
    assert read(page).cursor.startswith("corpus epoch 0 records 5 to 9 é")


def test_a_page_of_rubbish_can_be_read(page: ProgressPage) -> None:
    copy = bytes(range(256)) * (layout.SIZE // 256)
    reading = layout.decode(copy, 5)
    assert reading.phase is Phase.START
    assert layout.decode(b"\xff" * layout.SIZE, 5).dump_signal == 0


def test_a_reader_does_not_wait_for_a_writer_that_was_stopped_in_the_middle(page: ProgressPage) -> None:
    writer = PhaseWriter(page.path)
    writer.words[layout.SEQUENCE] += 1  # and never again
    assert read(page).pid == os.getpid()


SCRIPT = """
import functools, inspect, json, os, pickle, sys, threading, time
from dlrover.trainer import environment, report; from dlrover.trainer.worker import hooks
from dlrover.trainer import phases
hooks.install(environment.read(os.environ))
assert "torch" not in sys.modules
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

notes = {}
original = inspect.unwrap(dist.all_reduce)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(12, 4))

class Own(DataLoader):
    pass

def inner():
    return phases.layout.PHASES[phases._writer.phase].value if phases._writer else None

class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        notes.setdefault("forward", inner())
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        notes.setdefault("backward", inner())
        return g

class Loading(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        notes.setdefault("data", inner())
        return torch.tensor([inner() is None])

for (x,) in Own(data, batch_size=4):
    Probe.apply(model(x)).sum().backward()
    optimizer.step(); second.step(); optimizer.zero_grad()
list(Loading() for _ in DataLoader(Loading()))
# Forked children have no page, and find nothing broken.
notes["children"] = [bool(each) for each in DataLoader(Loading(), num_workers=1)]
work = dist.all_reduce(torch.ones(2, 3), async_op=True)
work.wait()
dist.all_gather_object([None], {"a": 1})
dist.barrier()

notes["pickle"] = pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce and pickle.loads(pickle.dumps(torch.save)) is torch.save
notes["signature"] = str(inspect.signature(dist.all_reduce)) == str(inspect.signature(original))
notes["name"] = [dist.all_reduce.__name__, torch.autograd.backward.__name__, torch.nn.Module.eval.__name__]
notes["partial"] = functools.partial(torch.save)(torch.ones(1), os.devnull)

def thread():
    dist.all_reduce(torch.ones(1))
    notes["thread"] = phases.current() is None
elsewhere = threading.Thread(target=thread); elsewhere.start(); elsewhere.join()

if "compile" in sys.argv:
    exec(os.environ["COMPILING"])

model.eval()
for (x,) in DataLoader(data, batch_size=4):
    with torch.no_grad():
        model(x)
notes["evaluation"] = inner()
model.train()
Probe.apply(model(x)).sum().backward()
optimizer.step()
notes["after"] = inner()
try:
    with phases.span(phases.CHECKPOINT):
        notes["span"] = inner()
        raise KeyError
except KeyError:
    notes["raised"] = inner()
with __import__("warnings").catch_warnings(record=True) as caught:
    __import__("warnings").simplefilter("always")
    report(50, loss=torch.tensor(1.5), bad="text")
notes["warned"] = [str(each.message)[:40] for each in caught]
# As the agent asks, while we wait as in a collective that hangs.
os.write(os.open(os.environ["DLROVER_RECORDER_PIPE"], os.O_WRONLY), b"?")
deadline = time.monotonic() + 30
while not os.stat(os.environ["DLROVER_RECORDER_FILE"]).st_size and time.monotonic() < deadline:
    time.sleep(0.01)
dist.destroy_process_group()
print(json.dumps(notes))
"""

COMPILING = """
def train(x):
    loss = (model.module(x) ** 2).sum()
    t = loss.detach().clone()
    dist.all_reduce(t)
    return loss + t
compiled = torch.compile(train, backend="eager", fullgraph=True)
compiled(torch.randn(2, 4)).backward()

@torch.compile(backend="eager")
def whole(x):
    model.module(x).sum().backward()
    optimizer.step()
whole(torch.randn(2, 4))
"""


@pytest.mark.parametrize("is_compiling", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_torch_tells_what_it_is_doing_and_scripts_see_no_difference(tmp_path: Path, is_compiling: bool) -> None:
    seat = WatchedWorker(local_rank=0, global_rank=0)
    try:
        (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
        done = subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", "script.py", *(["compile"] if is_compiling else [])],
            cwd=tmp_path,
            env={
                **os.environ,
                **seat.environment(),
                "COMPILING": COMPILING,
                "PYTHONPATH": os.getcwd(),
                "DLROVER_AGENT_SOCKET": str(tmp_path / "none"),
                "DLROVER_PROGRESS_HOOKS": "1",
                "DLROVER_CANARY_EVERY": "2",
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        notes = json.loads(done.stdout.splitlines()[-1])
        assert (notes["data"], notes["forward"], notes["backward"]) == ("data", "forward", "backward")
        assert notes["children"] == [True] * 4
        assert notes["pickle"]
        assert notes["signature"]
        assert notes["thread"]
        assert notes["name"] == ["all_reduce", "backward", "eval"]
        assert (notes["evaluation"], notes["after"]) == ("evaluation", "forward")
        assert (notes["span"], notes["raised"]) == ("checkpoint", "forward")
        assert notes["warned"] == ["dlrover.trainer.report: bad='text' is no"]
        reading = seat.read()
        assert reading.phase is Phase.END
        assert reading.step == 50
        assert reading.metrics == {"loss": 1.5}
        assert {phase for phase, ns in reading.phase_ns.items() if ns} == set(Phase) - (
            {Phase.RESTORE} if is_compiling else {Phase.RESTORE, Phase.COMPILE}
        )
        assert reading.collective is not None
        assert reading.collective.operation == "barrier"
        # One all_reduce, one all_gather_object and one barrier; what a thread or dynamo did is not the main thread's.
        assert reading.collective.sequence == 3
        assert not reading.collective.is_inside
        assert len(reading.digest) == 16
        # torch's own recorder knows the collectives of DDP, too.
        assert reading.has_recorder
        assert reading.has_hooks
        recorded = seat.recorded()
        assert "barrier" in {each.operation for each in recorded}
        assert {each.shape for each in recorded} >= {"float[2,3]"}
        assert len({each.sequence for each in recorded}) > 4
        assert reading.cursor.startswith("batch ")
    finally:
        seat.close()


def test_a_worker_without_torch_does_not_import_it(tmp_path: Path) -> None:
    seat = WatchedWorker(local_rank=0, global_rank=0)
    try:
        code = """
            import os, sys, importlib.util
            from dlrover.trainer import environment; from dlrover.trainer.worker import hooks
            hooks.install(environment.read(os.environ))
            assert importlib.util.find_spec("torch") is not None  # to ask is not to import
            assert importlib.util.find_spec("no_such_module_at_all") is None
            assert "torch" not in sys.modules
        """
        environ = {**os.environ, **seat.environment(), "DLROVER_AGENT_SOCKET": "x", "DLROVER_PROGRESS_HOOKS": "1"}
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environ, timeout=DEADLINE, check=True)
        assert seat.read().phase is Phase.END
        assert not seat.progress().has_hooks
    finally:
        seat.close()
