"""
What the samples of the checkpoint benchmark say: tables, ratios to what the machine can do, budgets. Pure, so that it can be tested.

A round measures everything once, each system in processes of its own. Within a round the median of the samples counts; a ratio is taken within a
round, against the limits measured in that round, and the medians and spreads that are shown are those of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from control_plane_report import Budget, titled
from figures import Summary, quietness, seconds, summarise, times

LIMITS = "limits"
OURS = "ours"
OURS_LAZY = "ours lazy"
OUR_SYSTEMS = (OURS, OURS_LAZY, "ours plain", "ours plain lazy")
STORAGE_INTERVAL = 60.0
"""Seconds between two saves to storage over which what they cost is averaged."""
COVERED = 1.5
"""A lazy save is hidden where forward and backward last so many copies."""


@dataclass(frozen=True)
class Case:
    """One system, measured once."""

    round: int
    system: str
    gigabytes: float
    """As asked for."""
    num_workers: int
    state_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)

    def figure(self, name: str) -> float | None:
        """The median within the round; None: not measured, or this system has no such figure."""
        found = self.samples.get(name)
        return statistics.median(found) if found else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def case_from_json(read: dict[str, Any]) -> Case:
    return Case(**read)


class Cases:
    """All that was measured."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self._limits = {(case.round, case.gigabytes): case for case in cases if case.system == LIMITS}

    def sizes(self) -> list[float]:
        return sorted({case.gigabytes for case in self._cases})

    def systems(self, gigabytes: float, num_workers: int = 1) -> list[str]:
        """In the order in which they were first measured, ours last."""
        found = dict.fromkeys(
            case.system
            for case in self._cases
            if (case.gigabytes, case.num_workers) == (gigabytes, num_workers) and case.system != LIMITS
        )
        return sorted(found, key=lambda system: OUR_SYSTEMS.index(system) + 1 if system in OUR_SYSTEMS else 0)

    def of(self, system: str, gigabytes: float, num_workers: int = 1) -> list[Case]:
        return [
            case
            for case in self._cases
            if (case.system, case.gigabytes, case.num_workers) == (system, gigabytes, num_workers)
        ]

    def figure(self, name: str, system: str, gigabytes: float, num_workers: int = 1) -> Summary | None:
        return summarise(
            [value for case in self.of(system, gigabytes, num_workers) if (value := derived(case, name)) is not None]
        )

    def ratio(self, name: str, base: str, system: str, gigabytes: float, num_workers: int = 1) -> Summary | None:
        """To a limit of the same round ("memcpy", "dd"), or to another figure of the same process."""
        found = []
        for case in self.of(system, gigabytes, num_workers):
            value, under = derived(case, name), self._base(case, base)
            if value is not None and under:
                found.append(value / under)
        return summarise(found)

    def _base(self, case: Case, name: str) -> float | None:
        if name not in ("memcpy", "dd", "state"):
            return derived(case, name)
        if name == "state":
            return float(case.state_bytes)
        limits = self._limits.get((case.round, case.gigabytes))
        return None if limits is None else derived(limits, name)


def derived(case: Case, name: str) -> float | None:
    """A figure of the process itself, or one that follows from several of them."""
    if name == "memcpy":  # the best that any number of threads can do
        found = [value for key in case.samples if key.startswith("memcpy_") and (value := case.figure(key)) is not None]
        return min(found) if found else None
    if name == "longer":  # what a step with a save lasts longer than one without
        step, plain = case.figure("warm_step"), case.figure("plain_step")
        return None if step is None or plain is None else step - plain
    if name == "busy":  # how much slower steps are while a checkpoint is written
        step, plain = case.figure("busy_step"), case.figure("plain_step")
        return None if step is None or not plain else step / plain - 1
    return case.figure(name)


def report(
    cases: Sequence[Case],
    errors: Sequence[str],
    strangers: Sequence[float],
    *,
    machine: str,
    interval: float = STORAGE_INTERVAL,
) -> str:
    all_ = Cases(cases)
    parts = [
        machine,
        quietness(strangers),
        limits_part(all_),
        blocking_part(all_, 1),
        blocking_part(all_, 2),
        storage_part(all_, interval),
        restore_part(all_),
        budget_part(all_, interval),
        "\n".join(f"NOT MEASURED: {error}" for error in dict.fromkeys(errors)),
    ]
    return "\n\n".join(part for part in parts if part)


def limits_part(all_: Cases) -> str:
    rows = []
    for size in all_.sizes():
        cases = all_.of(LIMITS, size)
        compute = [all_.ratio("plain_compute", "memcpy", system, size) for system in all_.systems(size)]
        lasts = summarise([each.median for each in compute if each is not None])
        rows.append(
            [
                f"{size:g}",
                f"{cases[0].state_bytes:,}" if cases else "-",
                shown(all_.figure("memcpy_1", LIMITS, size)),
                shown(all_.figure("memcpy_2", LIMITS, size)),
                spread(all_.figure("memcpy", LIMITS, size)),
                shown(all_.figure("dd", LIMITS, size)),
                spread(all_.figure("dd", LIMITS, size)),
                times(lasts.median if lasts else None),
            ]
        )
    head = ["GB", "bytes", "memcpy, 1 thread, s", "2 threads, s", "best, min-max", "dd, s", "min-max"]
    return titled("What the machine can do", [*head, "forward+backward / memcpy"], rows)


def blocking_part(all_: Cases, num_workers: int) -> str:
    rows = []
    for size in all_.sizes():
        for system in all_.systems(size, num_workers):
            where = (system, size, num_workers)
            blocked = all_.figure("warm_block", *where)
            to_copy = all_.ratio("warm_block", "memcpy", *where)
            rows.append(
                [
                    f"{size:g}",
                    system,
                    shown(all_.figure("first_block", *where)),
                    shown(all_.figure("warm_call", *where)),
                    shown(all_.figure("warm_wait", *where)),
                    shown(blocked),
                    spread(blocked),
                    times(to_copy.median if to_copy else None),
                    spread(to_copy, ".2f"),
                    shown(all_.figure("longer", *where)),
                    times(middle(all_.ratio("longer", "memcpy", *where))),
                    times(middle(all_.ratio("first_block", "warm_block", *where))),
                ]
            )
    workers = "one worker" if num_workers == 1 else f"{num_workers} workers"
    head = ["GB", "system", "first, s", "call, s", "wait, s", "call + wait, s", "min-max", "/ memcpy", "min-max"]
    return titled(
        f"What a save takes from the training, {workers}",
        [*head, "step longer by, s", "/ memcpy", "first / warm"],
        rows,
    )


def storage_part(all_: Cases, interval: float) -> str:
    rows = []
    for size in all_.sizes():
        for system in all_.systems(size):
            durable = all_.figure("durable", system, size)
            if durable is None:
                continue
            extra = all_.figure("persist_extra", system, size)
            rows.append(
                [
                    f"{size:g}",
                    system,
                    seconds(durable.median),
                    spread(durable),
                    times(middle(all_.ratio("durable", "dd", system, size))),
                    times(middle(all_.ratio("persist", "dd", system, size))),
                    spread(all_.ratio("persist", "dd", system, size), ".2f"),
                    times(middle(all_.ratio("file_bytes", "state", system, size))),
                    times(middle(all_.ratio("extra_memory", "state", system, size))),
                    percent(middle(all_.figure("busy", system, size))),
                    shown(extra),
                    percent(extra.median / interval if extra else None),
                ]
            )
    head = ["GB", "system", "call to durable, s", "min-max", "/ dd", "after the call / dd", "min-max", "bytes / state"]
    head += ["peak memory / state", "steps slower meanwhile", "training lost per save, s", f"of {interval:g} s"]
    return titled("Until it is on the disk, and what that costs", head, rows)


def restore_part(all_: Cases) -> str:
    rows = []
    for size in all_.sizes():
        for system in all_.systems(size):
            memory = all_.figure("restore_memory", system, size)
            cold = all_.figure("restore_cold", system, size)
            if memory is None and cold is None:
                continue
            to_copy = all_.ratio("restore_memory", "memcpy", system, size)
            rows.append(
                [
                    f"{size:g}",
                    system,
                    shown(memory),
                    times(middle(to_copy)),
                    spread(to_copy, ".2f"),
                    shown(cold),
                    times(middle(all_.ratio("restore_cold", "memcpy", system, size))),
                    shown(all_.figure("restore_warm", system, size)),
                    times(middle(all_.ratio("restore_warm", "memcpy", system, size))),
                ]
            )
    head = ["GB", "system", "from memory, s", "/ memcpy", "min-max", "from disk, s", "/ memcpy"]
    return titled(
        "Restore into live tensors after a restart of the process",
        [*head, "with a warm file cache, s", "/ memcpy"],
        rows,
    )


def budgets(all_: Cases, interval: float = STORAGE_INTERVAL) -> list[tuple[float, Budget]]:
    found = []
    for size in all_.sizes():
        lazy_limit = lazy_budget(middle(all_.ratio("plain_compute", "memcpy", OURS_LAZY, size)))
        extra = all_.figure("persist_extra", OURS, size)
        found += [
            (size, budget)
            for budget in (
                Budget("warm save, call + wait / memcpy", middle(all_.ratio("warm_block", "memcpy", OURS, size)), 1.15),
                Budget("lazy save, call / memcpy", middle(all_.ratio("warm_call", "memcpy", OURS_LAZY, size)), 0.05),
                Budget(
                    "lazy save, call + wait / memcpy",
                    middle(all_.ratio("warm_block", "memcpy", OURS_LAZY, size)),
                    lazy_limit,
                ),
                Budget("lazy save / the fastest peer's", against_peers(all_, size), 1.0),
                Budget("first save / warm save", middle(all_.ratio("first_block", "warm_block", OURS, size)), 2.0),
                Budget("persist, idle trainer / dd", middle(all_.ratio("persist", "dd", OURS, size)), 1.1),
                Budget(
                    f"training lost to a save to storage every {interval:g} s",
                    extra.median / interval if extra else None,
                    0.05,
                ),
                Budget(
                    "restore from memory / memcpy", middle(all_.ratio("restore_memory", "memcpy", OURS, size)), 1.25
                ),
            )
        ]
    return found


def lazy_budget(compute_per_copy: float | None) -> float:
    """Where forward and backward do not cover the copy, what they leave over has to be waited for."""
    if compute_per_copy is None or compute_per_copy >= COVERED:
        return 0.05
    return max(0.05, 1.0 - compute_per_copy)


def against_peers(all_: Cases, gigabytes: float) -> float | None:
    """Our lazy blocking time over the lowest of all peers."""
    ours = all_.figure("warm_block", OURS_LAZY, gigabytes)
    others = [
        summary.median
        for system in all_.systems(gigabytes)
        if system not in OUR_SYSTEMS and (summary := all_.figure("warm_block", system, gigabytes))
    ]
    return ours.median / min(others) if ours and others else None


def budget_part(all_: Cases, interval: float) -> str:
    rows = [
        [
            f"{size:g}",
            budget.text,
            "-" if budget.value is None else f"{budget.value:.3g}",
            f"at most {budget.limit:.3g}",
            budget.verdict,
        ]
        for size, budget in budgets(all_, interval)
    ]
    return titled("Budgets", ["GB", "what", "measured", "budget", "verdict"], rows)


def middle(summary: Summary | None) -> float | None:
    return summary.median if summary else None


def shown(summary: Summary | None) -> str:
    """A call that only notes something down takes microseconds; 0.000 would say that nobody looked."""
    if summary is None:
        return "-"
    return f"{summary.median:.3f}" if abs(summary.median) >= 0.001 or summary.median == 0 else f"{summary.median:.6f}"


def spread(summary: Summary | None, form: str = ".3f") -> str:
    return "-" if summary is None else f"{summary.lowest:{form}}-{summary.highest:{form}}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


__all__ = ["Case", "Cases", "budgets", "case_from_json", "derived", "report"]
