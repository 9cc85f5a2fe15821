"""
The driver of the watch: it brings what the loop hears to the watch, and what the watch wants to nodes, to the job, to the log and to a file.

One task, which sleeps until something is heard or a deadline of the watch passes. Nothing in here may harm the job: what nodes tell was validated by the
decoder, plug-ins of users run in threads with a time limit, and a file that cannot be written costs a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from pathlib import Path

from msgspec.structs import replace

from dlrover.core.diagnosis.checks.failures import WorkerEnded
from dlrover.core.diagnosis.mute_nodes import MuteNodes
from dlrover.core.diagnosis.picture import FailedWorkers, scene_of
from dlrover.core.diagnosis.stacks import say_ranks
from dlrover.core.diagnosis.watch import Act, AskNode, Publish, Tell, Watch
from dlrover.core.outcome import Outcome
from dlrover.master.clock import MasterClock
from dlrover.master.diagnosis.plugins import UserDiagnosticians
from dlrover.master.loop.loop import MasterLoop
from dlrover.protocol.errors import DLRoverError, Unavailable
from dlrover.protocol.messages.fleet import NodePhase, NodesListed
from dlrover.protocol.messages.job import Command, JobTerms, Micros, NodeId, Reply, ReportFailure
from dlrover.protocol.messages.requests import RelaunchNode
from dlrover.protocol.messages.watch import (
    ActionKind,
    AskDiagnosis,
    Autopsy,
    FaultFound,
    HangFound,
    PastVerdict,
    ShowNotice,
    WatchObservation,
    WatchOrder,
    WatchTerms,
)

log = logging.getLogger(__name__)

LONGEST_NAP = 60.0
MAX_REPORTS = 20
MAX_CONSOLES = 8
"""Nodes of culprits whose consoles show a verdict; the console of the first node always does."""
NOTICES = 2**41
"""Orders of notices are numbered from here: looks are counted from 1, and what the page asks for has negative numbers."""
NOTICE_EXPIRES = 60.0
_FOLLOWS = {
    ActionKind.RESTART_WORKERS: "The workers are restarted.",
    ActionKind.RELAUNCH_NODE: "The node is replaced.",
    ActionKind.STOP_JOB: "The job ends.",
}
"""Autopsies that are kept on disk by one master."""


class WatchDriver:
    def __init__(
        self,
        master_loop: MasterLoop,
        clock: MasterClock,
        *,
        job_name: str,
        directory: Path,
        terms: WatchTerms | None = None,
        plugins: UserDiagnosticians | None = None,
    ) -> None:
        """`directory`: where autopsies go. `terms`: instead of what the job's nodes say."""
        self._master_loop = master_loop
        self._clock = clock
        self._job_name = job_name
        self._directory = directory
        self._terms = terms
        self._plugins = UserDiagnosticians() if plugins is None else plugins
        self._watch = Watch(job_name=job_name)
        self._wake = asyncio.Event()
        self._scene_key: tuple[object, ...] = ()
        self._written: list[Path] = []
        self._num_notices = 0
        self._told: dict[asyncio.Future[Reply], HangFound | FaultFound | RelaunchNode] = {}
        self._mute = MuteNodes(clock.now())
        heard_before = master_loop.listeners.on_observation

        def observed(observation: WatchObservation, now: Micros) -> None:
            heard_before(observation, now)
            self._observed(observation, now)

        master_loop.listeners.on_observation = observed
        master_loop.listeners.on_decided.append(self._decided)
        master_loop.answers[AskDiagnosis] = lambda question: replace(
            self._watch.diagnosis(question.last), now=clock.now()
        )
        master_loop.listeners.newest_verdict = lambda: self._watch.newest

    @property
    def watch(self) -> Watch:
        """To look at."""
        return self._watch

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                if self._plugins:
                    group.create_task(self._plugins.run(lambda: self._watch.picture, self._hear_plugin))
        finally:
            self._plugins.close()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._nap()):
                    await self._wake.wait()
            self._wake.clear()
            self._step()

    def _nap(self) -> float:
        deadline = self._watch.next_deadline()
        if deadline is None:
            return LONGEST_NAP
        return min(LONGEST_NAP, max(0.0, (deadline - self._clock.now()) / 1e6))

    def _step(self) -> None:
        now = self._clock.now()
        self._follow_job(now)
        for mute in self._mute.look(self._master_loop.job.state, now):
            self._watch.hear_verdict(mute.verdict, now)
            if mute.wish is not None:
                self._act(mute.wish)
        lost: list[NodeId] = []
        for effect in self._watch.tick(now):
            match effect:
                case AskNode(node=node, order=order):
                    if not self._master_loop.order(node, order):
                        lost.append(node)
                case Act(command=command):
                    self._act(command)
                case Tell(past=past):
                    _log_verdict(past)
                    self._tell_people(past)
                case Publish(autopsy=autopsy):
                    self._publish(autopsy)
        if lost:
            self._watch.lost(lost)

    def _follow_job(self, now: Micros) -> None:
        """The scene is as large as the world: it is drawn anew only when something in it has changed."""
        key = self._newest_key()
        if key == self._scene_key:
            return
        self._scene_key = key
        state = self._master_loop.job.state
        terms = (JobTerms() if state.terms is None else state.terms).watch if self._terms is None else self._terms
        self._watch.follow(scene_of(state), terms, now)

    def _newest_key(self) -> tuple[object, ...]:
        """Two scenes with the same one are the same."""
        state = self._master_loop.job.state
        rdzv = state.rendezvous
        is_over = state.end is not None
        return rdzv.round, rdzv.is_active, len(rdzv.finished), is_over, state.master_epoch, state.terms is None

    # What comes in.

    def _observed(self, observation: WatchObservation, now: Micros) -> None:
        self._follow_job(now)
        self._watch.hear(observation, now)
        self._wake.set()

    def _decided(self, command: Command, outcome: Outcome, now: Micros) -> None:
        match command:
            case ReportFailure():
                self._hear_failure(command, now)
            case NodesListed():
                self._hear_nodes(command)
            case _ if self._newest_key() == self._scene_key:
                return  # a look costs as much as the world is large, and when many nodes come back there are many such commands
        self._wake.set()

    def _hear_failure(self, report: ReportFailure, now: Micros) -> None:
        state = self._master_loop.job.state
        incident, node = state.restarts.incident, state.nodes.live.get(report.node)
        if node is None or incident is None or incident.round != report.round:
            return
        first = incident.first
        holder = state.nodes.holder(first.node_rank)
        self._follow_job(now)
        self._watch.hear_failure(
            FailedWorkers(
                at=now,
                round=report.round,
                node=node.id if holder is None else holder.id,
                node_rank=first.node_rank,
                step=incident.step,
                failures=report.failures,
                first=first,
            )
        )

    def _hear_nodes(self, listed: NodesListed) -> None:
        """Nodes of the platform that run as the same rank."""
        counts: dict[str, int] = {}
        for node in listed.nodes:
            if node.phase is NodePhase.RUNNING:
                what = f"{node.node_type.value} {node.rank}"
                counts[what] = counts.get(what, 0) + 1
        self._watch.hear_duplicates({what: count for what, count in counts.items() if count > 1})

    def _hear_plugin(self, verdict: object) -> None:
        checked = self._plugins.check(verdict)
        if checked is not None:
            self._watch.hear_verdict(checked, self._clock.now())
            self._wake.set()

    # What goes out.

    def _act(self, command: HangFound | FaultFound | RelaunchNode) -> None:
        answer = self._master_loop.tell(command)
        self._told[answer] = command
        answer.add_done_callback(self._acted)

    def _acted(self, answer: asyncio.Future[Reply]) -> None:
        command = self._told.pop(answer)
        if answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, DLRoverError):
            log.info("the job rejected a finding of the diagnosis finding=%s reason=%s", type(command).__name__, error)
        elif error is not None:
            raise error
        if isinstance(command, HangFound | FaultFound):
            now = self._clock.now()
            self._follow_job(now)
            self._watch.hear_answer(command, now, is_heard=not isinstance(error, Unavailable))
            self._wake.set()

    def _publish(self, autopsy: Autopsy) -> None:
        try:
            path = self._free_path(autopsy)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(autopsy.text, encoding="utf-8")
        except OSError as error:
            log.warning("the autopsy could not be written directory=%s reason=%s", self._directory, error.strerror)
            return
        self._watch.autopsy = replace(autopsy, file=str(path))
        self._written.append(path)
        if len(self._written) > MAX_REPORTS:
            self._written[-MAX_REPORTS - 1].unlink(missing_ok=True)
        log.warning("autopsy file=%s\n%s", path, autopsy.text)

    def _free_path(self, autopsy: Autopsy) -> Path:
        """An earlier job may have had our name, and its pages stay."""
        for number in itertools.count(len(self._written) + 1):
            name = f"{self._job_name or 'job'}-autopsy-{autopsy.round}-{number}.md"
            path = self._directory / name.replace("/", "_")
            if not path.exists():
                return path
        raise AssertionError("counting ends")

    def _tell_people(self, past: PastVerdict) -> None:
        """A line on the consoles of those who look: at the first node, and where the culprits are."""
        if past.count > 1 or past.verdict.diagnostician == WorkerEnded.name:
            return  # told before; and each node says itself which worker failed
        places = self._watch.picture.scene.places
        nodes = {place.node: None for place in places[:1]}
        if self._master_loop.job.state.fleet is None:  # else all nodes of the platform are read at one place
            nodes |= {culprit.node: None for culprit in past.verdict.culprits[:MAX_CONSOLES]}
        order = ShowNotice(text=in_a_line(past))
        for node in nodes:
            self._num_notices += 1
            self._master_loop.order(
                node, WatchOrder(id=NOTICES + self._num_notices, expires_in=NOTICE_EXPIRES, order=order)
            )


def in_a_line(past: PastVerdict) -> str:
    """What was found, why it is believed, and what follows."""
    verdict = past.verdict
    ranks = [culprit.global_rank for culprit in verdict.culprits if culprit.global_rank >= 0]
    who = f" of {say_ranks(ranks)}" if ranks else ""
    follows = _FOLLOWS.get(verdict.action, verdict.reasoning)
    text = " ".join(filter(None, (*verdict.evidence[:1], follows, "`dlrover diagnosis` shows more.")))
    return " ".join(f"diagnosis: {verdict.fault.value}{who}. {text}".split())


def _log_verdict(past: PastVerdict) -> None:
    verdict = past.verdict
    log.warning(
        "diagnosis fault=%s by=%s ranks=%s confidence=%.2f action=%s count=%d: %s %s",
        verdict.fault.value,
        verdict.diagnostician,
        ",".join(str(culprit.global_rank) for culprit in verdict.culprits[:16]) or "-",
        verdict.confidence,
        verdict.action.value,
        past.count,
        " ".join(verdict.evidence[:3]),
        verdict.reasoning,
    )
