"""
The watch over a job: it hears what nodes tell, decides when to look, and concludes.

Volatile, on the job's clock, and pure: what it wants comes out as effects. It never changes the job. A verdict that says to act becomes a command with
its evidence, which the job may refuse, because it knows better by then.

One episode, one word: a verdict that is found again is counted and not repeated, and only one finding acts on a round. If nothing comes of it (no platform can
replace the node, the journal cannot be written) the round goes on, and so does the watch: others may act at once, the same finding after a pause.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.diagnosis.autopsy import write_page
from dlrover.core.diagnosis.diagnostician import Diagnostician
from dlrover.core.diagnosis.hang import HangFinding, Sight, judge
from dlrover.core.diagnosis.looks import AGAIN_AFTER, Look, interval_after
from dlrover.core.diagnosis.picture import FailedWorkers, Picture, Scene
from dlrover.core.diagnosis.registry import HANG, built_in
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Micros, NodeId, Round
from dlrover.protocol.messages.watch import (
    ActionKind,
    Autopsy,
    Culprit,
    Diagnosis,
    FaultClass,
    FaultFound,
    HangFound,
    HangStrategy,
    LookTaken,
    NodeEvent,
    PastVerdict,
    ProgressReport,
    ResourceReport,
    SampleTaken,
    Verdict,
    WatchObservation,
    WatchOrder,
    WatchTerms,
)

MAX_VERDICTS = 200
"""That are shown."""
MAX_EPISODES = 50_000
"""Findings of a round of which it is known that they were told: several for each node of the largest job."""
EPISODE = 600.0
"""Seconds after which the same verdict is news again."""
SETTLING = 1.0
"""Seconds between two rounds of the diagnosticians: a storm of reports is looked at once."""
MARGIN = 0.25
"""Seconds: ranks enter their last phase within a step of each other, and a look shall not come too early by so little."""
AGAIN_SOON = 3.0
"""Seconds before a finding that the job has not heard is sent again."""
RESTART_COST = 3.0
"""Seconds that a restart is taken to cost before one was measured."""


_PRIORITY = {ActionKind.STOP_JOB: 3, ActionKind.RELAUNCH_NODE: 2, ActionKind.RESTART_WORKERS: 1} | dict.fromkeys(
    (ActionKind.NOTIFY, ActionKind.NONE), 0
)


class AskNode(Struct, frozen=True):
    node: NodeId
    order: WatchOrder


class Act(Struct, frozen=True):
    command: HangFound | FaultFound


class Tell(Struct, frozen=True):
    """People should hear of it, now for the first time or once more after long."""

    past: PastVerdict


class Publish(Struct, frozen=True):
    autopsy: Autopsy


_Subject = tuple[str, FaultClass, tuple[Culprit, ...]]


class _Episode(Struct):
    """One finding of this round, apart from its words: many more of them are remembered than shown."""

    at: Micros
    last_at: Micros
    count: int = 1
    has_acted: bool = False


WatchEffect = AskNode | Act | Tell | Publish


class _Findings:
    """What was found in this round, and the verdicts of all rounds that are shown."""

    def __init__(self) -> None:
        self.shown: dict[tuple[Round, Micros, _Subject], PastVerdict] = {}
        """Oldest first."""
        self._episodes: dict[_Subject, _Episode] = {}
        """Of this round; who was found last stands last."""

    def begin_round(self) -> None:
        self._episodes = {}

    def find(self, subject: _Subject) -> _Episode | None:
        return self._episodes.get(subject)

    def note(self, subject: _Subject, now: Micros) -> _Episode:
        """Found, for the first time or again in this round and not long ago."""
        episode = self._episodes.pop(subject, None)
        if episode is None or episode.last_at < now - micros(EPISODE):
            episode = _Episode(now, now)
        else:
            episode.count += 1
            episode.last_at = now
        self._episodes[subject] = episode
        if len(self._episodes) > MAX_EPISODES:
            del self._episodes[next(iter(self._episodes))]
        return episode

    def show(self, past: PastVerdict) -> None:
        self.shown[_key(past)] = past
        if len(self.shown) > MAX_VERDICTS:
            del self.shown[next(iter(self.shown))]


class Watch:
    def __init__(self, *, job_name: str = "", diagnosticians: Sequence[Diagnostician] | None = None) -> None:
        self.picture = Picture()
        self.terms = WatchTerms()
        self.job_name = job_name
        self.autopsy: Autopsy | None = None
        self.restart_cost: float | None = None
        """Seconds from an action to the first step after it, as measured here; None: never yet."""
        self._diagnosticians = built_in() if diagnosticians is None else tuple(diagnosticians)
        self._findings = _Findings()
        self._look: Look | None = None
        self._num_orders = 0
        self._num_looks = 0
        """In the episode under way."""
        self._next_look_at = Micros(0)
        self._acted_round: Round | None = None
        self._acted_at: Micros | None = None
        self._held_until: dict[_Subject, Micros] = {}
        """Findings of which nothing came in this round, and when they may act again."""
        self._has_stepped = False
        """Some rank of this job has told of a step, in whichever round."""
        self._is_news = False
        self._next_check_at = Micros(0)
        self._effects: list[WatchEffect] = []

    # What comes in.

    def follow(self, scene: Scene, terms: WatchTerms, now: Micros) -> None:
        """What the job says now."""
        if scene.round != self.picture.scene.round or not scene.is_active:
            self._end_episode()
            self._held_until = {}
        if scene.round != self.picture.scene.round:
            self._findings.begin_round()
        self.terms = terms
        self.picture.enter(scene)

    def hear(self, observation: WatchObservation, now: Micros) -> None:
        match observation:
            case ProgressReport():
                if self.picture.hear_progress(observation, now):
                    self._measure_restart(observation, now)
                    self._has_stepped |= any(worker.step_seconds > 0 for worker in observation.workers)
                    if not self.picture.stalled and self._look is None:
                        self._end_episode()
            case ResourceReport():
                self.picture.hear_resources(observation, now)
            case LookTaken():
                if self._look is not None:
                    self._look.hear(observation, now)
                return
            case NodeEvent():
                self.picture.events.append(observation)
            case SampleTaken():
                self.picture.samples.add(observation, now)
        self._is_news = True

    def hear_failure(self, failed: FailedWorkers) -> None:
        self.picture.failures.append(failed)
        self._is_news = True
        self._next_check_at = Micros(0)  # at once: what the ranks did last is forgotten with the next round

    def hear_duplicates(self, duplicates: dict[str, int]) -> None:
        self.picture.duplicates = duplicates
        self._is_news = True

    def hear_verdict(self, verdict: Verdict, now: Micros) -> None:
        """Of a user's own diagnostician."""
        self._conclude(verdict, now)

    def hear_answer(self, command: HangFound | FaultFound, now: Micros, *, is_heard: bool) -> None:
        """
        The job has answered a finding, and its scene was followed since. `is_heard`: it decided, whatever that was.

        While the round goes on nothing came of it. That must not end the watch over this round: what was found may be what makes it hang.
        """
        scene = self.picture.scene
        if not scene.is_active or scene.round != command.round or self._acted_round != command.round:
            return
        self._acted_round = self._acted_at = None
        subject = _subject_of(command.verdict)
        self._held_until[subject] = Micros(now + micros(EPISODE if is_heard else AGAIN_SOON))
        episode = self._findings.find(subject)
        if episode is not None:
            episode.has_acted = False
            self._findings.show(_past_of(episode, command.round, command.verdict))
        self._is_news = True  # somebody else may have waited for its turn

    def lost(self, nodes: Sequence[NodeId]) -> None:
        """Who could not be asked."""
        if self._look is not None:
            self._look.lose(nodes)

    # What comes out.

    def tick(self, now: Micros) -> list[WatchEffect]:
        if self.picture.scene.is_active:
            self._watch_hang(now)
        if self._is_news and now >= self._next_check_at:
            self._is_news = False
            self._next_check_at = Micros(now + micros(SETTLING))
            found = [verdict for each in self._diagnosticians for verdict in each.diagnose(self.picture, now)]
            # Only one may act on a round: who would do more goes first, because it does the work of the others, too.
            for verdict in sorted(found, key=lambda verdict: -_PRIORITY[verdict.action]):
                self._conclude(verdict, now)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> Micros | None:
        """When time alone has something to say; None: never."""
        times = [self._next_check_at] if self._is_news else []
        if self._look is not None:
            times.append(self._look.expires_at)
        elif self.picture.scene.is_active and self._acted_round != self.picture.scene.round and self.picture.stalled:
            times.append(self._next_look_at)
        return min(times, default=None)

    def diagnosis(self, last: int) -> Diagnosis:
        verdicts = tuple(self._findings.shown.values())[-last:] if last > 0 else ()
        return Diagnosis(verdicts=verdicts, autopsy=self.autopsy)

    @property
    def newest(self) -> PastVerdict | None:
        return next(reversed(self._findings.shown.values()), None)

    # Hangs.

    def _watch_hang(self, now: Micros) -> None:
        look = self._look
        if look is None:
            is_due = now >= self._next_look_at and self._acted_round != self.picture.scene.round
            if is_due and self.picture.stalled:
                self._begin_look(now)
            return
        if look.is_complete(0) and not look.is_judged_early:
            look.is_judged_early = True
            sights = look.sights()
            finding = judge(sights, look.missing())
            if finding.is_urgent:
                self._judge(finding, sights, now)
                return
        if look.is_over(now):
            sights = look.sights()
            self._judge(judge(sights, look.missing()), sights, now)

    def _begin_look(self, now: Micros) -> None:
        self._num_orders += 1
        self._num_looks += 1
        left = self.terms.pause - _stalled_for(self.picture, now) + MARGIN
        self._look = Look(self._num_orders, self.picture.scene, again_after=max(AGAIN_AFTER, left), now=now)
        self._effects += [AskNode(node, order) for node, order in self._look.orders()]

    def _judge(self, finding: HangFinding, sights: Sequence[Sight], now: Micros) -> None:
        self._look = None
        self._next_look_at = Micros(now + micros(interval_after(self._num_looks)))
        if not sights or not (finding.is_urgent or any(sight.is_overdue for sight in sights)):
            return  # it went on meanwhile
        if finding.is_premature:
            return
        stalled_for = _standing(sights) if finding.is_proof else _stalled_for(self.picture, now)
        verdict = _choose(
            finding,
            self.terms,
            stalled_for=stalled_for,
            has_stepped=self._has_stepped,
            restart_cost=self.restart_cost,
        )
        if verdict.action in (ActionKind.NONE, ActionKind.NOTIFY):
            self._look_when_it_counts(finding, stalled_for, now)
        page = write_page(
            job_name=self.job_name, picture=self.picture, sights=sights, verdict=verdict, stalled_for=stalled_for
        )
        self.autopsy = Autopsy(
            at=now, round=self.picture.scene.round, stalled_for=stalled_for, verdict=verdict, text=page
        )
        self._effects.append(Publish(self.autopsy))
        self._conclude(verdict, now, stalled_for=stalled_for)

    def _look_when_it_counts(self, finding: HangFinding, stalled_for: float, now: Micros) -> None:
        """The next look shall not miss the moment at which something is to be done."""
        left = _patience(finding, self.terms, has_stepped=self._has_stepped)[0] - stalled_for
        if 0 < left < float("inf"):
            at = Micros(now + micros(max(0.0, left - AGAIN_AFTER) + MARGIN))
            self._next_look_at = min(self._next_look_at, at)

    def _end_episode(self) -> None:
        self._look = None
        self._num_looks = 0
        self._next_look_at = Micros(0)

    def _measure_restart(self, report: ProgressReport, now: Micros) -> None:
        """What an action has cost, until the first step after it."""
        if self._acted_at is None or self._acted_round is None or report.round <= self._acted_round:
            return
        if any(worker.step_seconds for worker in report.workers):
            cost = (now - self._acted_at) / MICROS_PER_SECOND
            self.restart_cost = cost if self.restart_cost is None else 0.5 * (self.restart_cost + cost)
            self._acted_at = None

    # Verdicts.

    def _conclude(self, verdict: Verdict, now: Micros, *, stalled_for: float | None = None) -> None:
        round_ = self.picture.scene.round
        verdict = _as_allowed(verdict, self.terms)
        acts = verdict.action not in (ActionKind.NONE, ActionKind.NOTIFY)
        subject = _subject_of(verdict)
        is_held = now < self._held_until.get(subject, 0)
        if acts and (is_held or not self.picture.scene.is_active or self._acted_round == round_):
            verdict, acts = replace(verdict, action=ActionKind.NOTIFY), False
        episode = self._findings.note(subject, now)
        episode.has_acted |= acts
        past = _past_of(episode, round_, verdict)
        is_told = acts or _is_power_of_two(episode.count)
        if is_told:
            self._effects.append(Tell(past))
        if is_told or _key(past) in self._findings.shown:
            self._findings.show(past)
        if acts:
            self._acted_round, self._acted_at = round_, now
            if stalled_for is not None:
                command: HangFound | FaultFound = HangFound(round=round_, verdict=verdict, stalled_for=stalled_for)
            else:
                command = FaultFound(round=round_, verdict=verdict)
            self._effects.append(Act(command))


def _stalled_for(picture: Picture, now: Micros) -> float:
    """Seconds for which all stalled ranks have been where they are."""
    entered = max((record.entered_at for record in picture.stalled), default=now)
    return max(0.0, (now - entered) / MICROS_PER_SECOND)


def _choose(
    finding: HangFinding, terms: WatchTerms, *, stalled_for: float, has_stepped: bool, restart_cost: float | None
) -> Verdict:
    """The cheapest action that is safe."""
    needed, why = _patience(finding, terms, has_stepped=has_stepped)
    cost = f"about {RESTART_COST if restart_cost is None else restart_cost:.1f} s"
    measured = "" if restart_cost is None else ", as measured before"
    if terms.strategy is not HangStrategy.ACT:
        action = ActionKind.NONE if terms.strategy is HangStrategy.LOG else ActionKind.NOTIFY
        reasoning = f"The master does not restart workers, because the job has --hang-detection {int(terms.strategy)}."
    elif stalled_for >= needed:
        action = ActionKind.RESTART_WORKERS
        reasoning = f"{why}: a restart costs {cost}{measured}, and waiting costs all ranks every second."
    else:
        action = ActionKind.NOTIFY
        then = f"workers are restarted after {needed:g} s" if needed < float("inf") else "the master only reports it"
        reasoning = f"{why}: {then}." if finding.is_proof else f"{why}, so it may go on by itself: {then}."
    return Verdict(
        fault=finding.fault,
        diagnostician=HANG,
        culprits=finding.culprits,
        evidence=finding.evidence,
        confidence=finding.confidence,
        action=action,
        reasoning=reasoning,
    )


def _patience(finding: HangFinding, terms: WatchTerms, *, has_stepped: bool) -> tuple[float, str]:
    """Seconds of standing still before anything is done, and why."""
    longest = max(terms.longest_timeout, terms.hang_timeout)
    if finding.is_urgent:
        return 0.0, "It cannot go on by itself"
    if finding.is_proof and not finding.patience:
        return terms.pause, "It does not go on by itself"
    if finding.is_proof:
        return max(terms.pause, finding.patience), "Data and storage often come back by themselves"
    if not has_stepped:
        return float("inf"), "There is no proof, and it is unknown what counts as progress in this job"
    if finding.is_long_phase:
        return longest, "There is no proof, and what is done there may take long"
    return terms.hang_timeout, "There is no proof that it hangs"


def _as_allowed(verdict: Verdict, terms: WatchTerms) -> Verdict:
    """Whichever part finds a hang, the user says what follows."""
    strategy = terms.strategy
    if (
        verdict.diagnostician != HANG
        or verdict.action is not ActionKind.RESTART_WORKERS
        or strategy is HangStrategy.ACT
    ):
        return verdict
    action = ActionKind.NONE if strategy is HangStrategy.LOG else ActionKind.NOTIFY
    reasoning = f"The master does not restart workers, because the job has --hang-detection {int(strategy)}."
    return replace(verdict, action=action, reasoning=reasoning)


def _past_of(episode: _Episode, round_: Round, verdict: Verdict) -> PastVerdict:
    return PastVerdict(
        at=episode.at,
        round=round_,
        verdict=verdict,
        count=episode.count,
        last_at=episode.last_at if episode.count > 1 else Micros(0),
        has_acted=episode.has_acted,
    )


def _key(past: PastVerdict) -> tuple[Round, Micros, _Subject]:
    return past.round, past.at, _subject_of(past.verdict)


def _subject_of(verdict: Verdict) -> _Subject:
    """What it is about: two verdicts with the same one are one finding."""
    return verdict.diagnostician, verdict.fault, verdict.culprits


def _standing(sights: Sequence[Sight]) -> float:
    """Seconds for which no worker has gone on, by the clocks of the workers."""
    known = [sight.second.progress.phase_seconds for sight in sights if sight.second.progress is not None]
    return min(known, default=0.0)


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
