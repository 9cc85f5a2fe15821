"""
Stories about ranks that stand still, for the transcripts of the diagnosis. There is no job in them: the watch is told what agents see.

    watch nodes=2 procs=2 pause=5.5      a job of two nodes with two ranks each, and the terms of the watch
    report 0-3 step=100 phase=backward   what agents tell of these ranks with their heartbeats
    dump 1 stack=lock state=S            what a look finds in a rank; `stack` names one of `STACKS`
    answer 0 | answer 1                  agents send the first or the second dump of their ranks
    n0: ResourceReport cpu=1.5           any other observation, by the name of its message
    failed n1 rank=2 message="..."       the workers of a node failed
    ignored | refused                    the job did nothing about the newest finding, or could not be asked
    after 5 | tick | next | round 2 | verdicts 3
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dlrover.core.diagnosis.picture import FailedWorkers, NodePlace, Scene
from dlrover.core.diagnosis.watch import Act, AskNode, Publish, Tell, Watch, WatchEffect
from dlrover.protocol.messages.job import FailureKind, Incarnation, Micros, NodeId, NodeRank, Round, WorkerFailure
from dlrover.protocol.messages.watch import (
    LookTaken,
    NodeEvent,
    ProgressReport,
    ResourceReport,
    SampleTaken,
    TakeLook,
    ThreadStack,
    WatchTerms,
    WorkerDump,
    WorkerProgress,
)
from tests.core.diagnosis.watch_lab import IN_ALL_REDUCE, IN_BACKWARD, IN_BARRIER, IN_LOADER, IN_LOCK

STACKS = {
    "backward": IN_BACKWARD,
    "lock": IN_LOCK,
    "loader": IN_LOADER,
    "all_reduce": IN_ALL_REDUCE,
    "barrier": IN_BARRIER,
    "storage": ("/usr/lib/tarfile.py:400 read", "/job/train.py:21 load", "/job/train.py:60 main"),
    "compute": ("/job/train.py:33 forward", "/job/train.py:38 step", "/job/train.py:60 main"),
}
OBSERVATIONS = {class_.__name__: class_ for class_ in (ResourceReport, NodeEvent, SampleTaken)}


class WatchStory:
    def __init__(self) -> None:
        self.watch = Watch(job_name="a-job")
        self.terms = WatchTerms()
        self.now = Micros(1_000_000_000)
        self.num_nodes, self.num_procs = 2, 2
        self.round = 0
        self.order: TakeLook | None = None
        self.act: Act | None = None
        self.dumps: list[WorkerDump] = []
        self.told: dict[int, WorkerProgress] = {}

    def perform(self, words: list[str], options: dict[str, str]) -> list[str]:
        verb, *names = words
        values: dict[str, Any] = {key: _value(value) for key, value in options.items()}
        match verb:
            case "watch":
                self.num_nodes, self.num_procs = values.pop("nodes", 2), values.pop("procs", 2)
                self.terms = msgspec.convert(values, WatchTerms, strict=False)
                self._enter(1)
            case "round":
                self._enter(int(names[0]), is_active=values.get("is_active", True))
            case "after":
                self.now = Micros(self.now + round(float(names[0]) * 1e6))
                return []
            case "report":
                self._report(_ranks(names), values)
            case "dump":
                self.dumps += [self._dump(rank, values) for rank in _ranks(names)]
                return []
            case "answer":
                self._answer(int(names[0]), values)
            case "lost":
                self.watch.lost([_node(name) for name in names])
            case "failed":
                self._failed(names[0], values)
            case "duplicates":
                self.watch.hear_duplicates(values)
            case "ignored" | "refused":
                assert self.act is not None, "the watch has found nothing to act on"
                self.watch.hear_answer(self.act.command, self.now, is_heard=verb == "ignored")
            case "next":
                deadline = self.watch.next_deadline()
                return [
                    "next deadline: none"
                    if deadline is None
                    else f"next deadline: in {(deadline - self.now) / 1e6:g} s"
                ]
            case "verdicts":
                return [self._compact(past) for past in self.watch.diagnosis(int(names[0])).verdicts]
            case "tick":
                pass
            case _ if verb.endswith(":"):
                fields = {"node": _node(verb[:-1]), "incarnation": 1, **values}
                self.watch.hear(msgspec.convert(fields, OBSERVATIONS[names[0]], strict=False), self.now)
            case _:
                raise ValueError(f"unknown verb {verb!r} in a story about the watch")
        return [line for effect in self.watch.tick(self.now) for line in self._describe(effect)]

    def _enter(self, round_: int, *, is_active: bool = True) -> None:
        self.round = round_
        places = tuple(
            NodePlace(
                node=_node(f"n{index}"),
                node_rank=NodeRank(index),
                host=f"host{index}",
                first_rank=self.num_procs * index,
                num_ranks=self.num_procs,
            )
            for index in range(self.num_nodes)
        )
        scene = Scene(round=Round(round_), is_active=is_active, began_at=self.now, places=places)
        self.watch.follow(scene, self.terms, self.now)

    def _by_node(self, found: list[Any]) -> dict[NodeId, tuple[Any, ...]]:
        nodes: dict[NodeId, list[Any]] = {}
        for each in found:
            nodes.setdefault(_node(f"n{each.global_rank // self.num_procs}"), []).append(each)
        return {node: tuple(of_node) for node, of_node in nodes.items()}

    def _report(self, ranks: list[int], values: dict[str, Any]) -> None:
        usual = {"step": 100, "step_seconds": 0.05, "phase": "backward"}
        for rank in ranks:
            fields = {"local_rank": rank % self.num_procs, "global_rank": rank, "pid": 1000 + rank} | usual | values
            self.told[rank] = msgspec.convert(fields, WorkerProgress, strict=False)
        for node, workers in self._by_node([self.told[rank] for rank in ranks]).items():
            self.watch.hear(
                ProgressReport(node=node, incarnation=Incarnation(1), round=Round(self.round), workers=workers),
                self.now,
            )

    def _dump(self, rank: int, values: dict[str, Any]) -> WorkerDump:
        """A rank is where it last said, for as long as `phase_seconds` says; more threads by `threads=lock,barrier`."""
        values = dict(values)
        frames = STACKS.get(values.pop("stack", ""), ())
        others = [name for name in values.pop("threads", "").split(",") if name]
        known = self.told.get(rank)
        own = {name: values.pop(name) for name in ("phase", "phase_seconds", "collective", "step") if name in values}
        if known is not None:
            told = msgspec.convert(msgspec.to_builtins(known) | own, WorkerProgress, strict=False)
            values["progress"] = told
        threads = [ThreadStack(name="main", frames=frames, is_main=True)] if frames else []
        threads += [ThreadStack(name=f"thread {name}", frames=STACKS[name]) for name in others]
        fields = {"local_rank": rank % self.num_procs, "global_rank": rank, "pid": 1000 + rank, "state": "S"}
        source = "faulthandler" if frames else "none"
        return msgspec.convert(fields | {"threads": threads, "source": source} | values, WorkerDump, strict=False)

    def _answer(self, number: int, values: dict[str, Any]) -> None:
        assert self.order is not None, "the watch has not asked for a look"
        for node, dumps in self._by_node(self.dumps).items():
            look = values.get("look", self.order.look)
            self.watch.hear(
                LookTaken(node=node, incarnation=Incarnation(1), look=look, number=number, workers=dumps), self.now
            )
        if not values.get("is_kept", False):
            self.dumps = []

    def _failed(self, name: str, values: dict[str, Any]) -> None:
        step, rank = values.pop("step", None), values.pop("rank", 0)
        usual = {"global_rank": rank, "local_rank": 0, "pid": 1000 + rank, "kind": FailureKind.EXCEPTION, "message": ""}
        died = msgspec.convert(usual | {"exited_at": self.now} | values, WorkerFailure, strict=False)
        index = int(name[1:])
        self.watch.hear_failure(
            FailedWorkers(
                at=self.now,
                round=Round(self.round),
                node=_node(name),
                node_rank=NodeRank(index),
                step=step,
                failures=(died,),
            )
        )

    def _describe(self, effect: WatchEffect) -> list[str]:
        match effect:
            case AskNode(node, order):
                assert isinstance(order.order, TakeLook)
                self.order = order.order
                look = f"look {self.order.look}, and again after {self.order.again_after:g} s"
                return [f"> n{node - 1}: {look}, within {order.expires_in:g} s"]
            case Tell(past):
                return [self._compact(past)]
            case Act(command):
                self.act = effect
                stalled = getattr(command, "stalled_for", None)
                how_long = "" if stalled is None else f" after {stalled:g} s"
                return [f"> {type(command).__name__} for round {command.round}{how_long}"]
            case Publish(autopsy):
                return [f"| {line}".rstrip() for line in autopsy.text.splitlines()]

    def _compact(self, past: Any) -> str:
        verdict = past.verdict
        who = ", ".join(
            f"{culprit.node} {culprit.global_rank}" if culprit.node is not None else str(culprit.global_rank)
            for culprit in verdict.culprits
        )
        times = f", {past.count} times" if past.count > 1 else ""
        evidence = " ".join(verdict.evidence)
        return (
            f"{verdict.diagnostician}: {verdict.fault.value} [{who}] {verdict.confidence:g}, {verdict.action.value}"
            f"{', acted' if past.has_acted else ''}{times}. {evidence} {verdict.reasoning}".rstrip()
        )


def _node(name: str) -> NodeId:
    return NodeId(int(name[1:]) + 1)


def _ranks(names: list[str]) -> list[int]:
    found: list[int] = []
    for name in names:
        first, _, last = name.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
