"""
A job with a node check on the stage of `scene`: agents that obey every wish, and tasks that end as a layout says.

What fails, what is slow and who dies comes from `check_lab.Layout`, by node rank. `settle` lets all agents obey until
nobody has anything new to do, as real ones would within milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlrover.core.job import Origin, Outcome
from dlrover.protocol.messages.check import CheckResult, CheckTerms, ExitClass, ReportCheck
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    Check,
    Command,
    JobTerms,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    LeaveReason,
    Limits,
    Run,
)
from tests.core.check.check_lab import Fault, Layout
from tests.core.scene import Scene, micros

MOST_TURNS = 64


def check_terms(min_nodes: int, max_nodes: int | None = None, **check: Any) -> JobTerms:
    limits = Limits(min_nodes=min_nodes, max_nodes=min_nodes if max_nodes is None else max_nodes)
    return JobTerms(limits=limits, check=CheckTerms(**({"module": "some.check"} | check)))


@dataclass
class CheckScene(Scene):
    layout: Layout = field(default_factory=lambda: Layout(0))
    frozen: set[str] = field(default_factory=set)
    """Agents that are connected and do nothing."""
    num_runs: int = 0
    is_quick: bool = False
    """Large jobs: the invariants, which look at everything, are checked only where the test itself looks."""

    def do(self, command: Command, origin: Origin | None = None) -> Outcome:
        if not self.is_quick:
            return super().do(command, origin)
        self.outcomes.append(self.job.apply(command, self.now, origin))
        return self.outcomes[-1]

    def obey(self, name: str) -> bool:
        """Do what is wished, once. Whether there was anything to do."""
        agent = self.agents[name]
        node = self.job.state.nodes.live.get(agent.node)
        if name in self.frozen or node is None or node.id in self.job.state.nodes.broken:
            return False
        wish = self.wish(name)
        match wish:
            case JoinCheck():
                self.join_check(name, wish.round)
            case Check():
                self.run_task(name, wish)
            case Join():
                self.join(name)
            case Leave():
                self.leave(name, LeaveReason.DISMISSED)
            case _:
                return False
        return True

    def settle(self, *, until: type | None = None) -> CheckScene:
        """`until`: stop when somebody's wish is of this kind."""
        for _ in range(MOST_TURNS):
            names = list(self.agents)
            if until is not None and any(isinstance(self.job.desired(self.agents[n].node).wish, until) for n in names):
                return self
            if not sum(self.obey(name) for name in names):
                return self
        raise AssertionError("the agents never come to rest")

    def join_check(self, name: str, round_: int, *, procs: int = 2) -> Outcome:
        agent = self.agents[name]
        self.num_offers[name] = self.num_offers.get(name, 0) + 1
        return self.send(
            name,
            JoinRendezvous(
                node=agent.node,
                incarnation=agent.incarnation,
                round=round_,
                local_world_size=procs,
                offer=f"host-{name}:{self.num_offers[name]}",
                name=NODE_CHECK_RENDEZVOUS,
            ),
        )

    def run_task(self, name: str, wish: Check) -> None:
        rank = self.agents[name].node_rank
        cycle = self.job.state.check.cycle
        assert cycle is not None, "a check without a cycle"
        group = cycle.groups[cycle.places[rank]]
        if self.layout.faults.get(rank) is Fault.DEATH:
            self.silent(name)
            return
        self.num_runs += 1
        self.report(
            name, wish.world.round, exit_class=self.layout.result(rank, group), elapsed=self.layout.time_ms(rank, group)
        )

    def report(
        self, name: str, round_: int, *, exit_class: ExitClass = ExitClass.OK, elapsed: float = 5.0, **details: Any
    ) -> Outcome:
        agent = self.agents[name]
        fields: dict[str, Any] = {"elapsed_ms": elapsed, "bandwidth_gbps": 1.5, "message": "boom"} | details
        return self.send(
            name,
            ReportCheck(node=agent.node, incarnation=agent.incarnation, round=round_, exit_class=exit_class, **fields),
        )

    def arrive(self, *names: str, **details: Any) -> CheckScene:
        for name in names:
            self.attach(name, procs=2, **details)
        return self

    def result(self, name: str) -> CheckResult | None:
        status = self.job.status()
        return next(node.check for node in status.nodes if node.node == self.agents[name].node)

    def running(self) -> list[str]:
        """Who trains now."""
        live = self.job.state.nodes.live
        return [n for n, agent in self.agents.items() if agent.node in live and isinstance(self.wish(n), Run)]

    def said(self, words: str) -> bool:
        return any(words in verdict for outcome in self.outcomes for verdict in outcome.verdicts)

    def pass_time(self, seconds: float) -> CheckScene:
        self.now = micros(self.now / 1e6 + seconds)
        self.tick()
        return self
