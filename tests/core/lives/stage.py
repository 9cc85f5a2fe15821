"""
Lives: sequences of what came in to the core, written down, and everything that came out of it, as a number for each step.

A step is a command, a question, or something that was observed. What is compared after each of them: the reply or the refusal with its text, effects,
verdicts and events, the next deadline and what passes then, and the whole state. `tools/lives` finds such sequences.
"""

from __future__ import annotations

import collections
import hashlib
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.core.diagnosis.picture import FailedWorkers, Scene
from dlrover.core.diagnosis.watch import Watch
from dlrover.core.goodput.events import EventTeller
from dlrover.core.goodput.progress_ledger import ProgressLedger
from dlrover.core.job import Job
from dlrover.core.membership.liveness import Liveness
from dlrover.core.outcome import NotYet, Origin
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Command,
    Detection,
    Heartbeat,
    Incarnation,
    Micros,
    NodeId,
    Query,
)
from dlrover.protocol.messages.watch import FaultFound, HangFound, ProgressReport, Verdict, WatchObservation, WatchTerms

LIVES = Path(__file__).parent / "lives.xz"
DIGESTS = Path(__file__).parents[2] / "referees" / "lives.txt"
DIGEST_BYTES = 3
"""Of each step."""


class Apply(Struct, frozen=True, tag="apply", array_like=True):
    now: Micros
    command: Command
    origin: Origin | None = None


class Ask(Struct, frozen=True, tag="ask", array_like=True):
    query: Query


class Tell(Struct, frozen=True, tag="tell", array_like=True):
    """The ledger of progress hears what workers tell."""

    now: Micros
    report: ProgressReport


class Book(Struct, frozen=True, tag="book", array_like=True):
    now: Micros
    at_once: bool = False


class Follow(Struct, frozen=True, tag="follow", array_like=True):
    """From here on down: what the watch is told."""

    now: Micros
    scene: Scene
    terms: WatchTerms


class Hear(Struct, frozen=True, tag="hear", array_like=True):
    now: Micros
    observation: WatchObservation


class HearFailure(Struct, frozen=True, tag="failure", array_like=True):
    failed: FailedWorkers


class HearDuplicates(Struct, frozen=True, tag="duplicates", array_like=True):
    duplicates: dict[str, int]


class HearVerdict(Struct, frozen=True, tag="verdict", array_like=True):
    now: Micros
    verdict: Verdict


class HearAnswer(Struct, frozen=True, tag="answer", array_like=True):
    now: Micros
    command: HangFound | FaultFound
    is_heard: bool


class Lose(Struct, frozen=True, tag="lose", array_like=True):
    nodes: tuple[NodeId, ...]


class Tick(Struct, frozen=True, tag="tick", array_like=True):
    now: Micros


class Expect(Struct, frozen=True, tag="expect", array_like=True):
    """From here on down: what the observation of heartbeats is told."""

    detection: Detection
    suspects: tuple[NodeId, ...]


class Meet(Struct, frozen=True, tag="meet", array_like=True):
    now: Micros
    node: NodeId
    incarnation: Incarnation


class Beat(Struct, frozen=True, tag="beat", array_like=True):
    now: Micros
    heartbeat: Heartbeat


class Forget(Struct, frozen=True, tag="forget", array_like=True):
    node: NodeId


class Look(Struct, frozen=True, tag="look", array_like=True):
    now: Micros
    due_at: Micros


JobStep = Apply | Ask | Tell | Book
WatchStep = Follow | Hear | HearFailure | HearDuplicates | HearVerdict | HearAnswer | Lose | Tick
LivenessStep = Expect | Meet | Beat | Forget | Look
AnyStep = (
    Apply
    | Ask
    | Tell
    | Book
    | Follow
    | Hear
    | HearFailure
    | HearDuplicates
    | HearVerdict
    | HearAnswer
    | Lose
    | Tick
    | Expect
    | Meet
    | Beat
    | Forget
    | Look
)


class Life(Struct, frozen=True, array_like=True):
    name: str
    steps: tuple[AnyStep, ...]


def read_lives(file: Path = LIVES) -> list[Life]:
    return _DECODER.decode(lzma.decompress(file.read_bytes()))


def write_lives(lives: list[Life], file: Path = LIVES) -> None:
    file.write_bytes(lzma.compress(_ENCODER.encode(lives), preset=9))


class Stage:
    """Where a life is played."""

    def __init__(self) -> None:
        self.job = Job()
        self.teller = EventTeller(self.job.state)
        self.ledger = ProgressLedger()
        self.watch = Watch(job_name="a-job")
        self.liveness = Liveness(Micros(0))

    def play(self, step: AnyStep) -> tuple[object, ...]:
        """All that can be seen after it."""
        match step:
            case Apply() | Ask() | Tell() | Book():
                return self._job(step)
            case Expect() | Meet() | Beat() | Forget() | Look():
                return self._liveness(step)
        return self._watch(step)

    def _job(self, step: JobStep) -> tuple[object, ...]:
        job = self.job
        match step:
            case Ask():
                try:
                    answer: object = job.ask(step.query)
                except Rejected as error:
                    return _refusal(error)
                return (_seen(answer), [job.goodput(Micros(job.now + later)) for later in (0, 31_000_000)])
            case Tell():
                self.ledger.heard(step.report, job.state, max(step.now, job.now))
                return (vars(self.ledger),)
            case Book():
                return (self.ledger.account(max(step.now, job.now), at_once=step.at_once), vars(self.ledger))
        now = max(step.now, job.now)
        try:
            outcome = job.apply(step.command, now, step.origin)
        except Rejected as error:
            return _refusal(error)
        events = list(self.teller.tell(step.command, outcome, job.state, now))
        deadline = job.next_deadline()
        passed = [] if deadline is None else [job.due(deadline), job.due(Micros(deadline - 1))]
        return outcome, events, deadline, passed, job.suspects(), job.state

    def _watch(self, step: WatchStep) -> tuple[object, ...]:
        watch = self.watch
        match step:
            case Follow():
                watch.follow(step.scene, step.terms, step.now)
            case Hear():
                watch.hear(step.observation, step.now)
            case HearFailure():
                watch.hear_failure(step.failed)
            case HearDuplicates():
                watch.hear_duplicates(step.duplicates)
            case HearVerdict():
                watch.hear_verdict(step.verdict, step.now)
            case HearAnswer():
                watch.hear_answer(step.command, step.now, is_heard=step.is_heard)
            case Lose():
                watch.lost(step.nodes)
            case Tick():
                return (watch.tick(step.now), watch.next_deadline(), watch.diagnosis(8), watch)
        return (watch.next_deadline(), watch)

    def _liveness(self, step: LivenessStep) -> tuple[object, ...]:
        liveness = self.liveness
        match step:
            case Expect():
                liveness.follow(step.detection, step.suspects)
            case Meet():
                liveness.attached(step.node, step.incarnation, step.now)
            case Beat():
                try:
                    liveness.heard(step.heartbeat, step.now)
                except Rejected as error:
                    return _refusal(error)
            case Forget():
                liveness.forget(step.node)
            case Look():
                return (liveness.tick(step.now, step.due_at), liveness)
        return (liveness.next_deadline(), liveness)


def _refusal(error: Rejected) -> tuple[object, ...]:
    return ("refused", error.code, str(error))


def _seen(answer: object) -> object:
    if isinstance(answer, NotYet):
        otherwise = answer.otherwise
        return ("not yet", answer.topics, _refusal(otherwise) if isinstance(otherwise, Rejected) else otherwise)
    return answer


def digests(life: Life) -> Iterator[str]:
    stage = Stage()
    for step in life.steps:
        yield hashlib.blake2b(_SAYER.encode(stage.play(step)), digest_size=DIGEST_BYTES).hexdigest()


def all_digests() -> str:
    return "".join(f"{life.name}: {' '.join(digests(life))}\n" for life in read_lives())


def recorded_digests(text: str) -> dict[str, list[str]]:
    found = (line.split(": ", 1) for line in text.splitlines())
    return {name: told.split() for name, told in found}


def _plain(value: Any) -> object:
    """What messages do not know how to write: the inside of observers."""
    if isinstance(value, collections.deque):
        return list(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value).__name__
    return {name: each for name, each in vars(value).items() if not callable(each)}


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Life])
_SAYER = msgspec.msgpack.Encoder(enc_hook=_plain)
