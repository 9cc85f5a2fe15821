"""
`python -m dlrover.agent --config FILE`: the process around one agent.

The order of the first lines is a promise: the zygote begins to import torch before this process imports asyncio and gRPC,
and before it has any thread. Everything else here happens while torch loads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlrover.agent.config import AgentConfig, AgentResult, EntryKind
from dlrover.agent.workers.cgroups import Cgroups
from dlrover.agent.workers.spawner import Spawner
from dlrover.host import open_files
from dlrover.host.console import ConsoleHandler
from dlrover.host.lifeline import follow_parent
from dlrover.host.log_file import log_to_file
from dlrover.host.standard_streams import open_standard_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlrover.agent.checkpoints.saver import Saver
    from dlrover.agent.replicas.exchange import ReplicaExchange
    from dlrover.agent.workers.group import WorkerGroup
    from dlrover.protocol.messages.job import Micros, NodeRank, WorldSpec

EXIT_USAGE = 2
RESULT_PART = "result.json.part"
RESULT_BYTES = 64 * 1024
"""Kept free for the result on a disk that is full by then: tails of logs make up most of it."""
EXIT_BUG = 70
"""The launcher starts another agent then: we leave no result."""

log = logging.getLogger("dlrover.agent")


def main() -> int:
    open_standard_descriptors()
    config = _read_config(sys.argv)
    launcher_pid = os.getppid()
    if not follow_parent(signal.SIGTERM):
        return 0  # the launcher has gone before we could ask to be told
    cgroups = Cgroups.open(config.runtime_dir)
    spawner = Spawner.start(
        is_warm=config.is_warm and config.entry.kind is not EntryKind.PROGRAM,
        preload=config.preload,
        framework=config.framework,
        interpreter=config.interpreter,
        search_path=str(Path(config.entry.name).parent) if config.entry.kind is EntryKind.SCRIPT else "",
        cgroups="" if cgroups is None else cgroups.path,
    )
    open_files.raise_limit()  # not for the zygote and the workers
    logging.basicConfig(
        handlers=[ConsoleHandler()],  # the event loop must not wait for a console that takes no bytes
        level=config.log_level,
        format="dlrover-run: %(message)s"
        if config.log_level == "WARNING"
        else "%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    log_to_file(config.log_root)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _reserve_result(config)
    try:
        result = _run(config, spawner, cgroups)
    except Exception:  # the process edge: a bug ends the process, and the launcher starts another
        log.exception("bug in the agent")
        return EXIT_BUG
    if os.getppid() == launcher_pid:
        _write_result(config, result)
    else:
        shutil.rmtree(config.runtime_dir, ignore_errors=True)  # the launcher was killed and cannot do it
    return result.exit_code


def _run(config: AgentConfig, spawner: Spawner, cgroups: Cgroups | None) -> AgentResult:
    import asyncio

    return asyncio.run(_serve(config, spawner, cgroups))


async def _serve(config: AgentConfig, spawner: Spawner, cgroups: Cgroups | None) -> AgentResult:
    from dlrover.agent.agent import Agent
    from dlrover.agent.checkpoints.saver import Saver, SaverConfig
    from dlrover.agent.decisions.departure import EXIT_BY_SIGNAL
    from dlrover.agent.drain import Drain
    from dlrover.agent.failover import Failover
    from dlrover.agent.monitor.collectors import load_collectors
    from dlrover.agent.monitor.progress import WorkerWatch
    from dlrover.agent.monitor.scrape import scrapes
    from dlrover.agent.node_check import CheckTask
    from dlrover.agent.workers.devices import resolve_local_world_size
    from dlrover.agent.workers.group import WorkerGroup
    from dlrover.agent.workers.output import WorkerOutput
    from dlrover.agent.workers.process_tree import ProcessTree
    from dlrover.agent.workers.socket import WorkerSocket
    from dlrover.agent.workers.user_patterns import UserPatterns
    from dlrover.protocol.errors import ConfigError

    disks = [config.runtime_dir, os.getcwd(), config.log.log_dir, config.watch.log_file]
    disks = [path for path in disks if os.path.exists(path) and path != os.devnull]
    watch = WorkerWatch(config.watch, runtime_dir=config.runtime_dir, disks=disks)
    watch.collect(lambda: load_collectors(scrapes(config.watch.scrapes, config.watch.xpu_timer_port)))
    tree = ProcessTree(keep=lambda: spawner.zygote_pids, cgroups=cgroups)
    output = WorkerOutput(config.log, role=config.role, run_id=config.run_id, runtime_dir=config.runtime_dir)
    socket = await WorkerSocket.open(config.runtime_dir)
    launcher_pid = os.getppid()
    saver = Saver(
        SaverConfig(
            root=config.snapshot_root,
            job=config.job_name,
            launch=config.launch,
            runtime_dir=config.runtime_dir,
            is_saving_at_break_points=config.is_saving_at_break_points,
            bytes_per_second=config.snapshot_write_limit * 1e6,
        )
    )
    patterns = UserPatterns(config.watch.log_patterns)
    watch.looks.read_tail = output.tail_of
    socket.tell_of_snapshots(saver)
    saver.commits.tell_trainers = socket.tell_trainers

    def build_group(world: WorldSpec, *, node_rank: NodeRank, master_now: Callable[[], Micros]) -> WorkerGroup:
        saver.enter(world)
        return WorkerGroup(
            config,
            world,
            node_rank=node_rank,
            spawner=spawner,
            tree=tree,
            output=output,
            worker_socket=socket,
            master_now=master_now,
            snapshot_home=saver.home_for(node_rank) if config.snapshot_root else "",
            watch=watch,
            patterns=patterns,
        )

    replicas = _open_replicas(config, saver)
    drain = Drain(saver, config.runtime_dir)

    try:
        agent = Agent(
            config,
            token=_read_token(config),
            local_world_size=await resolve_local_world_size(config, spawner),
            build_group=build_group,
            step=socket.step,
            snapshot_step=lambda: saver.newest_step,
            has_whole_state=saver.has_whole_state,
            run_check=CheckTask(config, spawner=spawner, tree=tree),
            on_break=saver.break_point,
            promise=saver.promise,
            on_leaving=drain.announce,
            warm_up=spawner.warm_up,
            exchange=replicas,
            watch=watch,
            failover=Failover.load(config.failover_extension, config.failover_dir)
            if config.failover_extension
            else None,
            settle_output=output.settle_held,
        )
        socket.relay_to(agent.relay)
        saver.commits.report_to(agent.relay)
        result = await agent.run()
        is_hurried = result.exit_code >= EXIT_BY_SIGNAL
        is_saved = await drain.finish(agent.told_to_end, is_hurried=is_hurried)
        if not is_saved and result.exit_code == 0 and agent.signal is not None:
            # Training is done, its last checkpoints are not: whoever stopped us must not take that for success.
            message = f"stopped by {agent.signal.name} before its last checkpoints were written"
            return replace(result, exit_code=EXIT_BY_SIGNAL + agent.signal, message=message)
        return result
    except ConfigError as error:
        return AgentResult(exit_code=EXIT_USAGE, message=str(error))
    finally:
        if replicas is not None:
            replicas.close()
        await socket.close()
        saver.close(is_removing=os.getppid() != launcher_pid)  # a launcher that was killed cannot do it
        await tree.sweep()
        tree.close()
        output.close()
        spawner.close()
        if cgroups is not None:
            cgroups.close()


def _open_replicas(config: AgentConfig, saver: Saver) -> ReplicaExchange | None:
    """A job of one node has no other node to exchange snapshots with, and need not import what that takes."""
    if not config.snapshot_root or config.terms.limits.max_nodes == 1 or config.framework != "torch":
        return None
    from dlrover.agent.replicas.exchange import open_replicas

    return open_replicas(config, _read_token(config), saver)


def _read_config(argv: list[str]) -> AgentConfig:
    if len(argv) != 3 or argv[1] != "--config":
        sys.exit("usage: python -m dlrover.agent --config FILE (dlrover-run starts it)")
    try:
        return msgspec.json.decode(Path(argv[2]).read_bytes(), type=AgentConfig)
    except (OSError, msgspec.MsgspecError) as error:
        sys.exit(f"dlrover.agent: configuration {argv[2]}: {error}")


def _read_token(config: AgentConfig) -> str:
    return Path(config.token_file).read_text(encoding="utf-8").strip() if config.token_file else ""


def _reserve_result(config: AgentConfig) -> None:
    """A job that succeeded must not seem to have crashed because the disk has become full."""
    with (
        contextlib.suppress(OSError),  # then it is full already, and may have room at the end
        open(Path(config.runtime_dir) / RESULT_PART, "wb", opener=_open_reserved) as file,
    ):
        os.posix_fallocate(file.fileno(), 0, RESULT_BYTES)


def _open_reserved(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o600)


def _write_result(config: AgentConfig, result: AgentResult) -> None:
    """Whole or not at all: without a result the launcher takes us for crashed and starts another agent."""
    partial = Path(config.runtime_dir) / RESULT_PART
    with open(partial, "wb", opener=_open_reserved) as file:
        file.write(msgspec.json.encode(result))
        file.truncate()
    partial.rename(partial.with_suffix(""))


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through interpreter shutdown: gRPC's threads need not be waited for.
    os._exit(exit_code)
