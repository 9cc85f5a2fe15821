from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.config import EntryKind
from dlrover.agent.workers import spawner as spawner_module
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner, StartFailed
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.spawning import Forked, FromZygote
from tests.agent.lab import (
    DEADLINE,
    Ended,
    descriptors,
    descriptors_of,
    environment,
    is_alive,
    is_gone,
    run_worker,
    start_process,
    until,
    write,
)


async def until_prepared(spawner: Spawner) -> None:
    """Questions are answered in order, and only after the imports."""
    await spawner.count_devices("cpu")


def idle_order(scratch: Path) -> dict[str, Any]:
    """Arguments of `spawn` for a worker that leaves a mark if it ever runs."""
    script = write(scratch / "mark.py", f"open({str(scratch / 'mark')!r}, 'a').write('x')")
    return {"kind": EntryKind.SCRIPT, "target": script, "args": (), "environ": environment(), "streams": (0, 1, 2)}


@pytest.fixture
async def own_spawner(kept: list[Callable[[], Collection[int]]], tmp_path: Path) -> AsyncIterator[Spawner]:
    """A cold one, for tests that harm it. Its zygotes end at their start while there is a file `ill`."""
    own = Spawner.start(
        is_warm=False,
        environ=python_with("import os; os.path.exists(os.environ['ILL']) and os._exit(3)", tmp_path),
        restart_delays=(0.01, 0.02, 0.03),
    )
    kept.append(lambda: own.zygote_pids)
    yield own
    own.close()


def python_with(code: str, folder: Path) -> dict[bytes, bytes]:
    """An environment in which every Python runs this before all else. It may name files of the folder."""
    write(folder / "python" / "sitecustomize.py", code)
    return environment(PYTHONPATH=str(folder / "python"), ILL=str(folder / "ill"), TWIN=str(folder / "twin"))


def test_starting_needs_neither_asyncio_nor_grpc() -> None:
    code = """
import sys
from dlrover.agent.workers.spawner import Spawner
spawner = Spawner.start(is_warm=False)
assert not {"asyncio", "grpc", "psutil", "torch", "dlrover.trainer"} & set(sys.modules), sorted(sys.modules)
spawner.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


async def test_requests_may_come_while_the_zygote_still_imports(tmp_path: Path) -> None:
    spawner = Spawner.start()
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        script = write(tmp_path / "early.py", "import sys; print('torch' in sys.modules, end='')")
        big = environment(BULK="x" * 120_000)
        early = [
            asyncio.create_task(run_worker(spawner, tree, script, str(i), scratch=tmp_path, environ=big))
            for i in range(4)
        ]
        assert [(ended.code, ended.stdout) for ended in await asyncio.gather(*early)] == [(0, "True")] * 4
        assert spawner.is_warm
    finally:
        spawner.close()
        tree.close()


async def test_a_dead_zygote_harms_no_worker_and_is_replaced(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "stay.py", "import os, sys; os.mkfifo(sys.argv[1]); print(open(sys.argv[1]).read())")
    gate = tmp_path / "gate"
    staying = asyncio.create_task(run_worker(spawner, tree, script, str(gate), scratch=tmp_path))
    await until(gate.exists)
    former = spawner.zygote_pids[0]
    os.kill(former, signal.SIGKILL)
    ended = await run_worker(spawner, tree, write(tmp_path / "next.py", "print('next')"), scratch=tmp_path)
    assert ended.stdout == "next\n"
    assert spawner.zygote_pids[0] != former
    assert is_gone(former)
    assert not staying.done()
    await asyncio.to_thread(gate.write_text, "still here")
    assert (await staying).stdout == "still here\n"


async def test_workers_of_another_zygote_keep_the_users_limit_of_open_files(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    """The agent has raised its own meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    script = write(tmp_path / "limit.py", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))  # to be told apart where ours cannot grow
    try:
        os.kill(spawner.zygote_pids[0], signal.SIGKILL)
        ended = await run_worker(spawner, tree, script, scratch=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ended.stdout == f"{(soft, hard)}\n"


async def test_a_request_that_the_dead_zygote_had_not_answered_is_repeated_once(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    await until_prepared(spawner)
    former = spawner.zygote_pids[0]
    marks = tmp_path / "marks"
    script = write(tmp_path / "mark.py", f"open({str(marks)!r}, 'a').write('x')")
    os.kill(former, signal.SIGSTOP)  # it will never read what we send now
    asked = [asyncio.create_task(run_worker(spawner, tree, script, scratch=tmp_path)) for _ in range(2)]
    await asyncio.sleep(0)
    os.kill(former, signal.SIGKILL)
    assert [ended.code for ended in await asyncio.gather(*asked)] == [0, 0]
    assert marks.read_text() == "xx"


async def test_a_worker_that_is_never_released_runs_nothing(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    script = write(tmp_path / "mark.py", f"open({str(mark)!r}, 'w')")
    leash = await spawner.spawn(kind=EntryKind.SCRIPT, target=script, args=(), environ=environment(), streams=(0, 1, 2))
    exited = tree.watch(leash.pid)
    leash.close()
    assert (await asyncio.wait_for(exited, DEADLINE)).exit_code == 0
    assert not mark.exists()


async def test_where_no_zygote_survives_every_request_is_refused(
    own_spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    order = idle_order(tmp_path)
    await until_prepared(own_spawner)
    ill = tmp_path / "ill"
    ill.touch()
    os.kill(own_spawner.zygote_pids[0], signal.SIGKILL)
    for _round in range(2):
        with pytest.raises(StartFailed, match=r"that start workers ended|failed several times in a row"):
            await asyncio.wait_for(own_spawner.spawn(**order), DEADLINE)
    await until(lambda: not own_spawner.zygote_pids)
    with pytest.raises(StartFailed, match="failed several times in a row"):
        await asyncio.wait_for(own_spawner.spawn(**order), DEADLINE)
    assert own_spawner.zygote_pids == ()
    ill.unlink()
    ended = await run_worker(own_spawner, tree, write(tmp_path / "s.py", "print('well')"), scratch=tmp_path)
    assert ended.stdout == "well\n"


async def test_a_kernel_that_has_no_process_for_a_zygote_is_asked_again(
    own_spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = idle_order(tmp_path)
    num_refusals = 0

    def refuse(*_arguments: object, **_options: object) -> None:
        nonlocal num_refusals
        num_refusals += 1
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    await until_prepared(own_spawner)
    former = own_spawner.zygote_pids[0]
    os.kill(former, signal.SIGSTOP)
    waiting = asyncio.create_task(own_spawner.spawn(**order))
    await asyncio.sleep(0)
    before = descriptors()
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        os.kill(former, signal.SIGKILL)
        with pytest.raises(StartFailed, match="Resource temporarily unavailable"):
            await asyncio.wait_for(waiting, DEADLINE)
        await until(lambda: num_refusals == 4)
        assert own_spawner._restart is None, "tried for ever"
        with pytest.raises(StartFailed, match="Resource temporarily unavailable"):
            await asyncio.wait_for(own_spawner.spawn(**order), DEADLINE)
        assert num_refusals == 5
        assert descriptors() < before
    leash = await own_spawner.spawn(**order)  # asks again itself
    leash.close()

    popen = subprocess.Popen
    with monkeypatch.context() as full:
        full.setattr(
            subprocess, "Popen", lambda *words, **options: (popen if num_refusals > 5 else refuse)(*words, **options)
        )
        os.kill(own_spawner.zygote_pids[0], signal.SIGKILL)
        await until(lambda: num_refusals == 6 and own_spawner.zygote_pids)  # without anybody asking
    leash = await own_spawner.spawn(**order)
    leash.close()
    assert own_spawner._restart is None


DIES_AFTER_ITS_FIRST_FORK = """
import os, signal

def note_own_pid():
    if not os.path.exists(os.environ["TWIN"]):
        with open(os.environ["TWIN"] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, os.environ["TWIN"])

def die():
    if not os.path.exists(os.environ["ILL"]):
        open(os.environ["ILL"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

os.register_at_fork(after_in_parent=die, after_in_child=note_own_pid)
"""


async def test_a_worker_that_nobody_heard_of_does_not_share_the_leash_of_its_twin(
    tree: ProcessTree, kept: list[Callable[[], Collection[int]]], tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    spawner = Spawner.start(is_warm=False, environ=python_with(DIES_AFTER_ITS_FIRST_FORK, tmp_path))
    kept.append(lambda: spawner.zygote_pids)
    try:
        marks = tmp_path / "marks"
        script = write(tmp_path / "s.py", f"import os; open({str(marks)!r}, 'a').write(f'{{os.getpid()}} ')")
        ended = await asyncio.wait_for(run_worker(spawner, tree, script, scratch=tmp_path), DEADLINE)
        assert ended.code == 0
        assert (tmp_path / "ill").exists(), "the first zygote forked, and died"
        await until(twin.exists)
        assert int(twin.read_text()) != ended.pid
        await until(lambda: is_gone(int(twin.read_text())))
        assert marks.read_text() == f"{ended.pid} "
    finally:
        spawner.close()


async def test_a_zygote_that_dies_while_requests_are_repeated_gets_none_twice(
    own_spawner: Spawner, tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_prepared(own_spawner)
    former = own_spawner.zygote_pids[0]
    script = write(tmp_path / "s.py", "print('ran')")
    os.kill(former, signal.SIGSTOP)
    asked = [asyncio.create_task(run_worker(own_spawner, tree, script, scratch=tmp_path)) for _ in range(2)]
    await asyncio.sleep(0)
    send_some = spawner_module.send_some
    outcomes = [BrokenPipeError(errno.EPIPE, "Broken pipe")]

    def fail_once(*arguments: Any) -> int:
        if outcomes:
            raise outcomes.pop()
        return send_some(*arguments)

    monkeypatch.setattr(spawner_module, "send_some", fail_once)
    os.kill(former, signal.SIGKILL)
    assert [ended.stdout for ended in await asyncio.wait_for(asyncio.gather(*asked), DEADLINE)] == ["ran\n"] * 2
    assert not outcomes
    await until(lambda: tree._of_workers() == [])


@pytest.mark.parametrize("moment", ["sent", "answered"])
async def test_a_cancelled_start_leaves_nothing_behind(
    own_spawner: Spawner, tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    await until_prepared(own_spawner)
    zygote = own_spawner.zygote_pids[0]
    before = descriptors(), descriptors_of(zygote)
    if moment == "sent":
        os.kill(zygote, signal.SIGSTOP)
    asked = asyncio.create_task(own_spawner.spawn(**idle_order(tmp_path)))
    if moment == "sent":
        await asyncio.sleep(0)
        asked.cancel()
    else:
        take = own_spawner._take

        def take_and_cancel(message: FromZygote) -> None:
            take(message)
            if isinstance(message, Forked):
                asked.cancel()

        monkeypatch.setattr(own_spawner, "_take", take_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert descriptors() <= before[0]
    os.kill(zygote, signal.SIGCONT)
    leash = await own_spawner.spawn(**idle_order(tmp_path))  # behind the one that was cancelled
    leash.close()
    await until(lambda: tree._of_workers() == [])
    await until(lambda: descriptors_of(zygote) == before[1])
    assert own_spawner.zygote_pids == (zygote,)
    assert not (tmp_path / "mark").exists()


async def test_a_start_that_is_refused_here_leaves_no_descriptor(
    own_spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_prepared(own_spawner)
    order = idle_order(tmp_path)
    before = descriptors()
    with pytest.raises(StartFailed, match="The worker cannot start"):
        await own_spawner.spawn(**order | {"args": ("x" * 5_000_000,)})
    assert descriptors() <= before

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(StartFailed, match="Too many open files"):
        await own_spawner.spawn(**order)
    assert descriptors() <= before


async def test_descriptors_that_a_library_opened_stay_open_in_workers(tmp_path: Path) -> None:
    write(tmp_path / "holder.py", "import os; descriptor = os.open('/dev/zero', os.O_RDONLY)")
    spawner = Spawner.start(preload=["holder"], search_path=str(tmp_path))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        script = write(tmp_path / "s.py", "import holder, os; print(os.readlink(f'/proc/self/fd/{holder.descriptor}'))")
        ended = await run_worker(spawner, tree, script, scratch=tmp_path)
        assert ended.stdout == "/dev/zero\n", ended.stderr
    finally:
        spawner.close()
        tree.close()


async def test_fifty_workers_leave_no_descriptor_behind(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    await until_prepared(spawner)
    script = write(tmp_path / "short.py", "import os; os._exit(0)")
    zygote = spawner.zygote_pids[0]
    await run_worker(spawner, tree, script, scratch=tmp_path)
    before = descriptors(), descriptors_of(zygote)
    for _ in range(25):
        ended = await asyncio.gather(*(run_worker(spawner, tree, script, str(i), scratch=tmp_path) for i in range(2)))
        assert [each.code for each in ended] == [0, 0]
    assert descriptors() <= before[0]
    assert descriptors_of(zygote) == before[1]
    assert spawner.zygote_pids[0] == zygote
    with open(f"/proc/{zygote}/task/{zygote}/children") as children:
        assert children.read() == ""


async def test_devices_are_counted_as_torchrun_counts_them(spawner: Spawner) -> None:
    num_cpus = len(os.sched_getaffinity(0))
    assert await spawner.count_devices("cpu") == num_cpus
    assert await spawner.count_devices("auto") == num_cpus  # this test machine has no accelerator
    with pytest.raises(ConfigError, match=r"nproc-per-node=gpu: Cuda is not available"):
        await spawner.count_devices("gpu")
    with pytest.raises(ConfigError, match="torch has no device type many here"):
        await spawner.count_devices("many")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 thread"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
    ],
    ids=["thread", "error", "missing"],
)
async def test_a_preload_that_cannot_be_forked_is_left_out_and_the_rest_stays_warm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, expected: str
) -> None:
    write(tmp_path / "bad_preload.py", source)
    write(tmp_path / "first_good.py", "")
    write(tmp_path / "second_good.py", "")
    spawner = Spawner.start(preload=["first_good", "bad_preload", "second_good"], search_path=str(tmp_path))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    names = ("torch", "torch._dynamo", "first_good", "second_good", "bad_preload")
    script = write(tmp_path / "s.py", f"import sys; print([name for name in {names} if name in sys.modules])")
    try:
        for _ in range(2):
            ended = await run_worker(spawner, tree, script, scratch=tmp_path)
            assert spawner.is_warm
            assert (ended.code, ended.stdout) == (0, f"{list(names[:-1])}\n")
            assert caplog.text.count("--preload bad_preload") == 1, "a later zygote does not try it again"
            assert expected in caplog.text
            zygote = spawner.zygote_pids[0]
            os.kill(zygote, signal.SIGKILL)
            await until(lambda zygote=zygote: spawner.zygote_pids[:1] not in ((), (zygote,)))
    finally:
        spawner.close()
        tree.close()


async def test_without_torch_workers_start_cold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "lib" / "torch.py", "raise ImportError('libtorch is broken')")
    spawner = Spawner.start(environ=environment(PYTHONPATH=str(tmp_path / "lib")))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        ended = await run_worker(spawner, tree, write(tmp_path / "s.py", "print('ran')"), scratch=tmp_path)
        assert not spawner.is_warm
        assert "torch cannot be imported" in caplog.text
        assert "libtorch is broken" in caplog.text
        assert (ended.code, ended.stdout) == (0, "ran\n")
    finally:
        spawner.close()
        tree.close()


async def test_a_preload_is_there_when_the_worker_begins_and_what_has_a_minus_is_not(tmp_path: Path) -> None:
    write(tmp_path / "good_preload.py", "import os; pid = os.getpid()")
    unwanted = ["-torch._dynamo", "-dlrover.trainer.torch.flash_checkpoint"]
    spawner = Spawner.start(preload=[*unwanted, "good_preload", "json.tool"], search_path=str(tmp_path))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        script = write(
            tmp_path / "s.py", "import sys; print(sys.modules['good_preload'].pid, sys.path.count(sys.path[0]))"
        )
        ended = await run_worker(spawner, tree, script, scratch=tmp_path)
        assert ended.stdout == f"{spawner.zygote_pids[0]} 1\n", ended.stderr
        source = "import sys; print(*(name in sys.modules for name in ('torch', 'torch._dynamo', 'good_preload')))"
        ended = await run_worker(spawner, tree, write(tmp_path / "t.py", source), scratch=tmp_path)
        assert ended.stdout == "True False True\n", ended.stderr
    finally:
        spawner.close()
        tree.close()


async def test_warming_up_ends_with_the_imports_or_with_the_patience(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write(tmp_path / "lib" / "torch.py", f"open({str(gate)!r}).read(); raise ImportError('late')")
    spawner = Spawner.start(environ=environment(PYTHONPATH=str(tmp_path / "lib")))
    try:
        await spawner.warm_up(0.01)
        assert spawner.is_warm, "so it hopes"
        warm = asyncio.create_task(spawner.warm_up(DEADLINE))
        await asyncio.to_thread(gate.write_text, "go on")
        await warm
        assert not spawner.is_warm, "it knows better"
        await spawner.warm_up(DEADLINE)
    finally:
        spawner.close()


async def test_another_interpreter_means_a_cold_start(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.symlink_to(sys.executable)
    spawner = Spawner.start(interpreter=str(interpreter))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids)
    try:
        script = write(tmp_path / "s.py", "import sys; print(sys.orig_argv)")
        ended = await run_worker(spawner, tree, script, scratch=tmp_path)
        assert ended.stdout == f"{[str(interpreter), '-u', script]}\n"
        assert not spawner.is_warm
        for kind, target in ((EntryKind.RUN_PATH, script), (EntryKind.MODULE, "this")):
            ended = await run_worker(spawner, tree, target, scratch=tmp_path, kind=kind)
            assert ended.code == 0, ended.stderr
    finally:
        spawner.close()
        tree.close()


async def test_closing_answers_everyone_who_waits(tmp_path: Path) -> None:
    spawner = Spawner.start()
    asked = asyncio.create_task(spawner.count_devices("cpu"))
    await asyncio.sleep(0)
    pid = spawner.zygote_pids[0]
    spawner.close()
    with pytest.raises(ConfigError, match="The agent ends"):
        await asked
    with pytest.raises(StartFailed, match="The agent ends"):
        await spawner.spawn(**idle_order(tmp_path))
    assert is_gone(pid)
    assert spawner.zygote_pids == ()


AGENT = """
    import asyncio, os, sys
    from dlrover.agent.workers.spawner import Spawner
    spawner = Spawner.start(is_warm="warm" in sys.argv)

    async def main():
        environ, streams = dict(os.environb), (0, 1, 2)
        for _ in range(2):
            leash = await spawner.spawn(kind="script", target=sys.argv[1], args=(), environ=environ, streams=streams)
            await leash.release()
            print(leash.pid, flush=True)
        print(spawner.zygote_pids[0], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["warm", "cold"])
async def test_sigkill_of_the_agent_ends_workers_and_zygote(tmp_path: Path, mode: str) -> None:
    worker = write(tmp_path / "worker.py", "import signal; signal.pause()")
    agent = write(tmp_path / "agent.py", AGENT)
    process = start_process(sys.executable, agent, worker, mode, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert all(is_alive(pid) for pid in pids)
        process.kill()
        process.wait()
        await until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        process.kill()
        process.communicate()


async def test_workers_are_forked_ahead_and_used_for_the_next_start(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    await until_prepared(spawner)
    modules = "'dlrover.trainer.torch.flash_checkpoint.ddp', 'dlrover.core.job'"
    code = f"import random, sys; print(random.random(), sys.argv[1], *(name in sys.modules for name in ({modules})))"
    script = write(tmp_path / "s.py", code)
    environ = environment(LOCAL_WORLD_SIZE="2")

    async def run_two() -> list[Ended]:
        return await asyncio.gather(
            *(run_worker(spawner, tree, script, str(i), scratch=tmp_path, environ=environ) for i in range(2))
        )

    await run_two()
    zygote, *spares = await until(lambda: len(spawner.zygote_pids) == 3 and spawner.zygote_pids)
    await tree.sweep()  # spares are not what a worker left behind
    assert all(is_alive(pid) for pid in spares)
    ended = await run_two()
    assert {each.pid for each in ended} == set(spares)
    assert [(each.code, each.stdout.split()[1]) for each in ended] == [(0, "0"), (0, "1")]
    assert ended[0].stdout.split()[0] != ended[1].stdout.split()[0]
    assert all(each.stdout.split()[2:] == ["True", "False"] for each in ended), (
        "Flash Checkpoint is there, the core is not"
    )

    _zygote, victim, other = await until(lambda: len(spawner.zygote_pids) == 3 and spawner.zygote_pids)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: victim not in spawner.zygote_pids)
    assert [each.code for each in await run_two()] == [0, 0]
    _zygote, *last = await until(lambda: len(spawner.zygote_pids) == 3 and spawner.zygote_pids)
    assert other not in last
    os.kill(zygote, signal.SIGKILL)
    await until(lambda: not any(is_alive(pid) for pid in last))
