"""
Many jobs, one cluster, virtual time: what the policies of scaling are worth against sizes that users ask for.

    python benchmarks/cluster_replay.py [--parameters FILE] [--seeds 1 2 ...] [--pauses 30 300] [--json FILE]

Recurring jobs with parameter servers, first with requests that are wrong in every dimension, then with right ones; then all-reduce jobs. Each figure is the median over
seeds, with its range, as a ratio to the same seed under the user's request with back-fill. `cluster_replay.toml` has everything that is drawn. The law that makes
step times is not the one that is fitted, and no policy reads it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replay_cluster import Begin, Cluster, Result, summary
from replay_jobs import FittedJob, FixedJob, HistoricalJob, ServerJob, merged
from replay_laws import Order, Parameters, Scene, ServerKind, Size, read_parameters, server_scene, world_scene
from replay_worlds import WorldCluster

from dlrover.core.scaling.history.alike import find_alike
from dlrover.core.scaling.history.seen import JobSeen, Recipe
from dlrover.core.scaling.history.starting import percentile, start_like

PARAMETERS = Path(__file__).with_name("cluster_replay.toml")
COLUMNS = ("completion", "p95", "run", "core_hours", "cpu", "memory")
HEADS = ("completion", "its p95", "run time", "core-hours", "CPU use", "memory use")
BASE = "request, back-fill"


@dataclass(frozen=True)
class Goal:
    what: str
    measured: Callable[[dict[str, list[dict[str, float]]]], float]
    limit: float
    is_least: bool = False

    def line(self, results: dict[str, list[dict[str, float]]]) -> str:
        found = self.measured(results)
        is_met = found >= self.limit if self.is_least else found <= self.limit
        sign = "at least" if self.is_least else "at most"
        return f"  {'met   ' if is_met else 'MISSED'} {self.what}: {found:.2f} ({sign} {self.limit:g})"


def recipe_of(order: Order) -> Recipe:
    return Recipe(name=f"kind-{order.kind}")


def as_asked(order: Order, _kind: ServerKind, _now: float, _ended: list[JobSeen]) -> ServerJob:
    return FixedJob(order.uid, recipe_of(order), order.size)


def by_percentile(order: Order, _kind: ServerKind, now: float, ended: list[JobSeen]) -> ServerJob:
    plan = percentile(find_alike(recipe_of(order), _of_kind(order, ended), before=now))
    size = order.size if plan is None else merged(order.size, plan)
    return FixedJob(order.uid, recipe_of(order), size)


def historical(order: Order, kind: ServerKind, now: float, ended: list[JobSeen]) -> ServerJob:
    former = _of_kind(order, ended)
    return HistoricalJob(
        order.uid, recipe_of(order), order.size, work=order.work, operations=kind.operations, former=former, now=now
    )


def fitted(pause: float, *, has_brain: bool) -> Begin:
    def begin(order: Order, _kind: ServerKind, now: float, ended: list[JobSeen]) -> ServerJob:
        first = _start(order, now, ended) if has_brain else order.size
        return FittedJob(order.uid, recipe_of(order), first, work=order.work, pause=pause, now=now)

    return begin


def warm_start(pause: float) -> Begin:
    """The first life of a kind scales itself; later ones begin as Brain says, and stay."""

    def begin(order: Order, _kind: ServerKind, now: float, ended: list[JobSeen]) -> ServerJob:
        recipe, former = recipe_of(order), _of_kind(order, ended)
        if former:
            return FixedJob(order.uid, recipe, _start(order, now, former))
        return FittedJob(order.uid, recipe, order.size, work=order.work, pause=pause, now=now)

    return begin


def _start(order: Order, now: float, ended: list[JobSeen]) -> Size:
    found = start_like(find_alike(recipe_of(order), _of_kind(order, ended), before=now))
    return order.size if found is None else merged(order.size, found.plan)


def _of_kind(order: Order, ended: list[JobSeen]) -> list[JobSeen]:
    name = recipe_of(order).name
    return [job for job in ended if job.recipe.name == name]


def replay_servers(given: Parameters, seeds: list[int], policies: dict[str, Begin], *, is_right: bool, pause: float):  # type: ignore[no-untyped-def]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for seed in seeds:
        scene = server_scene(given, seed, is_right=is_right)
        later = _later_lives(scene, policies[BASE], pause)
        for name, begin in policies.items():
            began = time.process_time()
            results = Cluster(scene, begin, backfill=name != "request, FIFO", pause=pause).run()
            print(f"seed {seed}: {name}, {time.process_time() - began:.1f} s", file=sys.stderr)
            found[name].append({**summary(results), "later": _mean_hours(results, 1) / later})
    return found


def _later_lives(scene: Scene, begin: Begin, pause: float) -> float:
    return _mean_hours(Cluster(scene, begin, backfill=True, pause=pause).run(), 1)


def _mean_hours(results: list[Result], first_life: int) -> float:
    return statistics.fmean((each.ended - each.submitted) / 3600 for each in results if each.life >= first_life)


def replay_worlds(given: Parameters, seeds: list[int], pause: float) -> list[float]:
    """Completion with `allot` by completion with fixed sizes and back-fill."""
    ratios = []
    for seed in seeds:
        scene = world_scene(given, seed)
        fixed, elastic = (WorldCluster(scene, is_elastic=elastic, pause=pause).run() for elastic in (False, True))
        ratios.append(_mean_hours(elastic, 0) / _mean_hours(fixed, 0))
    return ratios


def ratio(results: dict[str, list[dict[str, float]]], name: str, key: str, base: str = BASE) -> list[float]:
    return [one[key] / other[key] for one, other in zip(results[name], results[base], strict=True)]


def show(title: str, results: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{title}\n")
    print(f"| Policy | {' | '.join(HEADS)} | changes of a job | pause | OOMs |")
    print(f"|---|{'---:|' * (len(HEADS) + 3)}")
    for name, found in results.items():
        cells = [_range(ratio(results, name, key)) for key in COLUMNS]
        changes = f"{statistics.median(one['changes'] for one in found):.1f}"
        most = max(one["most_changes"] for one in found)
        pause = f"{statistics.median(one['pause'] for one in found):.2%}"
        ooms = f"{statistics.median(one['ooms'] for one in found):.0f}"
        print(f"| {name} | {' | '.join(cells)} | {changes} (most {most:.0f}) | {pause} | {ooms} |")


def _range(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def _median(name: str, key: str, base: str = BASE) -> Callable[[dict[str, list[dict[str, float]]]], float]:
    return lambda results: statistics.median(ratio(results, name, key, base))


BRAIN = "fitted, Brain"
WRONG_GOALS = (
    Goal("run time with Brain, by the request", _median(BRAIN, "run"), 0.6),
    Goal("completion with Brain, by the request", _median(BRAIN, "completion"), 0.5),
    Goal("completion with Brain, by `percentile`", _median(BRAIN, "completion", "percentile"), 0.6),
    Goal("completion with Brain, by the historical rules", _median(BRAIN, "completion", "historical rules"), 1.0),
    Goal("core-hours with Brain, by the request", _median(BRAIN, "core_hours"), 0.7),
    Goal("CPU use with Brain, by the request", _median(BRAIN, "cpu"), 1.5, is_least=True),
    Goal("memory use with Brain, by the request", _median(BRAIN, "memory"), 1.3, is_least=True),
    Goal("most changes of a job with Brain", lambda found: max(one["most_changes"] for one in found[BRAIN]), 10),
    Goal(
        "completion with a warm start alone, from the second life on, by the request",
        lambda found: statistics.median(one["later"] for one in found["warm start alone"]),
        0.85,
    ),
)
RIGHT_GOALS = (
    Goal("completion with Brain, by right requests", _median(BRAIN, "completion"), 1.03),
    Goal("core-hours with Brain, by right requests", _median(BRAIN, "core_hours"), 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--parameters", type=Path, default=PARAMETERS)
    parser.add_argument("--seeds", type=int, nargs="*", default=None)
    parser.add_argument("--pauses", type=float, nargs="*", default=[], help="also with changes that pause so long (s)")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    given = read_parameters(arguments.parameters)
    seeds = arguments.seeds or given.seeds
    began = time.process_time()
    print(f"{given.jobs} jobs of {given.kinds} kinds on {given.cores} cores; seeds {', '.join(map(str, seeds))}")

    def policies(pause: float) -> dict[str, Begin]:
        return {
            "request, FIFO": as_asked,
            BASE: as_asked,
            "percentile": by_percentile,
            "historical rules": historical,
            "fitted": fitted(pause, has_brain=False),
            "warm start alone": warm_start(pause),
            BRAIN: fitted(pause, has_brain=True),
        }

    wrong = replay_servers(given, seeds, policies(given.pause), is_right=False, pause=given.pause)
    show(f"Parameter servers, wrong requests, a change pauses for {given.pause:g} s", wrong)
    print("\n" + "\n".join(goal.line(wrong) for goal in WRONG_GOALS))
    few = {name: begin for name, begin in policies(given.pause).items() if name in (BASE, BRAIN)}
    right = replay_servers(given, seeds, few, is_right=True, pause=given.pause)
    show("Parameter servers, right requests", right)
    print("\n" + "\n".join(goal.line(right) for goal in RIGHT_GOALS))
    worlds = replay_worlds(given, seeds, given.pause)
    print(f"\nAll-reduce, completion with `allot` by fixed sizes with back-fill: {_range(worlds)}")
    print(f"  {'met   ' if statistics.median(worlds) <= 0.95 else 'MISSED'} (at most 0.95)")
    found = {"wrong": wrong, "right": right, "worlds": worlds}
    for pause in arguments.pauses:
        few = {name: begin for name, begin in policies(pause).items() if name in (BASE, "fitted", BRAIN)}
        slow = replay_servers(given, seeds, few, is_right=False, pause=pause)
        show(f"Parameter servers, wrong requests, a change pauses for {pause:g} s", slow)
        found[f"wrong, pause {pause:g}"] = slow
    print(f"\n{time.process_time() - began:.0f} s of processor time")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
