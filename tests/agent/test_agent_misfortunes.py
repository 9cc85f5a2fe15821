"""Anything to two nodes at any moment; when it is over, they finish."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Attach,
    JobTerms,
    JoinRendezvous,
    LeaveJob,
    Limits,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
)
from tests.agent.loopback import DEADLINE, StandInGroup, a_failure
from tests.agent.stage import Life, Stage, free_ports


class Misfortune:
    """Does to two nodes whatever a seed says, then heals everything and lets them finish."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._master = stage.master
        self._random = random.Random(seed)
        self._ports = {launch: self._random.choice([(), free_ports(1), free_ports(2)]) for launch in ("a", "b")}
        self._is_healed = False
        self.lives = {launch: self._begin(launch) for launch in ("a", "b")}

    async def strike(self) -> None:
        launch = self._random.choice(["a", "b"])
        life = self.lives[launch]
        blow = self._random.choice(
            ["fail", "fail", "finish", "cut", "restore", "break", "lose", "restart", "forget", "wait", "give up", "die"]
        )
        match blow:
            case "fail":
                self._end_workers(life, is_well=False)
            case "finish" if self._random.random() < 0.3:
                self._end_workers(life, is_well=True)
            case "cut":
                life.channel.cut()
            case "restore":
                life.channel.restore()
            case "break":
                life.channel.break_stream()
            case "lose":
                kinds = [Attach, JoinRendezvous, ReportFailure, ReportFinished, LeaveJob]
                life.channel.lose_answer_to(self._random.choice(kinds))
            case "restart":
                self._master.restart()
            case "forget" if self._random.random() < 0.5:
                self._master.restart(forget=True)
            case "wait":
                self._master.advance(self._random.choice([0.5, 4.0, 6.0, 31.0]))
            case "give up" if life.channel.attached is not None:
                with contextlib.suppress(Rejected):
                    self._master.give_up(life.channel)
                await turns(self._random.choice([0, 1, 3]))
                life.channel.break_stream()
            case "die":
                await life.die()
                self.lives[launch] = self._begin(launch)
        await turns(self._random.choice([0, 1, 2, 3, 5, 10, 30]))

    async def heal(self) -> None:
        self._is_healed = True
        while not all(life.task.done() for life in self.lives.values()):
            for life in self.lives.values():
                life.channel.restore()
                for group in life.workers.groups:
                    group.may_start.set()
                    group.may_stop.set()
                self._end_workers(life, is_well=True)
            await turns(30)
            self._master.advance(2)

    def _begin(self, launch: str) -> Life:
        limits = Limits(min_nodes=1, max_nodes=2, join_timeout=1e6)
        life = self._stage.begin(
            launch,
            terms=JobTerms(limits=limits, restarts=RestartPolicy(max_restarts=1000)),
            master_grace=1e6,
            host_ports=self._ports[launch],
        )
        life.workers.prepare = self._prepare
        return life

    def _prepare(self, group: StandInGroup) -> None:
        if self._is_healed:
            return
        if self._random.random() < 0.2:
            group.may_start.clear()
        if self._random.random() < 0.2:
            group.may_stop.clear()
        if self._random.random() < 0.2:
            group.late = (a_failure(),)

    def _end_workers(self, life: Life, *, is_well: bool) -> None:
        for group in life.workers.groups:
            if group.is_running and not group.has_ended:
                group.finish() if is_well else group.fail()


async def turns(count: int) -> None:
    """Let everybody else have so many turns of the event loop; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_the_nodes_finish_when_it_is_over(stage, seed):
    misfortune = Misfortune(stage, seed)
    async with asyncio.timeout(DEADLINE):
        for _ in range(25):
            await misfortune.strike()
        await misfortune.heal()
    for life in misfortune.lives.values():
        result = await life.result()
        # The one ending that is nobody's fault: some had finished, and the last one was given up before it could.
        assert result.exit_code == 0 or "had finished already" in result.message
