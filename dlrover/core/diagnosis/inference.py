"""
The inference chain: from a question ("does training hang or not?") by small steps to what is so, and to what should follow.

An inference is three words and whatever is known about it. An operator knows some inferences and turns one of them into others. The chain applies
operators until nothing new comes out. It is for conclusions that several rules lead to in turn; a rule that stands alone is a diagnostician.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from dlrover.core.diagnosis.diagnostician import conclude
from dlrover.protocol.messages.job import NodeId
from dlrover.protocol.messages.watch import ActionKind, Culprit, FaultClass, Verdict

E = TypeVar("E", bound=enum.StrEnum)

MAX_PASSES = 32
MAX_INFERENCES = 256


class InferenceName:
    NONE = "none"
    END = "end"
    TRAINING = "training"
    NODE = "node"
    WORKER = "worker"
    ACTION = "action"
    RESOURCE = "resource"
    GPU = "gpu"


class InferenceAttribute:
    ISORNOT = "is_or_not"
    IS = "is"
    NOT = "not"
    COLLECT = "collect"


class InferenceDescription:
    NONE = "n/a"
    HANG = "hang"
    FAILURE = "failure"
    METRICS = "metrics"
    EVENT = "event"
    ERROR = "error"
    RESOURCE = "resource"


class Inference(Struct, frozen=True):
    name: str = InferenceName.NONE
    attribution: str = InferenceAttribute.IS
    description: str = InferenceDescription.NONE
    configs: Mapping[str, str] = {}
    """What is known about it. Two inferences with the same words are the same, whatever is in here."""

    @property
    def words(self) -> tuple[str, str, str]:
        return (self.name, self.attribution, self.description)

    def is_same(self, other: Inference) -> bool:
        return self.words == other.words


DROP = Inference(InferenceName.END, InferenceAttribute.NOT)
"""The answer of an operator that wants the inference gone. No answer at all leaves it."""


class InferenceOperator:
    """To be derived from. Pure as everything here, or run at the edge."""

    def is_compatible(self, inference: Inference) -> bool:
        """Whether `infer` has something to say about it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it knows")

    def infer(self, inferences: list[Inference]) -> Sequence[Inference]:
        """What follows from the one in the list."""
        raise NotImplementedError(f"{type(self).__name__} infers nothing")


class InferenceChain:
    def __init__(self, inferences: Sequence[Inference], operators: Sequence[InferenceOperator]) -> None:
        self._inferences = list(inferences)
        self._operators = list(operators)
        self.troubles: list[str] = []
        """What operators raised, one sentence each."""

    def infer(self) -> list[Inference]:
        """All that follows, the newest first. Bounded: operators that feed each other for ever come to an end."""
        current = _distinct(self._inferences)
        seen = {inference.words: None for inference in current}
        for _ in range(MAX_PASSES):
            following = _distinct([result for inference in current for result in self._apply(inference)])
            news = [inference for inference in following if inference.words not in seen]
            seen.update((inference.words, None) for inference in news)
            current = _distinct([*news, *following])[:MAX_INFERENCES]
            if not news:
                break
        return current

    def _apply(self, inference: Inference) -> list[Inference]:
        for operator in self._operators:
            try:
                if not operator.is_compatible(inference):
                    continue
                results = list(operator.infer([inference]))
            except Exception as error:  # operators may be of users: one that breaks leaves things as they are
                self.troubles.append(f"{type(operator).__name__}: {type(error).__name__}: {error}")
                return [inference]
            return [result for result in results if not result.is_same(DROP)] if results else [inference]
        return [inference]


def action_of(name: str, inferences: Sequence[Inference]) -> Verdict | None:
    """The verdict that solutions amount to: the first that says what to do. Its configs say the rest."""
    for inference in inferences:
        if (inference.name, inference.attribution) != (InferenceName.ACTION, InferenceAttribute.IS):
            continue
        configs = inference.configs
        culprits = configs.get("culprits", "").split()
        return conclude(
            name,
            _member(FaultClass, configs.get("fault", ""), FaultClass.UNKNOWN),
            tuple(Culprit(node=_node(each), global_rank=int(each.partition(":")[2])) for each in culprits),
            *configs.get("event_msg", "").splitlines(),
            confidence=float(configs.get("confidence", "0.5")),
            action=_member(ActionKind, configs.get("action", ""), ActionKind.NOTIFY),
            reasoning=configs.get("reasoning", ""),
        )
    return None


def say_culprits(culprits: Sequence[Culprit]) -> str:
    """As `action_of` reads them."""
    return " ".join(f"{culprit.node}:{culprit.global_rank}" for culprit in culprits)


def _node(text: str) -> NodeId:
    return NodeId(int(text.partition(":")[0]))


def _member(kind: type[E], value: str, otherwise: E) -> E:
    return next((member for member in kind if member == value), otherwise)


def _distinct(inferences: Sequence[Inference]) -> list[Inference]:
    return list({inference.words: inference for inference in reversed(inferences)}.values())[::-1]
