"""
The agent's talk with the survivors of a failure, before it stops them: who has the newest whole step, and who saves it.

It goes in turns: the agent gives orders, then waits until each survivor that got one has answered or died, or the time is over. `orders` has
those of the present turn, `heard` takes the answers and makes the next turn. No clock and no process here, so that the simulator
runs the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dlrover.agreed.last_breath import Offer, Plan, plan_breath
from dlrover.host.shared_page.breath_words import BreathAnswer, BreathOrder
from dlrover.protocol.messages.job import FailureKind

Heard = Offer | BreathAnswer | None
"""An offer, SAVED or REFUSED; NONE: the survivor lives and did not answer in time; None: it died."""


DEATHS = (FailureKind.SIGNAL, FailureKind.OUT_OF_MEMORY, FailureKind.PEER_LOST, FailureKind.STOPPED_BY_US)
"""Failures that say nothing against the state of the other workers: only after these the survivors are asked."""


class BreathTalk:
    def __init__(self, local_ranks: Sequence[int]) -> None:
        self._offers: dict[int, Offer] = {}
        self._num_silent = 0
        self._writers: list[int] = []
        """Of a state that is not cut: who may still be asked to save it."""
        self.plan = Plan(-1, (), "no survivor was asked")
        self.is_saved = False
        self.orders: dict[int, BreathOrder] = dict.fromkeys(local_ranks, BreathOrder.OFFER)
        """Of this turn, by local rank; empty: the talk is over, and who still lives leaves."""

    @property
    def doubt(self) -> str:
        """Why nothing is saved."""
        return "" if self.is_saved else self.plan.doubt or "no survivor could save it"

    def heard(self, answers: Mapping[int, Heard]) -> None:
        """From all survivors that had an order in this turn."""
        turn = next(iter(self.orders.values()))
        if turn is BreathOrder.SAVE:
            self._end_save(answers)
            return
        self._num_silent += sum(isinstance(answer, BreathAnswer) for answer in answers.values())
        others = {rank: offer for rank, offer in self._offers.items() if rank not in answers}
        self._offers = others | {rank: answer for rank, answer in answers.items() if isinstance(answer, Offer)}
        if turn is BreathOrder.FINISH:  # once is enough
            self._offers = {rank: replace(offer, can_finish=False) for rank, offer in self._offers.items()}
        self._choose()

    def _choose(self) -> None:
        self.plan = plan = plan_breath(list(self._offers.values()), self._num_silent)
        self._writers = [] if plan.is_cut else list(plan.holders)
        if plan.finishers:
            self.orders = dict.fromkeys(plan.finishers, BreathOrder.FINISH)
        elif plan.is_cut:
            self.orders = dict.fromkeys(plan.holders, BreathOrder.SAVE)
        else:
            self._ask_next_writer()

    def _ask_next_writer(self) -> None:
        self.orders = {self._writers.pop(0): BreathOrder.SAVE} if self._writers else {}

    def _end_save(self, answers: Mapping[int, Heard]) -> None:
        """The next writer is asked only if this one is dead: one that refuses or is still writing may have half of it in the segment."""
        self.is_saved = all(answer is BreathAnswer.SAVED for answer in answers.values())
        is_dead = all(answer is None for answer in answers.values())
        if self.is_saved or self.plan.is_cut or not is_dead:
            self.orders = {}
        else:
            self._ask_next_writer()
