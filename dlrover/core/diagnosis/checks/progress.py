"""Diagnosticians of how training goes: slow ranks, bad numbers, replicas that differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from dlrover.core.diagnosis.diagnostician import blame_ranks, conclude
from dlrover.core.diagnosis.picture import Picture, RankRecord
from dlrover.core.diagnosis.stacks import say_ranks
from dlrover.protocol.messages.job import Micros
from dlrover.protocol.messages.watch import FaultClass, Verdict


class Straggler:
    """A rank whose own work takes longer than that of the others, window after window, so that they wait for it in each step."""

    name = "straggler"
    _slow = 1.5
    """Times the median."""
    _costly = 0.1
    """Of a step that the others lose: less is not worth a word."""
    _windows = 2
    _steps = 3

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        ranks = [record for record in picture.heard() if len(record.windows) >= self._windows]
        if len(ranks) < 2 or len(ranks) < len(picture.ranks):
            return
        # Once for all: to sort the ranks again for each of them takes the master's time with the square of their number.
        medians = [statistics.median_low([_own(record, back) for record in ranks]) for back in range(self._windows)]
        slow = [record for record in ranks if self._is_slow(record, medians)]
        if not slow or len(slow) * 2 > len(ranks):
            return
        own, usual = _own(slow[0], 0), medians[0]
        named = {record.global_rank: None for record in slow}
        waited = statistics.median([_waited(record, 0) for record in ranks if record.global_rank not in named])
        yield conclude(
            self.name,
            FaultClass.STRAGGLER,
            blame_ranks(slow),
            f"{_subject(slow)} needs {own * 1e3:.0f} ms of its own work for a step, the median is {usual * 1e3:.0f} ms.",
            f"The others wait {waited * 1e3:.0f} ms in each step.",
            confidence=0.85,
            reasoning="Training goes on, only slower. The master does not replace the node, because that costs a "
            "restart: decide it yourself.",
        )

    def _is_slow(self, record: RankRecord, medians: list[float]) -> bool:
        for back, usual in enumerate(medians):
            if record.windows[-1 - back].steps < self._steps:
                return False
            own = _own(record, back)
            step = own + _waited(record, back)
            if own < self._slow * usual or own - usual < self._costly * step:
                return False
        return True


class Numerics:
    """A number that is none: from here on the model learns nothing."""

    name = "numerics"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        bad = [record for record in picture.heard() if record.bad_metric is not None]
        if not bad:
            return
        steps = [record.bad_metric[1] for record in bad if record.bad_metric is not None]
        first = min((step for step in steps if step is not None), default=None)
        began = [record for record in bad if record.bad_metric is not None and record.bad_metric[1] == first]
        name = began[0].bad_metric[0] if began and began[0].bad_metric is not None else "a metric"
        where = "" if first is None else f" at step {first}"
        is_everybody = len(began) == len(picture.ranks) > 1
        yield conclude(
            self.name,
            FaultClass.NUMERICS,
            () if is_everybody else blame_ranks(began),
            f"{_subject(began)} reported {name} that is NaN or Inf{where}.",
            confidence=0.9,
            reasoning="A restart repeats it unless the data or the learning rate change. Look at both.",
        )


class LossSpike:
    name = "loss_spike"
    _enough = 8
    """Reports, one with each heartbeat: less than a minute."""
    _times = 3.0
    _deviations = 10.0

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        spiked = []
        for record in picture.heard():
            if len(record.losses) <= self._enough:
                continue
            *former, newest = record.losses
            usual = statistics.median(former)
            spread = statistics.median([abs(loss - usual) for loss in former])
            if newest > self._times * abs(usual) and newest - usual > self._deviations * spread:
                spiked.append((record, newest, usual))
        if not spiked:
            return
        ranks = [record for record, _, _ in spiked]
        _, newest, usual = spiked[0]
        yield conclude(
            self.name,
            FaultClass.LOSS_SPIKE,
            () if len(ranks) == len(picture.ranks) > 1 else blame_ranks(ranks),
            f"{_subject(ranks)} reported a loss of {newest:.4g}; it was about {usual:.4g}.",
            confidence=0.7,
            reasoning="A spike may end by itself, so the master only reports it.",
        )


class CorruptionVote:
    """Replicas that should hold the same numbers vote on a digest of them; the minority is named."""

    name = "corruption_vote"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        ballots: dict[int, dict[str, list[RankRecord]]] = {}
        for record in picture.heard():
            for step, digest in record.digests.items():
                ballots.setdefault(step, {}).setdefault(digest, []).append(record)
        for step in sorted(ballots):
            votes = sorted(ballots[step].values(), key=len, reverse=True)
            if len(votes) == 1 or sum(map(len, votes)) < len(picture.ranks):
                continue
            majority, rest = votes[0], [record for vote in votes[1:] for record in vote]
            is_decided = len(majority) > len(rest)
            odd = rest if is_decided else majority + rest
            yield conclude(
                self.name,
                FaultClass.CORRUPTION,
                blame_ranks(odd),
                f"At step {step} {say_ranks([record.global_rank for record in majority])} agree on their parameters, and "
                f"{say_ranks([record.global_rank for record in rest])} differ.",
                "" if is_decided else "There is no majority, so it is unknown which state is right.",
                confidence=0.95 if is_decided else 0.5,
                reasoning="Only an older checkpoint shows which state is right. Go back to one and leave that node out."
                if is_decided
                else "Go back to an older checkpoint, and check all nodes of these ranks before you use them again.",
            )
            return


def _own(record: RankRecord, back: int) -> float:
    window = record.windows[-1 - back]
    return window.own / max(1, window.steps)


def _waited(record: RankRecord, back: int) -> float:
    window = record.windows[-1 - back]
    return window.waiting / max(1, window.steps)


def _subject(ranks: list[RankRecord]) -> str:
    text = say_ranks([record.global_rank for record in ranks])
    return text[0].upper() + text[1:]
