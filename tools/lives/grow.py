"""
Finds lives that touch what no test touches: takes what tests send to the core, and varies it, again and again.

    DLROVER_LIVES=/tmp/base.xz python -m pytest -q -n 0 -p tools.lives.recorder tests/core     # what tests send
    python -m tools.lives.grow --base /tmp/base.xz --pool /tmp/pool-1.xz --seed 1 --minutes 10  # many at a time, each with its seed
    python -m tools.lives.choose /tmp/base.xz /tmp/pool-*.xz --seconds 6                        # the fewest that touch it all

A variation drops, repeats and exchanges steps, takes some from other lives, gives messages other values that were seen in the same field or are at its
edges, and looks at deadlines a microsecond too early, in time, and late. What touches something new (`instrument.py`) is kept and varied in turn.
"""

from __future__ import annotations

import argparse
import enum
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

from tools.lives import instrument  # noqa: E402

instrument.install(ROOT)

import msgspec  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from dlrover.core.outcome import Origin  # noqa: E402
from dlrover.protocol.messages.identity import Micros  # noqa: E402
from dlrover.protocol.messages.job import DeadlinePassed, JoinCheck, JoinRendezvous  # noqa: E402
from tests.core.lives.stage import (  # noqa: E402
    AnyStep,
    Apply,
    Ask,
    Book,
    Hear,
    Life,
    Stage,
    Tell,
    Tick,
    read_lives,
    write_lives,
)

LONGEST = 120
MOST_SECONDS = 0.5
"""Of CPU time for one step: a job of a million nodes takes longer, and is no test."""
EDGES_LATER = (1, 999_999, 1_000_000, 5_000_000, 30_000_000, 61_000_000, 601_000_000, 3_600_000_000)
_ONE = msgspec.msgpack.Decoder(AnyStep)
_ENCODE = msgspec.msgpack.Encoder().encode


class Fails(Exception):
    """The core itself failed: that is a bug of the core, or of the variation."""


def _take_too_long(*_: object) -> None:
    raise TimeoutError


class Values:
    """What was seen in each field of each kind of message."""

    MOST = 60

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.seen: dict[tuple[type, str], dict[bytes, object]] = {}

    def learn(self, value: object) -> None:
        match value:
            case msgspec.Struct():
                for name in value.__struct_fields__:
                    each = getattr(value, name)
                    known = self.seen.setdefault((type(value), name), {})
                    try:
                        told = _ENCODE(each)
                    except (TypeError, ValueError):
                        continue
                    if len(told) < 2000 and (len(known) < self.MOST or self.chance.random() < 0.01):
                        known.setdefault(told, each)
                    self.learn(each)
            case tuple() | list():
                for each in value[:20]:
                    self.learn(each)
            case dict():
                for each in list(value.values())[:20]:
                    self.learn(each)

    def vary_some(self, message: Any) -> Any:
        for _ in range(self.chance.choice([1, 1, 1, 2, 3, 5])):
            message = self.vary(message)
        return message

    def vary(self, value: Any, *, depth: int = 0) -> Any:
        """One thing in it is another."""
        chance = self.chance
        match value:
            case msgspec.Struct() if value.__struct_fields__:
                name = chance.choice(value.__struct_fields__)
                known = self.seen.get((type(value), name))
                former = getattr(value, name)
                is_whole = not isinstance(former, msgspec.Struct | tuple | list | dict) or chance.random() < 0.3
                if known and is_whole and chance.random() < 0.6:
                    return replace(value, **{name: chance.choice(list(known.values()))})
                return replace(value, **{name: self.vary(former, depth=depth + 1)})
            case enum.Enum():
                return chance.choice(list(type(value)))
            case bool():
                return not value
            case int():
                return chance.choice([0, 1, 2, value - 1, value + 1, value * 2, -1, chance.randrange(12)])
            case float():
                return chance.choice([0.0, 1.0, value + 1.0, value - 1.0, value * 2, value / 2, value * 1.01, -1.0])
            case str():
                return chance.choice(["", f"{value}x", "other", value[:-1]])
            case tuple() | list() if value:
                index = chance.randrange(len(value))
                other = [*value[:index], self.vary(value[index], depth=depth + 1), *value[index + 1 :]]
                choices = [other, other, other, value[1:], value[::-1], [*value, value[index]], [*value, other[index]]]
                return type(value)(chance.choice(choices))
            case dict() if value:
                key = chance.choice(list(value))
                less = {other: each for other, each in value.items() if other != key}
                changed = {**value, key: self.vary(value[key], depth=depth + 1)}
                return chance.choice([less, changed, changed, {**value, self.vary(key): value[key]}])
            case None:
                return chance.choice([0, 1, 2, 1.0, "x"])
        return value


class Variation:
    """One life under way, made from another."""

    def __init__(self, grower: Grower, base: Life) -> None:
        self.grower, self.base = grower, base
        self.chance = grower.chance
        self.stage = Stage()
        self.steps: list[AnyStep] = []
        self.offset = 0
        self.sequences: dict[tuple[int, int], int] = {}
        self.rates = [self.chance.choice([0, 0, 0.02, 0.05, 0.1, 0.3]) for _ in range(7)]
        self.useful = 0
        """Steps up to the last that touched something new."""
        self.has_found = False

    def run(self) -> None:
        chance, rates = self.chance, self.rates
        for step in self.base.steps:
            if len(self.steps) > LONGEST:
                break
            if chance.random() < rates[0]:
                continue
            if chance.random() < rates[1]:
                self.wait()
            if chance.random() < rates[2]:
                self.add(self.grower.any_step(step))
            if chance.random() < rates[3]:
                self.vary(step)
            if chance.random() < rates[4]:
                self.vary(step)
                continue
            self.add(step)
            if chance.random() < rates[5]:
                self.add(step)
            if chance.random() < rates[6]:
                self.offset += chance.choice(EDGES_LATER)
        for _ in range(chance.choice([0, 0, 1, 3])):
            self.wait()

    def vary(self, step: AnyStep) -> None:
        values = self.grower.values
        try:
            match step:
                case Apply():
                    other: Any = replace(step, command=values.vary_some(step.command))
                case Ask():
                    other = replace(step, query=values.vary_some(step.query))
                case Hear():
                    other = replace(step, observation=values.vary_some(step.observation))
                case Tell():
                    other = replace(step, report=values.vary_some(step.report))
                case _:
                    other = values.vary(step)
            other = _ONE.decode(_ENCODE(other))
        except (ValueError, TypeError, OverflowError):  # no message: it never reaches the core
            return
        self.add(other)

    def wait(self) -> None:
        """Until a deadline, a little before or after it, and what passes then."""
        by = self.chance.choice([-1, 0, 0, 0, 0, 1, 1_000_000])
        if isinstance(self.base.steps[0], Apply | Ask):
            job = self.stage.job
            deadline = job.next_deadline()
            if deadline is None:
                return
            at = max(job.now, deadline + by)
            self.offset = max(self.offset, at - job.now) if self.chance.random() < 0.5 else self.offset
            for due in job.due(Micros(at)):
                self.play(Apply(Micros(at), due, None))
        else:
            deadline = self.stage.watch.next_deadline()
            if deadline is not None:
                self.play(Tick(Micros(max(0, deadline + by))))

    def add(self, step: AnyStep) -> None:
        """As it would come now: from who is there, in the round that is."""
        job, chance = self.stage.job, self.chance
        match step:
            case Apply():
                now = Micros(max(job.now, step.now + self.offset))
                command = step.command
                if isinstance(command, DeadlinePassed) and chance.random() < 0.5:
                    now = Micros(max(now, job.next_deadline() or 0))
                fields = getattr(command, "__struct_fields__", ())
                origin = step.origin
                live = job.state.nodes.live
                if "node" in fields and "incarnation" in fields and live and chance.random() < 0.8:
                    node = command.node if command.node in live else chance.choice(list(live))
                    changed: dict[str, Any] = {"node": node, "incarnation": live[node].incarnation}
                    if "round" in fields and chance.random() < 0.8:
                        rdzv = job.state.rendezvous
                        is_next = isinstance(command, JoinRendezvous | JoinCheck)
                        changed["round"] = rdzv.next_round if is_next else rdzv.round
                        if job.state.cluster is not None:
                            changed["round"] = job.state.cluster.round_of(node)
                    command = replace(command, **changed)
                    if origin is not None:
                        key = (node, live[node].incarnation)
                        self.sequences[key] = number = max(self.sequences.get(key, 0) + 1, origin.sequence)
                        origin = Origin(node, live[node].incarnation, number, min(origin.answered, number - 1))
                self.play(Apply(now, command, origin))
            case Tell() | Book():
                self.play(replace(step, now=Micros(step.now + self.offset)))
            case Ask():
                self.play(step)
            case _ if hasattr(step, "now"):
                self.play(replace(step, now=Micros(step.now + self.offset)))
            case _:
                self.play(step)

    def play(self, step: AnyStep) -> None:
        instrument.touched.clear()
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            self.stage.play(step)
        except Exception as error:
            raise Fails(f"{type(step).__name__}: {step}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.steps.append(step)
        kind = self.grower.kind_of(step)
        new = instrument.touched - self.grower.touched.setdefault(kind, set())
        if new:
            self.grower.touched[kind] |= new  # of a life that fails later: a pity, and no harm
            self.has_found = True
            self.useful = len(self.steps)


class Grower:
    def __init__(self, base: list[Life], seed: int) -> None:
        self.chance = random.Random(seed)
        self.values = Values(self.chance)
        self.pool: list[Life] = []
        self.kinds: dict[str, int] = {}
        self.touched: dict[int, set[int]] = {}
        """By kind of message."""
        self.failures: dict[str, str] = {}
        self.num_runs = 0
        self.by_kind: dict[str, list[AnyStep]] = {}
        for life in base:
            self.learn(life)
            self.try_life(life, as_it_is=True)

    def kind_of(self, step: AnyStep) -> int:
        what = step.command if isinstance(step, Apply) else step.query if isinstance(step, Ask) else step
        what = step.observation if isinstance(step, Hear) else what
        return self.kinds.setdefault(type(what).__name__, len(self.kinds))

    def learn(self, life: Life) -> None:
        for step in life.steps:
            if self.chance.random() < 0.2 or len(self.by_kind.get(type(step).__name__, ())) < 50:
                self.values.learn(step)
                self.by_kind.setdefault(
                    "watch" if not isinstance(step, Apply | Ask | Tell | Book) else "job", []
                ).append(step)

    def any_step(self, like: AnyStep) -> AnyStep:
        kind = "job" if isinstance(like, Apply | Ask | Tell | Book) else "watch"
        return self.chance.choice(self.by_kind[kind])

    def try_life(self, base: Life, *, as_it_is: bool = False) -> None:
        self.num_runs += 1
        variation = Variation(self, base)
        if as_it_is:
            variation.rates = [0] * 7
        try:
            if as_it_is:
                for step in base.steps:
                    variation.play(step)
            else:
                variation.run()
        except Fails as error:
            cause = error.__cause__
            frames = traceback.extract_tb(cause.__traceback__ if cause is not None else None)
            where = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "dlrover/core" in f.filename), "?")
            self.failures.setdefault(where, f"{cause!r}\n{error}")
        if variation.has_found:
            life = Life(f"{base.name.split('~')[0]}~", tuple(variation.steps[: variation.useful]))
            self.pool.append(life)

    def grow(self, seconds: float, file: Path) -> None:
        ends_at = time.monotonic() + seconds
        told_at = 0.0
        while time.monotonic() < ends_at:
            recent = self.pool[-200:] if self.chance.random() < 0.4 else self.pool
            self.try_life(self.chance.choice(recent))
            if time.monotonic() > told_at + 30:
                told_at = time.monotonic()
                write_lives(self.pool, file)
                sys.stderr.write(
                    f"{self.num_runs} runs, {len(self.pool)} lives, {sum(map(len, self.touched.values()))} touched\n"
                )
        write_lives(self.pool, file)
        for where, what in self.failures.items():
            sys.stderr.write(f"failed at {where}: {what[:600]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lives.grow")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    signal.signal(signal.SIGPROF, _take_too_long)
    Grower(read_lives(options.base), options.seed).grow(60 * options.minutes, options.pool)


if __name__ == "__main__":
    main()
