"""
What the runs of a node check prove about each node.

A group's collective fails for every node in it as soon as one member is bad, so a failed run accuses all and convicts
none. What counts:

* A run that passed, in a group of at least two, proves the node good. A run alone proves nothing about its links.
* A failed computation is the node's own fault, and so is a failure while it ran alone (after a second chance).
* Else a node is at fault only if it never passed and failed in a pair with a partner who was known to be good before, or
  in pairs with two who proved good later. One such run may be the fault of a link. A larger group convicts no node: there
  the link may be one between two others.
* Two good nodes that failed together have a suspect link between them.

Slowness is judged the same way: a slow node slows its whole group, so a node is slow only if it was so in every run and
at least once with quick partners only. All times are milliseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from dlrover.core.check.pairing import Group, Groups
from dlrover.protocol.messages.check import ExitClass as ExitClass
from dlrover.protocol.messages.job import NodeRank

NUM_SMALL = 3
"""With so many nodes or fewer there is no independent pair to compare with: nodes are tested alone, and none is called slow."""


class CheckRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a node is slow, and how long doubts are pursued."""

    straggler_ratio: float = 2.0
    """Slow: more than so many times the median."""
    straggler_floor_ms: float = 1000.0
    """And at least so much above it: with tiny times noise alone makes a ratio of two."""
    straggler_share: float = 0.2
    """And at least this part of the median above it, which matters only for ratios near one."""
    max_phases: int = 12
    """Two suffice for one fault, three for most layouts. More are needed only if bad nodes outnumber good ones."""
    max_straggler_phases: int = 4
    """A slow node still trains, so less effort is made to name it."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.straggler_ratio < 1e6:
            raise ValueError(f"straggler_ratio {self.straggler_ratio}: give a number of at least 1, for example 2")
        if not (0 <= self.straggler_floor_ms < 1e12 and 0 <= self.straggler_share < 1e6):
            raise ValueError("straggler_floor_ms and straggler_share: give numbers of at least 0")
        if self.max_phases < 2 or self.max_straggler_phases < 1:
            raise ValueError("max_phases must be at least 2 and max_straggler_phases at least 1")

    def limit_ms(self, reference_ms: float) -> float:
        """What is slower than this is slow."""
        floor_ms = max(self.straggler_floor_ms, self.straggler_share * reference_ms)
        return max(self.straggler_ratio * reference_ms, reference_ms + floor_ms)


class RunReport(Struct, frozen=True):
    """What one node said about its run in one phase."""

    exit_class: ExitClass
    elapsed_ms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_class is ExitClass.OK


class PhaseName(enum.StrEnum):
    INITIAL = "initial"
    DIAGNOSTIC = "diagnostic"
    ALONE = "alone"
    """Each node for itself."""
    CONFIRM = "confirm"
    """Doubtful nodes with partners that are known to be good."""
    INTRA_INITIAL = "intra_initial"
    INTRA_DIAGNOSTIC = "intra_diagnostic"
    INTER_INITIAL = "inter_initial"
    INTER_DIAGNOSTIC = "inter_diagnostic"
    PERFORMANCE = "performance"
    """One group of all nodes, to measure the network."""


class Trial(Struct):
    """One phase: who ran with whom, and what they reported."""

    name: PhaseName
    groups: Groups
    reports: dict[NodeRank, RunReport] = {}


class Findings(Struct, frozen=True, kw_only=True):
    """What is known so far, about the nodes that are still there."""

    proven: dict[NodeRank, int]
    """Good nodes, with the index of the trial that proved it."""
    excused: dict[NodeRank, int]
    """The only node of its scheduling group passed alone: all that can be asked inside the group."""
    convicted: dict[NodeRank, str]
    """Bad nodes, with the reason."""
    open: list[NodeRank]
    """Neither: they need another run."""
    doubtful: list[NodeRank]
    """Those of them whose failures are not all explained by a bad partner, or who did not even pass alone."""
    times: dict[NodeRank, float]
    """Best time of each good node. Runs alone do without the network and count only where there is no other."""
    suspected_slow: list[NodeRank]
    """Slow so far, in doubt."""
    slow: list[NodeRank]
    """Slow even with quick partners only."""
    stragglers: list[NodeRank]
    """Those of them who are slow against the median of all."""
    suspect_links: list[tuple[NodeRank, NodeRank]]


def examine(
    trials: Sequence[Trial], live: Collection[NodeRank], gone: Collection[NodeRank], rules: CheckRules
) -> Findings:
    """`gone` took part and then died or left, which explains the failures of their groups."""
    runs = _runs(trials, live)
    proven = _proven(runs)
    convicted = _convicted(runs, trials, proven)
    decided = {**proven, **dict.fromkeys(convicted, 0)}
    excused = {
        rank: run.trial
        for rank, own in runs.items()
        for run in own
        if rank not in decided and run.is_alone and run.report.ok and run.name in _INTRA
    }
    if convicted or gone:
        excused = {}  # the links between groups will not be tested in this cycle, so these need a partner now
    undecided = [rank for rank in runs if rank not in decided and rank not in excused]
    bad = {**dict.fromkeys(convicted), **dict.fromkeys(gone)}
    among_bad = _Census(trials, bad)
    times = _best_times({rank: runs[rank] for rank in runs if rank in proven or rank in excused})
    slow, suspected_slow = _slow(runs, trials, {rank: times[rank] for rank in proven}, rules)
    return Findings(
        proven=proven,
        excused=excused,
        convicted=convicted,
        open=undecided,
        doubtful=[rank for rank in undecided if not _is_explained(runs[rank], among_bad)],
        times=times,
        suspected_slow=suspected_slow,
        slow=slow,
        stragglers=[rank for rank in stragglers(times, rules) if rank in slow],
        suspect_links=_suspect_links(trials, bad),
    )


def stragglers(times: Mapping[NodeRank, float], rules: CheckRules) -> list[NodeRank]:
    """The plain rule: far above the median of the times of nodes that passed. None among three nodes or fewer."""
    if len(times) <= NUM_SMALL:
        return []
    limit_ms = rules.limit_ms(median(times.values()))
    return sorted(rank for rank, time_ms in times.items() if time_ms > limit_ms)


def median(values: Collection[float]) -> float:
    """The mean of the two middle ones of an even number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def has_met(trials: Sequence[Trial]) -> dict[NodeRank, dict[NodeRank, None]]:
    """Who has been in a pair with whom. In a larger group others may have been the cause of whatever happened."""
    met: dict[NodeRank, dict[NodeRank, None]] = {}
    for trial in trials:
        for group in trial.groups:
            if len(group) == 2:
                met.setdefault(group[0], {})[group[1]] = None
                met.setdefault(group[1], {})[group[0]] = None
    return met


_INTRA = (PhaseName.INTRA_INITIAL, PhaseName.INTRA_DIAGNOSTIC)


class _Run(NamedTuple):
    """One node's part in one trial. A group may have thousands of members: nothing here may cost its size per member."""

    trial: int
    place: int
    """Of the group in the trial."""
    name: PhaseName
    group: Group
    report: RunReport

    @property
    def is_alone(self) -> bool:
        return len(self.group) == 1


class _Census:
    """How many members of each group belong to some set of nodes."""

    def __init__(self, trials: Sequence[Trial], nodes: Container[NodeRank]) -> None:
        self._counts = [[sum(rank in nodes for rank in group) for group in trial.groups] for trial in trials]

    def has_any(self, run: _Run) -> bool:
        return self._counts[run.trial][run.place] > 0

    def has_all_others(self, run: _Run) -> bool:
        """Whether all partners of a node that is not one of them itself are."""
        return not run.is_alone and self._counts[run.trial][run.place] == len(run.group) - 1


def _runs(trials: Sequence[Trial], live: Collection[NodeRank]) -> dict[NodeRank, list[_Run]]:
    runs: dict[NodeRank, list[_Run]] = {rank: [] for rank in sorted(live)}
    for index, trial in enumerate(trials):
        for place, group in enumerate(trial.groups):
            for rank in group:
                if rank in runs and rank in trial.reports:
                    runs[rank].append(_Run(index, place, trial.name, group, trial.reports[rank]))
    return runs


def _proven(runs: Mapping[NodeRank, Sequence[_Run]]) -> dict[NodeRank, int]:
    is_only_one = len(runs) == 1
    proven = {}
    for rank, own in runs.items():
        for run in own:
            if run.report.ok and (is_only_one or not run.is_alone):
                proven[rank] = run.trial
                break
    return proven


def _convicted(
    runs: Mapping[NodeRank, Sequence[_Run]], trials: Sequence[Trial], proven: Mapping[NodeRank, int]
) -> dict[NodeRank, str]:
    good = _Census(trials, proven)
    convicted = {}
    for rank, own in runs.items():
        if rank not in proven:
            with_good = [run for run in own if not run.report.ok and good.has_all_others(run)]
            reason = _guilt(rank, own, with_good, proven, is_small=len(runs) <= NUM_SMALL)
            if reason:
                convicted[rank] = reason
    return convicted


def _guilt(
    rank: NodeRank, own: Sequence[_Run], with_good: Sequence[_Run], proven: Mapping[NodeRank, int], *, is_small: bool
) -> str:
    """Why a node that never passed is at fault; empty if it may still be good."""
    failed = [run for run in own if not run.report.ok]
    if any(run.report.exit_class is ExitClass.COMPUTE for run in failed):
        return "its computation failed"
    if any(run.is_alone and run.trial > 0 for run in failed):
        return "it failed alone, without any partner"
    # In a larger group it may be a link between two others, and again in the next group that they share.
    partners = {other: run for run in with_good if len(run.group) == 2 for other in run.group if other != rank}
    if not partners:
        return ""
    has_tried_all = len(partners) >= len(proven)
    judged_by_good = any(proven[other] < run.trial for other, run in partners.items())
    if not has_tried_all and (is_small or not (judged_by_good or len(partners) > 1)):
        return ""  # may be the link between the two
    return f"it failed with {say_ranks(partners)}, which passed with others"


def _is_explained(own: Sequence[_Run], bad: _Census) -> bool:
    passed_alone = any(run.report.ok for run in own)
    return passed_alone and all(run.report.ok or bad.has_any(run) for run in own)


def _best_times(runs: Mapping[NodeRank, Sequence[_Run]]) -> dict[NodeRank, float]:
    times = {}
    for rank, own in runs.items():
        passed = [run for run in own if run.report.ok]
        with_others = [run for run in passed if not run.is_alone]
        if passed:
            times[rank] = min(run.report.elapsed_ms for run in with_others or passed)
    return times


def _slow(
    runs: Mapping[NodeRank, Sequence[_Run]], trials: Sequence[Trial], times: Mapping[NodeRank, float], rules: CheckRules
) -> tuple[list[NodeRank], list[NodeRank]]:
    """
    Nodes that are slow by themselves, and nodes that may be.

    Compared with the lower quartile: while slow partners hold back good nodes the median itself may be slow. Whom the
    final answer names is decided by the median.
    """
    if len(times) <= NUM_SMALL:
        return [], []
    limit_ms = rules.limit_ms(sorted(times.values())[(len(times) - 1) // 4])
    quick = _Census(trials, {rank: None for rank, time_ms in times.items() if time_ms <= limit_ms})
    slow: list[NodeRank] = []
    suspected: list[NodeRank] = []
    for rank, time_ms in times.items():
        if time_ms > limit_ms:
            is_slow = any(run.report.ok and quick.has_all_others(run) for run in runs[rank])
            (slow if is_slow else suspected).append(rank)
    return slow, suspected


def _suspect_links(trials: Sequence[Trial], bad: Mapping[NodeRank, None]) -> list[tuple[NodeRank, NodeRank]]:
    """Pairs that failed although neither is bad. A pair that passed at another time is not suspect."""
    links: dict[tuple[NodeRank, NodeRank], bool] = {}
    for trial in trials:
        for group in trial.groups:
            if len(group) == 2 and not any(rank in bad for rank in group) and all(r in trial.reports for r in group):
                link = (min(group), max(group))
                passed = all(trial.reports[rank].ok for rank in group)
                links[link] = links.get(link, False) or passed
    return sorted(link for link, passed in links.items() if not passed)


def say_ranks(ranks: Collection[NodeRank]) -> str:
    """As people write them: `node rank 4`, `node ranks 0-3, 5`."""
    spans: list[list[NodeRank]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    words = ", ".join("-".join(map(str, span)) for span in spans)
    return f"node rank{'' if len(ranks) == 1 else 's'} {words}"
