"""What a diagnostician is, and the verdicts that all of them make alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dlrover.core.diagnosis.picture import Picture, RankRecord
from dlrover.protocol.messages.job import Micros
from dlrover.protocol.messages.watch import MAX_TEXT, ActionKind, Culprit, FaultClass, Verdict


class Diagnostician(Protocol):
    """Looks at the picture and says what is wrong with it. Asked again and again: repeating itself costs nothing."""

    @property
    def name(self) -> str: ...

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]: ...


def blame_ranks(ranks: Sequence[RankRecord]) -> tuple[Culprit, ...]:
    return tuple(Culprit(node=record.place.node, global_rank=record.global_rank) for record in ranks)


def conclude(
    name: str,
    fault: FaultClass,
    culprits: tuple[Culprit, ...],
    *evidence: str,
    confidence: float,
    action: ActionKind = ActionKind.NOTIFY,
    reasoning: str,
) -> Verdict:
    """With everything cut to what people read."""
    return Verdict(
        fault=fault,
        diagnostician=name,
        culprits=culprits,
        evidence=tuple(sentence[:MAX_TEXT] for sentence in evidence if sentence),
        confidence=confidence,
        action=action,
        reasoning=reasoning[:MAX_TEXT],
    )
