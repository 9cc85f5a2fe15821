from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.agent.config import EntryKind, WatchConfig, WorkerLogConfig
from dlrover.agent.monitor.progress import WorkerWatch
from dlrover.agent.workers.devices import resolve_local_world_size
from dlrover.agent.workers.group import HEAD_START, Failed, Finished, PortOffer, split_address, worker_environment
from dlrover.agent.workers.output import WorkerFiles, WorkerOutput
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner, StartFailed
from dlrover.agreed.mistakes import may_be_mistake
from dlrover.agreed.worker_failure import traceback_digest
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import FailureKind, JobTerms, RestartPolicy, StopCause
from tests.agent.lab import DEADLINE, group_of, is_gone, make_config, make_world, until, write

FILES = WorkerFiles(local_rank=0, stdin=-1, stdout=-1, stderr=-1, error_file="/e/error.json")


async def wait(group) -> Finished | Failed:
    return await asyncio.wait_for(group.wait(), DEADLINE)


async def test_all_end_well_with_the_greatest_step(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import os
        from dlrover.trainer import report
        for step in range(10 + int(os.environ["RANK"])):
            report(step)
        """,
    )
    config = make_config(tmp_path / "rt", script)
    async with group_of(spawner, tree, config) as group:
        outcome = await wait(group)
        assert isinstance(outcome, Finished)
        await until(lambda: group.step == 10)
        await group.stop(StopCause.END_OF_JOB)


@pytest.mark.parametrize(
    ("source", "kind", "exit_code", "number", "message"),
    [
        ("raise ValueError('bad')", FailureKind.EXCEPTION, 1, None, "ValueError: bad"),
        ("import os; os._exit(3)", FailureKind.EXIT_CODE, 3, None, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", FailureKind.SIGNAL, None, 9, "ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", FailureKind.SIGNAL, None, 11, "ended by SIGSEGV"),
        ("x = 'a' * (1 << 60)", FailureKind.MEMORY_ERROR, 1, None, "MemoryError: "),
        ("x = (", FailureKind.BAD_SCRIPT, 1, None, "SyntaxError: '(' was never closed (train.py, line 1)"),
        ("import no_such", FailureKind.BAD_SCRIPT, 1, None, "ModuleNotFoundError: No module named 'no_such'"),
        ("import sys; sys.exit('given up')", FailureKind.EXIT_CODE, 1, None, "exit code 1"),
    ],
)
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
async def test_each_way_to_die_is_named(
    spawner: Spawner, cold_spawner: Spawner, tree: ProcessTree, tmp_path: Path,
    source: str, kind: FailureKind, exit_code: int | None, number: int | None, message: str, is_warm: bool,
) -> None:  # fmt: skip
    script = write(tmp_path / "train.py", source)
    config = make_config(tmp_path / "rt", script, local_world_size=1)
    began_at = time.time_ns() // 1000
    async with group_of(spawner if is_warm else cold_spawner, tree, config) as group:
        outcome = await wait(group)
        assert isinstance(outcome, Failed)
        (failure,) = outcome.failures
        assert (failure.kind, failure.exit_code, failure.signal) == (kind, exit_code, number)
        expected = message if is_warm else message.removesuffix(": ").removesuffix(" (train.py, line 1)")
        assert failure.message == expected.strip()
        assert failure.pid in group.pids
        assert began_at <= failure.exited_at <= time.time_ns() // 1000
        if exit_code == 1 and kind is not FailureKind.EXIT_CODE:
            assert "Error" in failure.traceback
            assert failure.log_tail


async def test_the_first_failure_is_told_at_once_and_the_rest_stopped(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import os, signal, subprocess, sys
        if os.environ["LOCAL_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(os.environ["TORCHELASTIC_ERROR_FILE"] + ".pid", "w") as file:
            file.write(str(child.pid))
        signal.pause()
        """,
    )
    config = make_config(tmp_path / "rt", script, local_world_size=3)
    begun_at = time.monotonic()
    async with group_of(spawner, tree, config) as group:
        outcome = await wait(group)
        assert isinstance(outcome, Failed)
        assert [(failure.global_rank, failure.kind) for failure in outcome.failures] == [(1, FailureKind.SIGNAL)]
        assert 0 < outcome.lived < time.monotonic() - begun_at
        notes = list((tmp_path / "rt").rglob("*.pid"))
        began_at = time.monotonic()
        await group.stop(StopCause.FAILURE)
        assert time.monotonic() - began_at < 20, "less than at the end of a job"
        sleepers = [int(path.read_text() or 0) for path in notes]
        assert all(is_gone(pid) for pid in (*group.pids, *filter(None, sleepers)))


MISTAKEN = """
    import os, sys, time
    from dlrover.trainer import report

    if "stepped" in sys.argv:
        report(1)
    while os.environ["RANK"] == "1" and not os.path.exists("go"):
        time.sleep(0.01)
    raise LookupError("no such model")
    """


async def test_workers_that_are_about_to_make_the_same_mistake_may_do_so_before_they_are_stopped(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path / "rt", write(tmp_path / "train.py", MISTAKEN), terms=JobTerms())
    watch = WorkerWatch(config.watch)
    async with group_of(spawner, tree, config, watch=watch, alike_patience=DEADLINE) as group:
        outcome = await wait(group)
        assert isinstance(outcome, Failed)
        assert group.may_be_mistaken
        waiting = asyncio.create_task(group.await_alike())
        (tmp_path / "go").touch()
        await waiting
        failures = (*outcome.failures, *await group.stop(StopCause.FAILURE))
        assert sorted(failure.global_rank for failure in failures) == [0, 1]
        assert {traceback_digest(failure) for failure in failures} == {traceback_digest(failures[0])}
        assert all(map(may_be_mistake, failures))
        assert failures[0].exceptions == ("LookupError", "Exception", "BaseException")


@pytest.mark.parametrize(
    ("args", "changes", "world"),
    [
        (["stepped"], {}, {}),
        ([], {}, {"round": 2}),
        ([], {"terms": JobTerms(restarts=RestartPolicy(max_restarts=1))}, {}),
        ([], {"watch": WatchConfig(has_hooks=False)}, {}),
    ],
    ids=["after a step", "in a later life", "restarts are asked for", "nobody counts steps"],
)
async def test_otherwise_a_failure_is_not_taken_for_a_mistake(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, args: list[str], changes: dict[str, object],
    world: dict[str, int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    changes = {"terms": JobTerms(), **changes}
    config = make_config(tmp_path / "rt", write(tmp_path / "train.py", MISTAKEN), *args, **changes)
    watch = WorkerWatch(config.watch)
    async with group_of(spawner, tree, config, make_world(2, **world), watch=watch) as group:
        assert isinstance(await wait(group), Failed)
        assert not group.may_be_mistaken


async def test_deaths_at_the_same_time_are_reported_together_earliest_first(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    """The second one dies when the first is known to be gone; the time for that is long here, whatever the machine does meanwhile."""
    script = write(tmp_path / "train.py", "import signal; signal.pause()")
    config = make_config(tmp_path / "rt", script)
    async with group_of(spawner, tree, config, simultaneous=2 * DEADLINE) as group:
        waiting = asyncio.create_task(wait(group))
        for pid in reversed(group.pids):
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: is_gone(pid))
        outcome = await waiting
        assert isinstance(outcome, Failed)
        assert [failure.local_rank for failure in outcome.failures] == [1, 0]
        assert outcome.failures[0].exited_at <= outcome.failures[1].exited_at


class GatedOutput(WorkerOutput):
    """Last words are copied when the test says so."""

    gate: asyncio.Event
    num_waiting = 0

    async def drain(self, files: WorkerFiles) -> None:
        GatedOutput.num_waiting += 1
        await GatedOutput.gate.wait()
        await super().drain(files)


async def test_each_failure_is_told_once_although_two_wait_for_the_last_words_of_the_same_worker(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    GatedOutput.gate, GatedOutput.num_waiting = asyncio.Event(), 0
    script = write(tmp_path / "train.py", "import os; os._exit(3)")
    config = make_config(tmp_path / "rt", script)
    async with group_of(spawner, tree, config, kind_of_output=GatedOutput) as group:
        await until(lambda: all(map(is_gone, group.pids)))
        waiting = asyncio.create_task(wait(group))
        await until(lambda: GatedOutput.num_waiting == 2)
        stopping = asyncio.create_task(group.stop(StopCause.MEMBERSHIP))
        await until(lambda: GatedOutput.num_waiting == 4)
        GatedOutput.gate.set()
        outcome, late = await asyncio.gather(waiting, stopping)
        assert isinstance(outcome, Failed)
        assert sorted(failure.global_rank for failure in (*outcome.failures, *late)) == [0, 1]


async def test_a_worker_leaves_it_to_the_agent_whether_the_console_hears_of_a_lost_peer_or_of_ctrl_c(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import atexit, os, signal, sys
        rank = int(os.environ["RANK"])
        sys.stderr.write(f"begins {rank}\\n")
        atexit.register(lambda: sys.stderr.write(f"exits {rank}\\n"))
        if rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:2981")
        if rank == 1:
            raise ValueError("of its own")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGINT)
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
        raise RuntimeError("Connection closed by peer, in a file of the script's")
        """,
    )
    own = tmp_path / "own"
    config = make_config(tmp_path / "rt", script, str(own), local_world_size=4)
    async with group_of(spawner, tree, config) as group:
        await until(lambda: all(map(is_gone, group.pids)))
        outcome = await wait(group)
        assert isinstance(outcome, Failed)
        kinds = {failure.global_rank: failure.kind for failure in outcome.failures}
        assert kinds == {
            0: FailureKind.PEER_LOST,
            1: FailureKind.EXCEPTION,
            2: FailureKind.SIGNAL,
            3: FailureKind.PEER_LOST,
        }
        await group.stop(StopCause.FAILURE)
        shown = capfd.readouterr().err
        assert all(f"begins {rank}" in shown for rank in range(4))
        assert "ValueError: of its own" in shown
        assert "exits 1" in shown
        assert "closed by peer" not in shown
        assert "KeyboardInterrupt" not in shown
        assert "exits 0" not in shown, "it comes after what is held back"
        assert "in a file of the script's" in own.read_text()
    late = capfd.readouterr().err
    assert late.index("RuntimeError: Connection closed by peer [127.0.0.1]") < late.index("exits 0"), "nobody decided"
    assert "KeyboardInterrupt" in late


async def test_workers_that_we_stop_are_told_apart(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "import signal; signal.pause()")
    config = make_config(tmp_path / "rt", script)
    async with group_of(spawner, tree, config) as group:
        waiting = asyncio.create_task(group.wait())
        await asyncio.sleep(0)
        await group.stop(StopCause.MEMBERSHIP)
        outcome = await asyncio.wait_for(waiting, DEADLINE)
        assert isinstance(outcome, Failed)
        assert {failure.kind for failure in outcome.failures} == {FailureKind.STOPPED_BY_US}


async def test_a_handler_gets_its_grace_and_the_signal_that_was_asked_for(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import os, signal, sys, time
        def leave(number, frame):
            open(sys.argv[1] + os.environ["RANK"], "w").write(str(number))
            sys.exit(0)
        signal.signal(signal.SIGINT, leave)
        open(sys.argv[1] + os.environ["RANK"] + ".ready", "w")
        while True:
            time.sleep(0.001)  # a signal just before `signal.pause()` would be handled when that is over
        """,
    )
    config = make_config(tmp_path / "rt", script, str(tmp_path / "note"))
    async with group_of(spawner, tree, config) as group:
        await until(lambda: len(list(tmp_path.glob("note*.ready"))) == 2)
        await group.stop(StopCause.END_OF_JOB, signal.SIGINT)
        assert [(tmp_path / f"note{rank}").read_text() for rank in range(2)] == ["2", "2"]


class Pauses:
    """Stands in for `asyncio.sleep`: notes how long, and who runs when the pause begins."""

    def __init__(self, folder: Path, *, awaited: tuple[int, ...]) -> None:
        self._folder = folder
        self._awaited = awaited
        self.seen: list[tuple[float, list[int]]] = []

    def running(self) -> list[int]:
        return sorted(int(path.suffix[1:]) for path in self._folder.glob("rank.*"))

    async def sleep(self, seconds: float) -> None:
        await until(lambda: set(self.running()) >= set(self._awaited))
        self.seen.append((seconds, self.running()))


@pytest.mark.parametrize(
    ("first_global_rank", "ahead"), [(0, (0,)), (3, ())], ids=["with global rank 0", "beside the node of global rank 0"]
)
async def test_global_rank_0_has_a_head_start(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, first_global_rank: int, ahead: tuple[int, ...]
) -> None:
    script = write(tmp_path / "train.py", "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w')")
    config = make_config(tmp_path / "rt", script, str(tmp_path / "rank."), local_world_size=3)
    world = make_world(3, first_global_rank=first_global_rank, world_size=6)
    await spawner.count_devices("cpu")  # from here on it knows that it is warm
    pauses = Pauses(tmp_path, awaited=ahead)
    async with group_of(spawner, tree, config, world, sleep=pauses.sleep) as group:
        assert isinstance(await wait(group), Finished)
    assert pauses.seen == [(HEAD_START, list(ahead))]
    assert pauses.running() == list(range(first_global_rank, first_global_rank + 3))


@pytest.mark.parametrize("reason", ["cold", "alone"])
async def test_nobody_waits_for_a_head_start_that_helps_nobody(
    spawner: Spawner, cold_spawner: Spawner, tree: ProcessTree, tmp_path: Path, reason: str
) -> None:
    script = write(tmp_path / "train.py", "")
    config = make_config(tmp_path / "rt", script, local_world_size=1 if reason == "alone" else 2)
    pauses = Pauses(tmp_path, awaited=())
    async with group_of(cold_spawner if reason == "cold" else spawner, tree, config, sleep=pauses.sleep) as group:
        assert isinstance(await wait(group), Finished)
    assert pauses.seen == []


async def test_what_cannot_be_started_is_a_failure_not_an_error(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "rt", "/no/such/program", kind=EntryKind.PROGRAM)
    async with group_of(spawner, tree, config) as group:
        outcome = await wait(group)
        assert isinstance(outcome, Failed)
        assert {failure.kind for failure in outcome.failures} == {FailureKind.START_FAILED}
        assert "cannot start /no/such/program: No such file or directory" in outcome.failures[0].message


async def test_local_rank_is_put_into_arguments_and_functions_return(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    program = write(tmp_path / "prog", '#!/bin/sh\necho "$1" > "$2"\n')
    os.chmod(program, 0o755)
    target = str(tmp_path / "arg${local_rank}")
    config = make_config(tmp_path / "rt", program, "$x ${local_rank}", target, kind=EntryKind.PROGRAM)
    async with group_of(spawner, tree, config) as group:
        assert isinstance(await wait(group), Finished)
    assert [(tmp_path / f"arg{rank}").read_text() for rank in range(2)] == ["$x 0\n", "$x 1\n"]


async def test_error_and_log_files_are_named_in_the_failure(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "train.py", "raise ValueError('bad')")
    log = WorkerLogConfig(log_dir=str(tmp_path / "logs"), redirect_default=3)
    config = make_config(tmp_path / "rt", script, local_world_size=1, log=log)
    async with group_of(spawner, tree, config, make_world(1, restart_count=4)) as group:
        outcome = await wait(group)
    assert isinstance(outcome, Failed)
    (failure,) = outcome.failures
    assert failure.log_file.endswith("/attempt_4/0/stderr.log")
    assert failure.error_file.endswith("/attempt_4/0/error.json")
    assert failure.log_tail == Path(failure.log_file).read_text() == failure.traceback


@pytest.mark.peer
def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    script = write(
        tmp_path / "dump.py",
        "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))",
    )
    base = {"PATH": os.environ["PATH"], "HOME": "/", "LC_CTYPE": "C.UTF-8"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--role=r"]
    subprocess.run(
        [*torchrun, script, str(tmp_path / "rank")], check=True, env=base, timeout=2 * DEADLINE, capture_output=True
    )
    config = make_config(tmp_path, script, role="r")
    for rank in range(2):
        theirs = json.loads((tmp_path / f"rank{rank}").read_text())
        ours = worker_environment(
            base, config, make_world(), node_rank=0, local_rank=rank, files=FILES, agent_socket="/s"
        )
        differing = {
            "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
        }  # fmt: skip
        assert differing <= set(ours)
        added = {name for name in ours if name not in theirs}
        assert added == {
            "DLROVER_AGENT_SOCKET", "DLROVER_HELD_STDERR", "DLROVER_JOB_AGE", "DLROVER_JOB_NAME", "DLROVER_LOCAL_RANK", "DLROVER_MAX_NODES",
            "DLROVER_NODE_RANK", "DLROVER_PARAL_CONFIG_PATH", "DLROVER_ROUND", "DLROVER_TURNS", "RUNTIME_METRICS_PATH",
        }  # fmt: skip
        keep = set(theirs) - differing
        assert {name: ours.get(name) for name in keep} == {name: theirs[name] for name in keep}


def test_the_environment_of_a_second_node() -> None:
    world = make_world(
        group_rank=1,
        group_world_size=2,
        first_global_rank=2,
        world_size=4,
        coordinator="[fd00::1]:4711",
        restart_count=3,
    )
    config = make_config(Path("/run/x"), "t.py", terms=JobTerms(restarts=RestartPolicy(max_restarts=None)))
    base = {"OMP_NUM_THREADS": "6", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "RANK": "99"}
    environ = worker_environment(base, config, world, node_rank=5, local_rank=1, files=FILES, agent_socket="/s")
    assert environ["RANK"] == environ["ROLE_RANK"] == "3"
    assert (environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"], environ["WORLD_SIZE"]) == ("1", "2", "4")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("fd00::1", "4711")
    assert (environ["OMP_NUM_THREADS"], environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("6", "0")
    assert (environ["TORCHELASTIC_RESTART_COUNT"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("3", "0")
    assert (environ["DLROVER_NODE_RANK"], environ["RUNTIME_METRICS_PATH"]) == ("5", "/run/x/runtime_metrics.json")
    assert base["RANK"] == "99"


def test_one_worker_alone_may_use_all_threads() -> None:
    config = make_config(Path("/x"), "t.py")
    environ = worker_environment({}, config, make_world(1), node_rank=0, local_rank=0, files=FILES, agent_socket="/s")
    assert "OMP_NUM_THREADS" not in environ


def test_virtual_local_ranks_choose_the_device_by_visibility() -> None:
    config = make_config(Path("/x"), "t.py", is_virtual_local_rank=True)

    def device(visible: str | None, local_rank: int) -> tuple[str, str, str]:
        base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        environ = worker_environment(
            base, config, make_world(), node_rank=0, local_rank=local_rank, files=FILES, agent_socket="/s"
        )
        return environ["LOCAL_RANK"], environ["CUDA_VISIBLE_DEVICES"], environ["DLROVER_LOCAL_RANK"]

    assert device(None, 1) == ("0", "1", "1")
    assert device("4, 6", 1) == ("0", "6", "1")
    with pytest.raises(StartFailed, match="CUDA_VISIBLE_DEVICES=4"):
        device("4", 1)


def test_an_offered_port_is_nobody_elses_and_free_afterwards() -> None:
    offer = PortOffer.bind("node-1")
    host, port = split_address(offer.address)
    assert host == "node-1"
    assert 20_000 <= int(port) < 30_000
    with pytest.raises(OSError, match="ports"):
        PortOffer.bind("node-1", [int(port)])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=1)
    offer.release()
    offer.release()
    again = PortOffer.bind("fd00::1", [int(port)])
    assert again.address == f"[fd00::1]:{port}"
    again.release()


def test_listed_ports_are_taken_in_order_and_used_again_after_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        first = PortOffer.bind("h")
        port = int(split_address(first.address)[1])
        first.release()
        offer = PortOffer.bind("h", [taken, port])
        assert offer.address == f"h:{port}"
        offer.release()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = server.accept()
        accepted.close()  # our side closes first and keeps the port in its last minute
        client.recv(1)
    offer = PortOffer.bind("h", [port])
    assert offer.address == f"h:{port}"
    offer.release()


async def test_the_number_of_workers_is_a_number_or_the_nodes_own(spawner: Spawner, tmp_path: Path) -> None:
    for asked, expected in ((3, 3), ("2", 2), ("auto", len(os.sched_getaffinity(0)))):
        assert await resolve_local_world_size(make_config(tmp_path, "t", local_world_size=asked), spawner) == expected
    for asked in (0, "gpu"):
        with pytest.raises(ConfigError, match="--nproc-per-node"):
            await resolve_local_world_size(make_config(tmp_path, "t", local_world_size=asked), spawner)
