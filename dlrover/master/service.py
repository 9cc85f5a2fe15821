"""
The life of a master: bind, recover, serve, and end for one of four reasons.

The port is bound before the journal is touched: opening the journal ends every earlier master's right to write, and a
master that finds its port taken must not do that to the one that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlrover.host.edges import logged
from dlrover.master.clock import MasterClock
from dlrover.master.config import (
    EXIT_STOPPED,
    BrainTerms,
    MasterConfig,
    Ready,
    announce,
    read_token,
    read_token_file,
    tell_end,
    tell_goodput,
)
from dlrover.master.diagnosis.driver import WatchDriver
from dlrover.master.diagnosis.plugins import UserDiagnosticians
from dlrover.master.diagnosis.pre_check_runner import PreCheckRunner, whole_limit
from dlrover.master.diagnosis.pre_checks import load_operators, parse_operators
from dlrover.master.job_glances import JobGlances
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.master.platform_driver import PATIENCE, PlatformDriver
from dlrover.master.topology_plugins import TopologyPlugins
from dlrover.master.view.bookkeeper import Bookkeeper
from dlrover.master.view.event_reporters import build_reporters
from dlrover.master.view.events import EventLog, events_file
from dlrover.platforms.base import Platform, ShowsJobs, TakesOrders
from dlrover.platforms.registry import build_platform
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.job import StopJob
from dlrover.protocol.messages.scaling import DefineScaling, ScaleMode, ScaleTerms
from dlrover.protocol.rpc.server import MasterServer

if TYPE_CHECKING:
    from dlrover.master.brain.client import BrainClient
    from dlrover.master.view_servers import ViewServers

log = logging.getLogger(__name__)

STOP_PERIOD = 0.2
"""Seconds between two attempts to stop a job whose journal cannot be written: the launcher does not wait for long."""


async def serve(config: MasterConfig) -> int:
    """
    The exit code: of the job when it is over, EXIT_STOPPED when we were asked to stop.

    Raises ConfigError and PortTaken before anything was touched, JournalError, Unavailable when the journal cannot be
    opened, and Fenced as soon as another master took over.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stopped, number)
    token = read_token(config)
    topology = TopologyPlugins.load(config.topology_querier, config.topology_sorter)
    platform = _platform(config)
    reporters = build_reporters(config.event_reporters)
    server = MasterServer(token=token, tls=config.tls)
    port = server.bind(config.host, config.port)
    journal_thread = await JournalThread.open(Path(config.journal), job_name=config.job_name)
    job = await journal_thread.restore()
    events = EventLog(Path(config.events_file) if config.events_file else events_file(Path(config.journal)), reporters)
    books = Bookkeeper(events)
    clock = MasterClock(job.now)
    master_loop = MasterLoop(
        journal_thread, job, clock, job_name=config.job_name, user=config.user, topology=topology, books=books
    )
    brain = None if config.brain is None else _brain(config, config.brain, master_loop, journal_thread, token)
    fleet = (
        None
        if platform is None
        else _platform_driver(config, platform, master_loop, journal_thread.master_epoch, brain)
    )
    view_servers = _view_servers(config, master_loop, journal_thread, token)
    await master_loop.begin(journal_thread.master_epoch)
    pre_check = _pre_check(config, master_loop, events)
    pre_check.begin()
    await server.start(master_loop, num_expected=len(job.state.nodes.live))
    working = asyncio.ensure_future(master_loop.run())
    telling = asyncio.ensure_future(events.run())
    watch = WatchDriver(
        master_loop,
        clock,
        job_name=config.job_name,
        directory=Path(config.reports) if config.reports else Path(config.journal).parent,
        terms=config.watch,
        plugins=UserDiagnosticians.load(),
    )
    keeping = [asyncio.ensure_future(watch.run()), asyncio.ensure_future(_for_good(pre_check.run()))]
    keeping += [] if fleet is None else [asyncio.ensure_future(fleet.run())]
    if fleet is None and config.scaling is not None:
        keeping.append(asyncio.ensure_future(_for_good(_define_scaling(master_loop, config.scaling))))
    if isinstance(platform, TakesOrders):
        keeping.append(asyncio.ensure_future(_take_orders(platform, fleet, master_loop, journal_thread.master_epoch)))
    keeping += [] if brain is None else [asyncio.ensure_future(brain.run())]
    glances = JobGlances(platform, master_loop.ask) if isinstance(platform, ShowsJobs) else None
    keeping += [] if glances is None else [asyncio.ensure_future(glances.run())]
    stopping: list[asyncio.Future[None]] = []
    loop.add_signal_handler(signal.SIGUSR1, lambda: stopping.append(asyncio.ensure_future(end_job(master_loop))))
    ready = Ready(port=port, pid=os.getpid(), master_epoch=journal_thread.master_epoch)
    if view_servers is not None:
        await view_servers.start()
        master_loop.listeners.dashboard = view_servers.link
        ready = replace(ready, dashboard=view_servers.dashboard, metrics=view_servers.metrics)
    announce(config, ready)
    log.info(
        "serving job=%s address=%s port=%d master_epoch=%d journal=%s token=%s tls=%s",
        config.job_name,
        config.host,
        port,
        journal_thread.master_epoch,
        config.journal,
        "yes" if token else "no (loopback only; DLROVER_JOB_TOKEN or a token file allows more)",
        "no" if config.tls is None else "mutual" if config.tls.ca else "yes",
    )
    waited: list[asyncio.Future[Any]] = [working, stopped, master_loop.finished, *keeping]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    for task in keeping:
        if task.done():
            task.result()  # it never ends by itself: a bug, which ends the process
        task.cancel()
    if working.done() and not master_loop.finished.done():
        # Fenced, or the journal is lost: say nothing more to anybody, the process ends at once.
        working.result()
    if master_loop.finished.done():
        _tell_end(config, master_loop)
        await asyncio.gather(
            *([] if fleet is None else [fleet.drain()]),
            *([] if brain is None else [brain.finish(master_loop.finished.result())]),
        )
        if glances is not None:
            await glances.show()
    if view_servers is not None:
        await view_servers.stop()
    # Nothing is decided any more: that our own going closes the streams says nothing about the nodes.
    working.cancel()
    telling.cancel()
    await asyncio.gather(working, telling, return_exceptions=True)
    await server.stop()
    if platform is not None:
        await _close(platform)
    await journal_thread.close()
    if master_loop.finished.done():
        end = master_loop.finished.result()
        log.info("job ended reason=%s exit_code=%d message=%s", end.reason, end.exit_code, end.message)
        return end.exit_code
    log.info("stopped signal=%s", signal.Signals(stopped.result()).name)
    return EXIT_STOPPED


def _platform(config: MasterConfig) -> Platform | None:
    """Raises ConfigError, before anything was touched."""
    if not config.platform:
        return None
    if config.fleet is None:
        raise ConfigError(
            f"A master with the platform {config.platform} needs a description of its nodes. Set `fleet`."
        )
    return build_platform(config.platform, job_uid=config.job_uid or config.job_name, options=config.platform_options)


async def _take_orders(
    platform: TakesOrders, fleet: PlatformDriver | None, master_loop: MasterLoop, master_epoch: int
) -> None:
    """When the job has heard what stands written already."""
    assert fleet is not None, "a platform has a driver"
    await fleet.has_begun.wait()
    await platform.take_orders(master_loop.ask, master_epoch)


def _brain(
    config: MasterConfig, terms: BrainTerms, master_loop: MasterLoop, journal_thread: JournalThread, token: str
) -> BrainClient:
    """Raises ConfigError."""
    from dlrover.master.brain.client import BrainClient, LoopShell, job_ref  # late: most jobs have none
    from dlrover.protocol.rpc.brain import BrainChannel

    brain_token = read_token_file(terms.token_file) if terms.token_file else ""
    uid = f"{config.job_uid or config.job_name}-{journal_thread.journal_uid[:12]}"
    brain = BrainClient(
        terms,
        BrainChannel(terms.address, token=brain_token, tls=terms.tls),
        LoopShell(master_loop),
        job=job_ref(uid, token),
        job_name=config.job_name,
        journal=Path(config.journal),
        fleet=config.fleet,
        scaling=config.scaling or ScaleTerms(),
    )
    master_loop.listeners.on_decided.append(brain.hear)
    log.info("brain=%s job=%s", terms.address, uid)
    return brain


def _platform_driver(
    config: MasterConfig,
    platform: Platform,
    master_loop: MasterLoop,
    master_epoch: int,
    brain: BrainClient | None,
) -> PlatformDriver:
    assert config.fleet is not None, "checked where the platform was built"
    environ = {"DLROVER_EXTENSION_DYNAMIC_FAILOVER": config.failover_extension} if config.failover_extension else {}
    first = None
    is_own_size = config.scaling is not None and config.scaling.mode is ScaleMode.ON
    is_new = is_own_size and master_loop.job.state.fleet is None
    if isinstance(platform, TakesOrders):
        first = functools.partial(platform.begin_orders, master_loop.ask, master_epoch)
    fleet = PlatformDriver(
        platform,
        config.fleet,
        master_loop.tell,
        environ=environ,
        scaling=config.scaling,
        is_scaling=lambda: master_loop.job.state.scaling.mode is not ScaleMode.OFF,
        first=first,
        propose=None if brain is None or not is_new else brain.begin,
    )
    if brain is not None:
        brain.allow = fleet.allow
    master_loop.listeners.on_intent = fleet.take
    log.info("platform=%s capabilities=%s", config.platform, platform.capabilities)
    return fleet


async def _define_scaling(master_loop: MasterLoop, terms: ScaleTerms) -> None:
    """Of a job whose nodes people start: batches may be tuned all the same."""
    while True:
        with contextlib.suppress(Unavailable):
            await master_loop.tell(DefineScaling(terms=terms))
            return
        await asyncio.sleep(STOP_PERIOD)


def _pre_check(config: MasterConfig, master_loop: MasterLoop, events: EventLog) -> PreCheckRunner:
    operators = load_operators(parse_operators(config.pre_check_ops))
    patience = 0.0 if config.fleet is None else config.fleet.pending_timeout
    return PreCheckRunner(
        master_loop, operators, limit=whole_limit(patience), tell=events.add, has_platform=config.fleet is not None
    )


async def _close(platform: Platform) -> None:
    """Everything is decided and told: whatever it does, the exit code is the job's."""
    with logged(log, "the platform could not be closed"):  # an extension may raise anything
        async with asyncio.timeout(PATIENCE.call):
            await platform.close()


async def _for_good(work: Coroutine[Any, Any, None]) -> None:
    """Something that comes to its end, beside others whose end would be that of the master."""
    await work
    await asyncio.Event().wait()


def _view_servers(
    config: MasterConfig, master_loop: MasterLoop, journal_thread: JournalThread, token: str
) -> ViewServers | None:
    """None: no watch is wanted. Raises ConfigError."""
    if config.dashboard_port < 0 and config.metrics_port < 0:
        return None
    if not token:
        raise ConfigError("A dashboard or metrics need a job token: give a token file, or leave both out.")
    from dlrover.master.view_servers import ViewServers  # late: a master that nobody watches serves sooner

    view_servers = ViewServers(config, master_loop, token)
    journal_thread.on_commit = view_servers.job_metrics.committed
    master_loop.listeners.on_observation = view_servers.observe
    return view_servers


async def end_job(master_loop: MasterLoop) -> None:
    """
    Our launcher was told to stop, and we go with it: the other nodes shall end now and not wait for us to come back.

    However busy we are, and as soon as the journal can be written: the launcher says it once.
    """
    command = StopJob(message="The launcher that hosts the job's master was stopped.")
    is_told = False
    while not master_loop.finished.done():
        try:
            await master_loop.tell(command)
        except Unavailable as error:
            if not is_told:
                log.warning("the job cannot be stopped yet reason=%s", error)
            is_told = True
            await asyncio.wait([master_loop.finished], timeout=STOP_PERIOD)
        except Rejected as error:
            log.info("the job is not stopped reason=%s", error)  # it ends already
            return
        else:
            log.info("the request to stop the job was accepted")
            return


def _tell_end(config: MasterConfig, master_loop: MasterLoop) -> None:
    try:
        tell_goodput(config, master_loop.goodput())
        tell_end(config, master_loop.finished.result())  # last: whoever sees it may look for the other
    except OSError as error:
        # The next master of this journal will tell it again; the agents have heard it from us.
        log.error("the end of the job could not be written file=%s reason=%s", config.end_file, error.strerror)


def _resolve(future: asyncio.Future[int], number: int) -> None:
    if not future.done():
        future.set_result(number)
