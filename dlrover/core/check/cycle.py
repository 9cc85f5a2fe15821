"""
One node check from its first phase to its verdict.

Nodes are tested in small groups, and the groups are mixed anew until it is clear who is to blame: pairs of neighbours
first, then the fastest with the slowest, and, where that leaves doubts, each doubtful node with one that has proved
good. With scheduling groups (racks, switch domains) the links inside them are tested first, then those between them. A
healthy job needs one phase, a single fault two.

Each phase has the number of a round; a report names it, so a late one cannot be taken for a report of the next phase.
A node that dies counts as failed and explains the failure of its partners. A node that comes late is tested in the next
phase. No node is left out of a phase, and none is in two groups.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dlrover.core.check.evidence import (
    NUM_SMALL,
    CheckRules,
    ExitClass,
    Findings,
    PhaseName,
    RunReport,
    Trial,
    examine,
    has_met,
    median,
    say_ranks,
)
from dlrover.core.check.pairing import (
    Groups,
    SchedulingGroup,
    across,
    across_rotated,
    alone,
    by_scheduling_group,
    confirmation,
    extremes,
    inside,
    neighbours,
    together,
)
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.job import NodeRank, Round

_NUM_TIMES_SHOWN = 32
"""Of a larger job only the slowest are listed: no person reads a thousand figures."""
_NUM_SLOWEST_SHOWN = 8
_LONGEST_MS = 86_400_000.0


class CheckMode(enum.StrEnum):
    """How nodes are grouped."""

    PAIRS = "pairs"
    SCHEDULING_GROUPS = "scheduling-groups"
    """Inside racks first, then between them."""
    ALL = "all"
    """One group of all nodes and one phase: the performance test."""


class CheckStatus(enum.StrEnum):
    HEALTHY = "healthy"
    FAULTY = "faulty"
    STRAGGLER = "straggler"
    UNPROVEN = "unproven"
    """It never passed, and nothing shows that it is the cause."""


class Next(Struct, frozen=True, kw_only=True):
    """Not clear yet: another phase is needed."""

    name: PhaseName
    groups: Groups
    faulty: tuple[NodeRank, ...]
    """Bad for certain already."""
    sentence: str
    node_status: str
    elapsed: str


class CheckVerdict(Struct, frozen=True, kw_only=True):
    """What the check found."""

    faulty: tuple[NodeRank, ...]
    stragglers: tuple[NodeRank, ...]
    unproven: tuple[NodeRank, ...]
    suspect_links: tuple[tuple[NodeRank, NodeRank], ...]
    """Pairs of nodes that failed together although neither is bad."""
    times: dict[NodeRank, float]
    """Best time in milliseconds of each node that passed."""
    statuses: dict[NodeRank, CheckStatus]
    reasons: dict[NodeRank, str]
    """Why each of the faulty is."""
    num_phases: int
    sentence: str
    node_status: str
    """The line that operators search for by `node status`."""
    elapsed: str
    """The line that operators search for by `elapsed`."""

    @property
    def has_passed(self) -> bool:
        """Whether training may start. Slow nodes are for the caller to judge."""
        return not self.faulty and not self.unproven


class CheckCycle(Struct, kw_only=True):
    """The state of one check. Plain data, part of the job's state."""

    mode: CheckMode
    rules: CheckRules
    round: Round
    """Of the phase that runs now."""
    phase: int = 0
    members: dict[NodeRank, SchedulingGroup]
    """Nodes that are tested, with their scheduling group."""
    late: dict[NodeRank, SchedulingGroup] = {}
    """Came while a phase ran; tested from the next one on."""
    gone: dict[NodeRank, str] = {}
    """Took part and are not there any more: why they are to blame, or empty for those who left in order."""
    places: dict[NodeRank, int] = {}
    """Rank to index of its group, in the phase that runs now."""
    waiting: dict[NodeRank, None] = {}
    """Who takes part in it and has not reported yet."""
    trials: list[Trial] = []
    """Phases so far. Those inside scheduling groups are dropped when the links between them are tested."""
    final: CheckVerdict | None = None
    """Kept until the next cycle begins, for nodes that ask late."""

    @classmethod
    def begin(
        cls,
        members: Mapping[NodeRank, SchedulingGroup],
        *,
        first_round: Round,
        mode: CheckMode | None = None,
        rules: CheckRules = CheckRules(),  # noqa: B008  # frozen
    ) -> CheckCycle:
        """`mode` None: by scheduling groups if there are at least two of them, else in pairs."""
        if not members:
            raise malformed("A node check needs at least one node.")
        ordered = {rank: members[rank] for rank in sorted(members)}
        num_groups = len(by_scheduling_group(ordered, ordered))
        if mode is not CheckMode.ALL:
            is_grouped = num_groups > 1 and len(ordered) > NUM_SMALL and mode is not CheckMode.PAIRS
            mode = CheckMode.SCHEDULING_GROUPS if is_grouped else CheckMode.PAIRS
        cycle = cls(mode=mode, rules=rules, round=first_round, members=ordered)
        cycle._start(*cycle._first_phase())
        return cycle

    @property
    def groups(self) -> Groups:
        """Of the phase that runs now."""
        return self.trials[-1].groups

    def group_of(self, rank: NodeRank) -> int | None:
        """Index of its group in the phase that runs now; None for a stranger or a latecomer."""
        return self.places.get(rank)

    def report(self, rank: NodeRank, of_round: Round, elapsed_ms: float, exit_class: ExitClass = ExitClass.OK) -> None:
        """A node's result of one phase. Repeating it is harmless; the first counts."""
        if of_round != self.round or self.final is not None:
            state = "has its verdict" if self.final is not None else "runs"
            raise Rejected(
                f"Node rank {rank} reports a check of round {of_round}; round {self.round} {state}.",
                code=ErrorCode.STALE_ROUND,
            )
        if rank not in self.places or rank in self.gone:
            raise Rejected(
                f"Node rank {rank} takes no part in the check of round {of_round}.", code=ErrorCode.NOT_A_MEMBER
            )
        if not (math.isfinite(elapsed_ms) and 0 <= elapsed_ms <= _LONGEST_MS):
            raise malformed(f"elapsed {elapsed_ms} ms: give milliseconds from 0 to a day.")

        if rank in self.waiting:
            del self.waiting[rank]
            time_ms = round(elapsed_ms, 3) if exit_class is ExitClass.OK else 0.0
            self.trials[-1].reports[rank] = RunReport(exit_class, time_ms)

    def join(self, rank: NodeRank, scheduling_group: SchedulingGroup = None) -> None:
        """A node that came while the check runs, or a replacement of one that went: tested from the next phase on."""
        if rank in self.gone:
            self._forget(rank)
        if rank not in self.members:
            self.late[rank] = scheduling_group

    def lose(self, rank: NodeRank, *, why: str = "it died during the check", is_blamed: bool = True) -> None:
        """The node is not there any more. Without blame: it left in order, was preempted or scaled down."""
        self.late.pop(rank, None)
        if rank in self.members and rank not in self.gone and self.final is None:
            self.waiting.pop(rank, None)
            self.gone[rank] = why if is_blamed else ""

    def is_phase_complete(self) -> bool:
        return not self.waiting

    def verdict(self) -> Next | CheckVerdict:
        """What the complete phase leads to. Changes nothing."""
        assert self.is_phase_complete(), f"{say_ranks(self.waiting)} not heard of yet"
        if self.final is not None:
            return self.final
        findings = self._examine()
        plan = self._plan(findings)
        if plan is None:
            return self._conclude(findings)
        name, groups = plan
        return Next(
            name=name,
            groups=groups,
            faulty=self._faulty(findings),
            sentence=self._why_next(findings, name),
            node_status=self._node_status(self._statuses(findings)),
            elapsed=self._elapsed(findings),
        )

    def go_on(self) -> Next | CheckVerdict:
        """Take the step that `verdict` names: enter the next phase, or end."""
        step = self.verdict()
        if isinstance(step, CheckVerdict):
            self.final = step
            return step
        if step.name is PhaseName.INTER_INITIAL:
            self.trials = []  # what passed inside a scheduling group says nothing about the links between them
        self.members = dict(sorted({**self.members, **self.late}.items()))
        self.late = {}
        self.phase += 1
        self.round = Round(self.round + 1)
        self._start(step.name, step.groups)
        return step

    def _start(self, name: PhaseName, groups: Groups) -> None:
        self.trials.append(Trial(name, groups))
        self.places = {rank: index for index, group in enumerate(groups) for rank in group}
        self.waiting = dict.fromkeys(self.places)

    def _forget(self, rank: NodeRank) -> None:
        """
        A new node takes the rank of one that went. The old one's runs stay as an explanation for its partners, under a
        rank that no node has.
        """
        former = NodeRank(-1 - rank)
        for trial in self.trials:
            trial.groups = tuple(tuple(former if r == rank else r for r in group) for group in trial.groups)
            if rank in trial.reports:
                trial.reports[former] = trial.reports.pop(rank)
        self.places.pop(rank, None)
        del self.gone[rank], self.members[rank]
        self.gone[former] = ""

    def _present(self) -> dict[NodeRank, SchedulingGroup]:
        """Who can take part in the next phase, in ascending order."""
        # The performance test has no next phase: who comes late has no part in it.
        everybody = self.members if self.mode is CheckMode.ALL else {**self.members, **self.late}
        return {rank: everybody[rank] for rank in sorted(everybody) if rank not in self.gone}

    def _examine(self) -> Findings:
        return examine(self.trials, self._present(), self.gone, self.rules)

    def _first_phase(self) -> tuple[PhaseName, Groups]:
        match self.mode:
            case CheckMode.ALL:
                return PhaseName.PERFORMANCE, together(self.members)
            case CheckMode.SCHEDULING_GROUPS:
                parts = by_scheduling_group(self.members, self.members)
                return PhaseName.INTRA_INITIAL, inside(parts, neighbours)
            case CheckMode.PAIRS:
                return PhaseName.INITIAL, neighbours(self.members)

    def _plan(self, findings: Findings) -> tuple[PhaseName, Groups] | None:
        """The next phase, or None if all is clear or nothing more can be learned."""
        present = self._present()
        if self.mode is CheckMode.ALL or self.phase + 1 >= self.rules.max_phases or not present:
            return None
        is_intra = self._is_intra()
        is_slow_open = not is_intra and findings.suspected_slow and self.phase + 1 < self.rules.max_straggler_phases
        if not findings.open and not is_slow_open:
            is_clean = not findings.convicted and not self._blamed()
            if is_intra and is_clean and len(by_scheduling_group(present, present)) > 1:
                return PhaseName.INTER_INITIAL, across(by_scheduling_group(present, present))
            return None
        if len(present) <= NUM_SMALL:
            return self._plan_small(findings)
        match self.trials[-1].name:
            case PhaseName.INITIAL | PhaseName.INTRA_INITIAL | PhaseName.INTER_INITIAL:
                return self._plan_diagnostic(findings)
        if not findings.proven and not self._has_run(PhaseName.ALONE):
            return PhaseName.ALONE, alone(present)
        return self._plan_confirmation(findings)

    def _plan_diagnostic(self, findings: Findings) -> tuple[PhaseName, Groups]:
        """From the fastest to the slowest; a node without a time may be anything, a failed one comes last."""
        present = self._present()
        failed = {rank for trial in self.trials for rank, report in trial.reports.items() if not report.ok}

        def speed(rank: NodeRank) -> tuple[int, float, NodeRank]:
            if rank in findings.times:
                return 0, findings.times[rank], rank
            return (2 if rank in failed else 1), 0.0, rank

        ordered = sorted((rank for rank in present if rank not in findings.convicted), key=speed)
        kept_apart = alone(findings.convicted)
        match self.trials[-1].name:
            case PhaseName.INTRA_INITIAL:
                parts = by_scheduling_group(ordered, present)
                return PhaseName.INTRA_DIAGNOSTIC, inside(parts, extremes) + kept_apart
            case PhaseName.INTER_INITIAL:
                # The index of a scheduling group must not depend on who was fast.
                parts = [sorted(part, key=speed) for part in by_scheduling_group(sorted(ordered), present)]
                return PhaseName.INTER_DIAGNOSTIC, across_rotated(parts) + kept_apart
            case _:
                return PhaseName.DIAGNOSTIC, extremes(ordered) + kept_apart

    def _plan_confirmation(self, findings: Findings) -> tuple[PhaseName, Groups] | None:
        """Doubtful nodes with good and quick ones; the one that was tested least, first."""
        present = self._present()
        met = has_met(self.trials)
        is_intra = self._is_intra()

        def is_suitable(rank: NodeRank, other: NodeRank) -> bool:
            """Inside scheduling groups a partner from there, between them one from elsewhere."""
            if self.mode is CheckMode.PAIRS:
                return True
            return (present[rank] == present[other]) == is_intra

        num_tests = {rank: len(met.get(rank, ())) for rank in findings.open}
        doubtful = [*sorted(findings.open, key=lambda rank: (num_tests[rank], rank)), *findings.suspected_slow]
        is_doubtful = dict.fromkeys(doubtful)
        is_slow = dict.fromkeys(findings.slow)
        good = [rank for rank in findings.proven if rank not in is_doubtful]
        good.sort(key=lambda rank: (rank in is_slow, findings.times[rank], rank))
        plan = confirmation(
            doubtful,
            good,
            has_met=lambda rank, other: other in met.get(rank, {}),
            prefers=is_suitable,
            may_pair_up=lambda rank: rank not in findings.proven,
        )
        if not plan.num_served:
            return None
        return PhaseName.CONFIRM, plan.groups + alone([*findings.excused, *findings.convicted])

    def _plan_small(self, findings: Findings) -> tuple[PhaseName, Groups] | None:
        """
        Three nodes or fewer: there is no independent pair to compare with, so after a failure each runs alone.

        Those who pass alone may still have a bad link: with three nodes each pair is tried, with two nothing remains.
        """
        present = self._present()
        in_a_group = {rank: None for trial in self.trials for group in trial.groups if len(group) > 1 for rank in group}
        if len(present) > 1 and any(rank not in in_a_group and rank not in findings.convicted for rank in present):
            groups = neighbours(rank for rank in present if rank not in findings.convicted)
            return PhaseName.DIAGNOSTIC, groups + alone(findings.convicted)
        if not self._has_run(PhaseName.ALONE):
            return PhaseName.ALONE, alone(present)
        met = has_met(self.trials)
        for rank in findings.open:
            for other in present:
                if other != rank and other not in findings.convicted and other not in met.get(rank, {}):
                    rest = [r for r in present if r not in (rank, other)]
                    return PhaseName.CONFIRM, (*neighbours(sorted((rank, other))), *alone(rest))
        return None

    def _is_intra(self) -> bool:
        return self.trials[0].name is PhaseName.INTRA_INITIAL

    def _has_run(self, name: PhaseName) -> bool:
        return any(trial.name is name for trial in self.trials)

    def _blamed(self) -> list[NodeRank]:
        return sorted(rank for rank, why in self.gone.items() if why)

    def _faulty(self, findings: Findings) -> tuple[NodeRank, ...]:
        return tuple(sorted([*findings.convicted, *self._blamed()]))

    def _statuses(self, findings: Findings) -> dict[NodeRank, CheckStatus]:
        statuses = dict.fromkeys(self._present(), CheckStatus.HEALTHY)
        statuses.update(dict.fromkeys(findings.doubtful, CheckStatus.UNPROVEN))
        statuses.update(dict.fromkeys(findings.stragglers, CheckStatus.STRAGGLER))
        statuses.update(dict.fromkeys(self._faulty(findings), CheckStatus.FAULTY))
        return dict(sorted(statuses.items()))

    def _conclude(self, findings: Findings) -> CheckVerdict:
        statuses = self._statuses(findings)
        reasons = {**findings.convicted, **{rank: self.gone[rank] for rank in self._blamed()}}
        return CheckVerdict(
            faulty=self._faulty(findings),
            stragglers=tuple(findings.stragglers),
            unproven=tuple(rank for rank, status in statuses.items() if status is CheckStatus.UNPROVEN),
            suspect_links=tuple(findings.suspect_links),
            times=findings.times,
            statuses=statuses,
            reasons=dict(sorted(reasons.items())),
            num_phases=self.phase + 1,
            sentence=_sentence(statuses, reasons, findings, self.phase + 1),
            node_status=self._node_status(statuses),
            elapsed=self._elapsed(findings),
        )

    def _why_next(self, findings: Findings, name: PhaseName) -> str:
        causes = []
        if findings.convicted or self._blamed():
            causes.append(f"{say_ranks(self._faulty(findings))} at fault")
        doubtful = [rank for rank in findings.open if rank not in self.late]
        if doubtful:
            causes.append(f"{say_ranks(doubtful)} in doubt")
        if self.late:
            causes.append(f"{say_ranks(self.late)} came late")
        if findings.suspected_slow and not self._is_intra():
            causes.append(f"{say_ranks(findings.suspected_slow)} slow so far")
        why = "; ".join(causes) or "all passed inside their scheduling groups"
        return f"Node check of round {self.round}: {why}; next phase: {name}."

    def _node_status(self, statuses: Mapping[NodeRank, CheckStatus]) -> str:
        parts = []
        for status in CheckStatus:
            ranks = [rank for rank, own in statuses.items() if own is status]
            if ranks:
                parts.append(f"{say_ranks(ranks)} {status}")
        return f"node status after phase {self.phase} (round {self.round}): {'; '.join(parts)}."

    def _elapsed(self, findings: Findings) -> str:
        times = findings.times
        if not times:
            return f"elapsed times after phase {self.phase} (round {self.round}): no node passed."
        shown = sorted(times) if len(times) <= _NUM_TIMES_SHOWN else _slowest(times)
        listed = ", ".join(f"{rank}: {times[rank]:.0f} ms" for rank in shown)
        which = "" if len(shown) == len(times) else "slowest "
        return (
            f"elapsed times after phase {self.phase} (round {self.round}): median {median(times.values()):.0f} ms; "
            f"{which}{listed}."
        )


def _slowest(times: Mapping[NodeRank, float]) -> list[NodeRank]:
    return sorted(times, key=lambda rank: (-times[rank], rank))[:_NUM_SLOWEST_SHOWN]


def _sentence(
    statuses: Mapping[NodeRank, CheckStatus], reasons: Mapping[NodeRank, str], findings: Findings, num_phases: int
) -> str:
    """The verdict in one sentence: who, why, and what to do."""
    links = ", ".join(f"{first} and {second}" for first, second in findings.suspect_links[:_NUM_SLOWEST_SHOWN])
    unproven = [rank for rank, status in statuses.items() if status is CheckStatus.UNPROVEN]
    parts = []
    by_reason: dict[str, list[NodeRank]] = {}
    for rank, reason in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(rank)
    for reason, ranks in by_reason.items():
        parts.append(f"{say_ranks(ranks)} faulty: {reason}")
    if unproven:
        parts.append(f"{say_ranks(unproven)} never passed with others, and no node could be shown to be the cause")
    if links:
        parts.append(f"the link between node ranks {links} is suspect")
    if findings.stragglers:
        parts.append(
            f"{say_ranks(findings.stragglers)} slow: {_in_words([findings.times[r] for r in findings.stragglers])} "
            f"against a median of {median(findings.times.values()):.0f} ms"
        )
    if not parts:
        parts.append(f"all {len(statuses)} nodes passed" if len(statuses) > 1 else "the node passed")
    return f"Node check, {num_phases} phase{'' if num_phases == 1 else 's'}: {'; '.join(parts)}."


def _in_words(times: Sequence[float]) -> str:
    low, high = min(times), max(times)
    return f"{low:.0f} ms" if low == high else f"{low:.0f} to {high:.0f} ms"
