"""A plugin of pytest that writes down what tests send to the core: `pytest -p tools.lives.recorder`, with the file in `DLROVER_LIVES`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.core.diagnosis.watch import Watch
from dlrover.core.goodput.progress_ledger import ProgressLedger
from dlrover.core.job import Job
from dlrover.core.membership.liveness import Liveness
from tests.core.lives import stage
from tests.core.lives.stage import AnyStep, Life, write_lives

LONGEST = 160
MOST_OF_A_TEST = 8
"""Lives; tests with generated examples have hundreds."""


class Recorder:
    def __init__(self) -> None:
        self.lives: dict[bytes, Life] = {}
        self.running: dict[int, tuple[Any, list[AnyStep]]] = {}
        """By the identity of what is told; it is kept, so that no other can have the same."""
        self.by_state: dict[int, list[AnyStep]] = {}

    def begin(self, thing: Any) -> list[AnyStep]:
        steps: list[AnyStep] = []
        self.running[id(thing)] = (thing, steps)
        return steps

    def note(self, thing: Any, make: Callable[[], AnyStep]) -> None:
        found = self.running.get(id(thing))
        if found is not None and len(found[1]) < LONGEST:
            found[1].append(make())

    def end_test(self, name: str) -> None:
        encoder = msgspec.msgpack.Encoder()
        lives = [steps for _, steps in self.running.values() if len(steps) > 1]
        if len(lives) > MOST_OF_A_TEST:
            lives = sorted(lives, key=len)[:: len(lives) // MOST_OF_A_TEST]
        for steps in lives:
            if len(steps) > 1:
                try:
                    told = encoder.encode(steps)
                    found = msgspec.msgpack.decode(told, type=list[AnyStep])
                except (TypeError, ValueError):
                    continue
                self.lives.setdefault(told, Life(name, tuple(found)))
        self.running.clear()
        self.by_state.clear()


RECORDER = Recorder()


def _wrap(class_: type, name: str, note: Callable[..., None]) -> None:
    real = getattr(class_, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    setattr(class_, name, wrapped)


def pytest_configure(config: pytest.Config) -> None:
    def job_begins(job: Any, state: Any = None) -> None:
        if state is None:
            RECORDER.begin(job)

    def applied(job: Any, command: Any, now: Any, origin: Any = None) -> None:
        RECORDER.by_state[id(job.state)] = RECORDER.running.get(id(job), (None, []))[1]
        RECORDER.note(job, lambda: stage.Apply(now, command, origin))

    def told(ledger: Any, report: Any, state: Any, now: Any) -> None:
        steps = RECORDER.by_state.get(id(state), [])
        if len(steps) < LONGEST:
            steps.append(stage.Tell(now, report))
        RECORDER.running.setdefault(id(ledger), (ledger, steps))

    def booked(ledger: Any, now: Any, *, at_once: bool = False) -> None:
        RECORDER.note(ledger, lambda: stage.Book(now, at_once))

    _wrap(Job, "__init__", job_begins)
    _wrap(Job, "apply", applied)
    _wrap(Job, "ask", lambda job, query: RECORDER.note(job, lambda: stage.Ask(query)))
    _wrap(ProgressLedger, "heard", told)
    _wrap(ProgressLedger, "account", booked)
    _wrap(Watch, "__init__", lambda watch, **_: RECORDER.begin(watch))
    _wrap(Watch, "follow", lambda w, scene, terms, now: RECORDER.note(w, lambda: stage.Follow(now, scene, terms)))
    _wrap(Watch, "hear", lambda w, seen, now: RECORDER.note(w, lambda: stage.Hear(now, seen)))
    _wrap(Watch, "hear_failure", lambda w, failed: RECORDER.note(w, lambda: stage.HearFailure(failed)))
    _wrap(Watch, "hear_duplicates", lambda w, found: RECORDER.note(w, lambda: stage.HearDuplicates(dict(found))))
    _wrap(Watch, "hear_verdict", lambda w, verdict, now: RECORDER.note(w, lambda: stage.HearVerdict(now, verdict)))
    _wrap(
        Watch,
        "hear_answer",
        lambda w, command, now, *, is_heard: RECORDER.note(w, lambda: stage.HearAnswer(now, command, is_heard)),
    )
    _wrap(Watch, "lost", lambda w, nodes: RECORDER.note(w, lambda: stage.Lose(tuple(nodes))))
    _wrap(Watch, "tick", lambda w, now: RECORDER.note(w, lambda: stage.Tick(now)))
    _wrap(Liveness, "__init__", lambda liveness, *_, **__: RECORDER.begin(liveness))
    _wrap(
        Liveness,
        "follow",
        lambda each, detection, suspects=(): RECORDER.note(each, lambda: stage.Expect(detection, tuple(suspects))),
    )
    _wrap(Liveness, "attached", lambda e, node, life, now: RECORDER.note(e, lambda: stage.Meet(now, node, life)))
    _wrap(Liveness, "heard", lambda e, beat, now: RECORDER.note(e, lambda: stage.Beat(now, beat)))
    _wrap(Liveness, "forget", lambda e, node: RECORDER.note(e, lambda: stage.Forget(node)))
    _wrap(Liveness, "tick", lambda e, now, due_at: RECORDER.note(e, lambda: stage.Look(now, due_at)))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    RECORDER.end_test(item.nodeid.split("tests/core/")[-1])


def pytest_sessionfinish() -> None:
    write_lives(list(RECORDER.lives.values()), Path(os.environ["DLROVER_LIVES"]))
