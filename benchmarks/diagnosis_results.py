"""Results of the corpus: kept in a file after each fault, so that a run can be ended and resumed, and told as a table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from diagnosis_kinds import KINDS, NUM_RANKS

AFTER_LOOK = 5.0
"""Seconds in which a verdict shall come after the look."""
AGAIN = 10.0
"""Seconds in which training shall run again after a rank was stopped or deadlocked."""


@dataclass
class Result:
    number: int
    """In the plan, which the seed determines."""
    kind: str
    rank: int
    found_class: str = ""
    found_ranks: tuple[int, ...] = ()
    is_class_right: bool = False
    is_culprit_right: bool = False
    to_look: float | None = None
    """Seconds from the fault to the moment at which a rank stood still for longer than it should."""
    to_verdict: float | None = None
    """Seconds from the fault to the verdict."""
    to_training: float | None = None
    """Seconds from the fault to the next step, where the verdict acted."""
    has_acted: bool = False
    has_page: bool | None = None
    """The page names the rank and shows where in the script it is; None: not asked."""
    others: tuple[str, ...] = ()
    """Other verdicts that came with it."""
    load: float = 0.0
    """Of the machine at that moment."""
    took: float = 0.0
    """Seconds from the end of the fault before, the start of a job included."""
    note: str = ""


@dataclass
class Episode:
    """What a healthy job did that could be mistaken for a fault."""

    number: int
    variation: str
    rank: int
    is_disturbed: bool = False
    load: float = 0.0
    note: str = ""


@dataclass
class Ledger:
    """All of one run. Written to its file after each entry."""

    path: Path | None = None
    commit: str = ""
    seed: int = 1
    times: int = 0
    kinds: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    minutes: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, entry: Result | Episode) -> None:
        with self._lock:
            if isinstance(entry, Result):
                self.results.append(entry)
            else:
                self.episodes.append(entry)
            self.write()

    def write(self) -> None:
        if self.path is None:
            return
        told = {name: value for name, value in asdict(self).items() if name != "path"}
        partial = self.path.with_name(self.path.name + ".new")
        partial.write_text(json.dumps(told, indent=1))
        partial.rename(self.path)


def read_ledger(path: Path) -> Ledger:
    told: dict[str, Any] = json.loads(path.read_text())
    known = {each.name for each in fields(Ledger)}
    ledger = Ledger(**{name: value for name, value in told.items() if name in known - {"results", "episodes"}})
    ledger.path = path
    ledger.results = [Result(**result) for result in told["results"]]
    ledger.episodes = [Episode(**episode) for episode in told["episodes"]]
    return ledger


def commit_here() -> str:
    """With a mark if files differ from it."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def summary(ledgers: Sequence[Ledger]) -> str:
    results = [result for ledger in ledgers for result in ledger.results]
    episodes = [episode for ledger in ledgers for episode in ledger.episodes]
    lines = [
        "| kind | faults | class right | rank right | to the verdict, median s | to training, median s |",
        "|---|---|---|---|---|---|",
    ]
    for name in (name for name in KINDS if any(result.kind == name for result in results)):
        mine = [result for result in results if result.kind == name]
        lines.append(
            f"| {name} | {len(mine)} | {sum(each.is_class_right for each in mine)} | {sum(each.is_culprit_right for each in mine)} | "
            f"{_median([each.to_verdict for each in mine])} | {_median([each.to_training for each in mine])} |"
        )
    lines += ["", *_totals(results), *_again(results)]
    lines += [f"Left out: {kind}, it {why}." for ledger in ledgers for kind, why in ledger.left_out.items()]
    wrong = [each for each in results if not (each.is_class_right and each.is_culprit_right)]
    lines += [f"Wrong: {tell(each)}" for each in wrong]
    disturbed = [each for each in episodes if each.is_disturbed]
    lines.append(f"{len(episodes)} healthy jobs, {len(disturbed)} disturbed.")
    lines += [f"Disturbed: {each.variation} on rank {each.rank}: {each.note}" for each in disturbed]
    loads = sorted(each.load for each in (*results, *episodes))
    if loads:
        lines.append(
            f"Load of the machine ({os.cpu_count()} cores): {loads[0]:.1f} to {loads[-1]:.1f}, median {statistics.median(loads):.1f}."
        )
    lines.append(
        f"Commit {', '.join(dict.fromkeys(ledger.commit for ledger in ledgers))}, {sum(ledger.minutes for ledger in ledgers):.0f} minutes."
    )
    return "\n".join(lines)


def _totals(results: Sequence[Result]) -> list[str]:
    hangs = [each for each in results if KINDS[each.kind].is_hang]
    timely = [
        each for each in hangs if each.to_verdict is not None and each.to_verdict <= (each.to_look or 0.0) + AFTER_LOOK
    ]
    looks = [each.to_look for each in hangs if each.to_look is not None]
    slowest = max((each.to_verdict or 0.0 for each in hangs), default=0.0)
    beside = [each for each in results if each.others]
    return [
        f"{len(results)} faults of {len({result.kind for result in results})} kinds in jobs of {NUM_RANKS} workers.",
        f"Class right {_share(results, lambda each: each.is_class_right)}, rank right {_share(results, lambda each: each.is_culprit_right)}.",
        f"Hangs: {len(timely)} of {len(hangs)} verdicts within {AFTER_LOOK:g} s of the look, the slowest {slowest:.1f} s after the fault.",
        f"Looks: {min(looks, default=0.0):.1f} to {max(looks, default=0.0):.1f} s after the fault, median {_median(looks)} s.",
        f"{len(beside)} faults had other verdicts as well.",
    ]


def _again(results: Sequence[Result]) -> list[str]:
    """How soon training ran again after the faults that are promised to be cheap."""
    lines = []
    for what, names in (
        ("Stopped", ("stop",)),
        ("Deadlocked", tuple(name for name, kind in KINDS.items() if kind.has_stack)),
    ):
        mine = [each for each in results if each.kind in names]
        if not mine:
            continue
        times = [each.to_training for each in mine if each.to_training is not None]
        soon = sum(time <= AGAIN for time in times)
        pages = sum(bool(each.has_page) for each in mine)
        lines.append(
            f"{what}: training ran again within {AGAIN:g} s in {soon} of {len(mine)} "
            f"(median {_median(times)} s, longest {max(times, default=0.0):.1f} s); the page names the rank and shows its stack in {pages}."
        )
    return lines


def tell(result: Result) -> str:
    class_, rank = ("ok" if right else "WRONG" for right in (result.is_class_right, result.is_culprit_right))
    took = "-" if result.to_verdict is None else f"{result.to_verdict:.1f} s"
    again = "" if result.to_training is None else f", training after {result.to_training:.1f} s"
    ranks = ",".join(map(str, result.found_ranks)) or "nobody"
    found = result.found_class or "nothing"
    others = f" Also: {', '.join(result.others)}." if result.others else ""
    look = "" if result.to_look is None else f" (looked at after {result.to_look:.1f} s)"
    return (
        f"{result.kind} on rank {result.rank}: {found} ({class_}), rank {ranks} ({rank}), {took}{look}{again}; "
        f"{result.took:.0f} s in all. {result.note[:160]}{others}"
    )


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "-"


def _share(results: Sequence[Result], is_right: Callable[[Result], bool]) -> str:
    return f"{100 * sum(map(is_right, results)) / max(1, len(results)):.1f} %"
