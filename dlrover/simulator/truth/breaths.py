"""
Last breaths: when workers fail, the survivors of their node talk with the shipped decisions of the agent, and things go wrong at each point of that.

A survivor may be a step behind, wait with all its gradients, have another state than its replicas, refuse, stay silent, or die at the order, after its offer,
while it finishes a step or while it saves. What is in the segment afterwards is compared with what every worker had.
"""

from __future__ import annotations

import enum
import random

from dlrover.agent.decisions.last_breath import BreathTalk, Heard
from dlrover.agreed.last_breath import Offer
from dlrover.host.shared_page.breath_words import BreathAnswer, BreathOrder
from dlrover.simulator.parts import SimulationPart, VirtualGroup
from dlrover.simulator.truth.invariants import Violation

RIGHT, WRONG = 1, 2
WRONG_ODDS = 0.05
TROUBLE_ODDS = 0.35
CUT_ODDS = 0.5
UNMET_ODDS = 0.1
"""Of a state in pieces: how often its workers do not wait for each other, as after one that was late."""


class Conduct(enum.Enum):
    GOOD = enum.auto()
    DIES_AT_THE_ORDER = enum.auto()
    DIES_AFTER_ITS_OFFER = enum.auto()
    DIES_WHILE_IT_FINISHES = enum.auto()
    DIES_WHILE_IT_SAVES = enum.auto()
    REFUSES = enum.auto()
    SILENT = enum.auto()
    SILENT_WHILE_IT_SAVES = enum.auto()


class VirtualSurvivor:
    """One worker: what it has, and what becomes of it."""

    def __init__(self, local_rank: int, *, step: int, piece: int | None, digest: int, conduct: Conduct) -> None:
        self.local_rank = local_rank
        self.step = step
        self.piece = piece
        self.digest = digest
        self.conduct = conduct
        self.is_ready = False
        """It has all gradients of the next step."""
        self.is_alive = True
        self.is_writing = False
        self.has_told = False

    def obey(self, order: BreathOrder) -> Heard:
        if not self.is_alive:
            return None
        match order:
            case BreathOrder.OFFER:
                return self._offer()
            case BreathOrder.FINISH:
                return self._finish()
            case _:
                return self._save()

    def _offer(self) -> Heard:
        match self.conduct:
            case Conduct.DIES_AT_THE_ORDER:
                return self._die()
            case Conduct.REFUSES:
                return BreathAnswer.REFUSED
            case Conduct.SILENT:
                return BreathAnswer.NONE
        self.has_told = True
        offer = Offer(self.local_rank, self.step, self.digest, self.piece, self.is_ready)
        self.is_alive = self.conduct is not Conduct.DIES_AFTER_ITS_OFFER
        return offer

    def _finish(self) -> Heard:
        if not self.is_ready:
            raise Violation("breath", "a worker was told to finish a step without its gradients")
        if self.conduct is Conduct.DIES_WHILE_IT_FINISHES:
            return self._die()
        self.step, self.is_ready = self.step + 1, False
        return Offer(self.local_rank, self.step, self.digest, self.piece)

    def _save(self) -> Heard:
        if self.conduct is Conduct.DIES_WHILE_IT_SAVES:
            return self._die()
        self.is_writing = True
        return BreathAnswer.NONE if self.conduct is Conduct.SILENT_WHILE_IT_SAVES else BreathAnswer.SAVED

    def _die(self) -> Heard:
        self.is_alive = False
        return None


class VirtualBreath:
    """The survivors of one node, and what their talk leads to."""

    def __init__(self, survivors: list[VirtualSurvivor], victim_step: int, *, is_met: bool) -> None:
        self._survivors = {each.local_rank: each for each in survivors}
        self._newest = max(victim_step, *(each.step for each in survivors))
        """That any worker finished, the lost one included."""
        self._pieces = {each.piece for each in survivors}
        self._is_met = is_met

    def run(self) -> bool:
        """Whether the segment holds a step afterwards. Raises Violation."""
        talk = BreathTalk(list(self._survivors))
        num_turns = 0
        while talk.orders:
            num_turns += 1
            if num_turns > len(self._survivors) + 2:
                raise Violation("breath", "the talk with the survivors does not end")
            orders = dict(talk.orders)
            self._check_writers(orders)
            talk.heard({rank: self._survivors[rank].obey(order) for rank, order in orders.items()})
        saved = [each for each in self._survivors.values() if each.is_writing]
        if talk.is_saved:
            self._check_saved(saved, talk.plan.step)
        else:
            self._check_loss()
        return talk.is_saved

    def _check_writers(self, orders: dict[int, BreathOrder]) -> None:
        writers = [rank for rank, order in orders.items() if order is BreathOrder.SAVE]
        writers += [each.local_rank for each in self._survivors.values() if each.is_writing]
        if self._pieces == {None} and len(writers) > 1:
            raise Violation("breath", f"workers {writers} write to one segment")

    def _check_saved(self, saved: list[VirtualSurvivor], step: int) -> None:
        told = [each for each in self._survivors.values() if each.has_told]
        living = [each for each in self._survivors.values() if each.is_alive]
        if not saved or {each.step for each in saved} != {step}:
            raise Violation("breath", f"step {step} counts as saved, and the segment has another")
        if any(each.conduct in (Conduct.REFUSES, Conduct.SILENT) for each in living):
            raise Violation("breath", "a survivor that did not agree was passed over")
        contents = {(each.step, each.piece, each.digest) for each in told if each.is_alive}
        if any((step, each.piece, WRONG if each.digest == RIGHT else RIGHT) in contents for each in saved):
            raise Violation("breath", "the job goes on with a state that a survivor contradicts")
        newer = {each.piece for each in living if each.step > step}
        if newer and newer == {each.piece for each in living}:
            raise Violation("breath", f"step {step} was saved, and a newer one was whole")
        if self._is_calm() and step < self._newest:
            raise Violation("breath", f"step {self._newest} was finished and could be saved, and step {step} was")

    def _check_loss(self) -> None:
        if self._is_calm() or self._has_successor():
            raise Violation("breath", f"step {self._newest} was lost without a doubt")

    def _has_successor(self) -> bool:
        """Of the whole state: survivors died, but one that has the newest step did not, and none of them raised a doubt."""
        everyone = self._survivors.values()
        doubts = (Conduct.REFUSES, Conduct.SILENT, Conduct.SILENT_WHILE_IT_SAVES)
        if self._pieces != {None} or any(each.conduct in doubts or each.digest == WRONG for each in everyone):
            return False
        newest = max(each.step for each in everyone)
        return any(each.conduct is Conduct.GOOD and each.step == newest for each in everyone)

    def _is_calm(self) -> bool:
        """Nothing went wrong but the one loss."""
        everyone = self._survivors.values()
        return self._is_met and all((each.conduct, each.digest) == (Conduct.GOOD, RIGHT) for each in everyone)


class LastBreaths:
    """Owned by the simulation; workers tell it when they fail."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/breaths")
        self.num_breaths = 0
        self.num_saved = 0

    def failed(self, group: VirtualGroup, *, is_local: bool) -> None:
        """`is_local`: one of the workers of this node is lost, else one of another node."""
        size = self._sim.shape.local_world_size
        step = self._sim.training.step(group.world.coordinator)
        num_survivors = size - 1 if is_local else size
        if not self._sim.shape.has_guard or step is None or not num_survivors:
            return
        self.num_breaths += 1
        self.num_saved += self._draw(num_survivors, step, is_cut=num_survivors > 1).run()

    def _draw(self, num_survivors: int, step: int, *, is_cut: bool) -> VirtualBreath:
        """
        Some are ahead by one step. If workers wait for each other before a step, all others can finish it then. Every piece has a survivor.
        """
        chance = self._chance
        is_cut = is_cut and chance.random() < CUT_ODDS
        is_met = not is_cut or chance.random() >= UNMET_ODDS
        is_any_ahead = chance.random() < 0.5
        troubles = [each for each in Conduct if each is not Conduct.GOOD]
        survivors = []
        for rank in range(num_survivors):
            is_ahead = is_any_ahead and chance.random() < 0.5
            survivor = VirtualSurvivor(
                rank,
                step=step + is_ahead,
                piece=rank % 2 if is_cut else None,
                digest=WRONG if chance.random() < WRONG_ODDS else RIGHT,
                conduct=chance.choice(troubles) if chance.random() < TROUBLE_ODDS else Conduct.GOOD,
            )
            survivor.is_ready = is_cut and is_met and not is_ahead and (is_any_ahead or chance.random() < 0.5)
            survivors.append(survivor)
        is_victim_ahead = is_cut and is_any_ahead
        return VirtualBreath(survivors, step + is_victim_ahead, is_met=is_met)
