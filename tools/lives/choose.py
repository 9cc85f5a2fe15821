"""
Of many lives the fewest that touch all that any of them touches, within a time: written to `tests/core/lives/lives.xz`.

With `--keep` the lives of another file all stay, in front, and the others are chosen for what those do not touch.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]

import msgspec  # noqa: E402

from tools.lives import instrument  # noqa: E402

instrument.install(ROOT)

from tests.core.lives.stage import LIVES, AnyStep, Apply, Ask, Hear, Life, Stage, read_lives, write_lives  # noqa: E402

TIMES = 3
"""So many lives shall touch each place, in whatever step."""


def touched_by(life: Life) -> tuple[dict[tuple[int, str], int], float] | None:
    """What it touches, by the kind of step, and after how many steps; None: the core fails in it."""
    stage, found = Stage(), {}
    began = time.process_time()
    for number, step in enumerate(life.steps):
        instrument.touched.clear()
        try:
            stage.play(step)
        except Exception:
            return None
        kind = _kind_of(step)
        for site in instrument.touched:
            found.setdefault((site, kind), number)
    return found, time.process_time() - began


def _kind_of(step: AnyStep) -> str:
    what = step.command if isinstance(step, Apply) else step.query if isinstance(step, Ask) else step
    return type(step.observation if isinstance(step, Hear) else what).__name__


def choose(lives: list[Life], kept: list[Life], seconds: float, least: float) -> list[Life]:
    played = [(life, *found) for life in lives if (found := touched_by(life)) is not None]
    known: Counter[object] = Counter()
    for life in kept:
        found = touched_by(life)
        assert found is not None, f"the core fails in {life.name}, which is to be kept"
        known.update({*found[0], *(site for site, _ in found[0])})
    needed: dict[object, int] = {}
    wanted: list[set[object]] = []
    for _, found, _ in played:
        things = {*found, *(site for site, _ in found)}
        wanted.append(things)
        for thing in things:
            needed[thing] = min(needed.get(thing, 0) + 1, 1 if isinstance(thing, tuple) else TIMES)
    print(f"{len(played)} lives touch {len(needed)} things, {sum(thing not in known for thing in needed)} of them new")
    for thing in needed:
        needed[thing] -= known[thing]
    chosen: list[Life] = []
    spent = 0.0
    best = [(-math.inf, index) for index in range(len(played))]
    while best and spent < seconds:
        # What a life is worth only shrinks: the best by what was known is looked at again, until one stays the best.
        _, index = heapq.heappop(best)
        cost = played[index][2] + 0.001
        wanted[index] = {thing for thing in wanted[index] if needed[thing] > 0}
        now = sum(3.0 if isinstance(thing, int) else 1.0 for thing in wanted[index]) / cost
        if now * cost < least:
            continue
        if best and now < -best[0][0]:
            heapq.heappush(best, (-now, index))
            continue
        life, found, _ = played[index]
        new = wanted[index]
        first: dict[object, int] = {}
        for (site, kind), number in found.items():
            first[site] = min(number, first.get(site, number))
            first[site, kind] = number
        last = max(first[thing] for thing in new)
        share = (last + 1) / len(life.steps)
        name = re.sub(r"^\d+ ", "", life.name).strip("~")  # the number of the life that it grew from
        chosen.append(Life(f"{len(kept) + len(chosen):04} {name}", life.steps[: last + 1]))
        spent += cost * share
        for thing in new:
            needed[thing] -= 1
    left = sum(1 for count in needed.values() if count > 0)
    print(
        f"{len(chosen)} chosen, {sum(len(life.steps) for life in chosen)} steps, {spent:.1f} s with probes; {left} things left"
    )
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lives.choose")
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=20.0, help="that all of them may take, with probes")
    parser.add_argument("--least", type=float, default=3.0, help="new things that a life has to touch")
    parser.add_argument("--keep", type=Path, help="lives that stay whatever they touch")
    parser.add_argument("--out", type=Path, default=LIVES)
    options = parser.parse_args()
    kept = [] if options.keep is None else read_lives(options.keep)
    lives = {msgspec.msgpack.encode(life.steps): life for pool in options.pools for life in read_lives(pool)}
    for life in kept:
        lives.pop(msgspec.msgpack.encode(life.steps), None)
    write_lives(kept + choose(list(lives.values()), kept, options.seconds, options.least), options.out)


if __name__ == "__main__":
    main()
