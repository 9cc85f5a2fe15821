"""The watch in a real master: what agents tell, what they are asked, and what follows."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dlrover.core.diagnosis.picture import Picture
from dlrover.master.diagnosis.old_actions import (
    DiagnosisAction,
    DiagnosisActionType,
    EventAction,
    JobAbortionAction,
    NodeAction,
)
from dlrover.master.diagnosis.old_diagnosticians import DiagnosisObservation, OldDiagnostician, Translated
from dlrover.master.diagnosis.plugins import UserDiagnosticians, portrait_of
from dlrover.protocol.messages.job import AskStatus, JobStatus, Join, Round, Run, StopCause
from dlrover.protocol.messages.watch import (
    ActionKind,
    AskDiagnosis,
    Diagnosis,
    FaultClass,
    LookTaken,
    Phase,
    ProgressReport,
    ResourceReport,
    ShowNotice,
    TakeLook,
    ThreadStack,
    Verdict,
    WorkerDump,
    WorkerProgress,
)
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Agent, Connect, MakeMaster


def progress(rank: int, **details: Any) -> WorkerProgress:
    values: dict[str, Any] = {"step": 5, "step_seconds": 0.1, "phase": Phase.BACKWARD, "phase_seconds": 3.0}
    return WorkerProgress(local_rank=0, global_rank=rank, pid=10 + rank, **values | details)


def tell(agent: Agent, *workers: WorkerProgress) -> None:
    report = ProgressReport(node=agent.node, incarnation=agent.incarnation, round=Round(1), workers=workers)
    agent.channel.observe(report)


async def answer_that_one_is_stopped(agents: list[Agent], ranks: dict[Agent, int]) -> None:
    """The look that all are asked for next."""
    for agent in agents:
        order = await next_look(agent)
        assert order.round == 1
        rank = ranks[agent]
        frames = ("torch/autograd/graph.py:1 _engine_run_backward", "/job/train.py:9 main")
        threads = () if rank == 1 else (ThreadStack(name="main", frames=frames, is_main=True),)
        dump = WorkerDump(
            local_rank=0, global_rank=rank, pid=10 + rank, state="T" if rank == 1 else "S", threads=threads,
            progress=progress(rank, is_stalled=True),
        )  # fmt: skip
        taken = LookTaken(
            node=agent.node, incarnation=agent.incarnation, look=order.look, number=0, workers=(dump,)
        )  # fmt: skip
        agent.channel.observe(taken)


async def next_look(agent: Agent) -> TakeLook:
    """Notices for the console may come before it."""
    async with asyncio.timeout(20):
        while not isinstance(order := (await agent.orders.get()).order, TakeLook):
            assert isinstance(order, ShowNotice)
    return order


async def ranks_of(agents: list[Agent]) -> dict[Agent, int]:
    """When they have met."""
    ranks = {}
    for agent in agents:
        wish = (await agent.wish(Run)).wish
        assert isinstance(wish, Run)
        ranks[agent] = wish.world.first_global_rank
    return ranks


async def test_a_stopped_worker_is_looked_at_and_the_world_starts_anew(
    make_master: MakeMaster, connect: Connect, tmp_path: Path
) -> None:
    master = make_master(reports=str(tmp_path / "reports"))
    master.start()
    agents = [connect(master.address, launch=f"l{number}") for number in range(2)]
    for agent in agents:
        await agent.attached()
    await asyncio.gather(*(agent.join() for agent in agents))
    ranks = await ranks_of(agents)
    for agent in agents:
        tell(agent, progress(ranks[agent], is_stalled=True))
    await answer_that_one_is_stopped(agents, ranks)
    for agent in agents:
        wish = (await agent.wish(Join)).wish
        assert isinstance(wish, Join)
        assert (wish.round, wish.cause) == (2, StopCause.FAILURE)
    answer = await ask(master.address, AskDiagnosis(), token=TOKEN, timeout=10)
    assert isinstance(answer, Diagnosis)
    (past,) = answer.verdicts
    assert past.has_acted
    assert (past.verdict.fault, past.verdict.action) == (FaultClass.STOPPED, ActionKind.RESTART_WORKERS)
    assert answer.autopsy is not None
    assert Path(answer.autopsy.file).read_text() == answer.autopsy.text
    assert "Rank 1" in answer.autopsy.text
    status = await ask(master.address, AskStatus(), token=TOKEN, timeout=10)
    assert isinstance(status, JobStatus)
    assert status.newest_verdict == past
    assert "diagnosis fault=stopped" in master.log()


async def test_workers_are_looked_at_although_nobody_could_replace_a_node_that_was_found_at_fault(
    make_master: MakeMaster, connect: Connect, tmp_path: Path
) -> None:
    master = make_master(reports=str(tmp_path / "reports"))
    master.start()
    agents = [connect(master.address, launch=f"l{number}") for number in range(2)]
    for agent in agents:
        await agent.attached()
    await asyncio.gather(*(agent.join() for agent in agents))
    ranks = await ranks_of(agents)
    broken = agents[0]
    broken.channel.observe(
        ResourceReport(node=broken.node, incarnation=broken.incarnation, troubles=("NVML: GPU is lost",))
    )
    async with asyncio.timeout(20):
        while True:
            answer = await ask(master.address, AskDiagnosis(), token=TOKEN, timeout=10)
            assert isinstance(answer, Diagnosis)
            if answer.verdicts:
                break
    for agent in agents:
        tell(agent, progress(ranks[agent], is_stalled=True))
    notice = (await asyncio.wait_for(broken.orders.get(), 20)).order
    assert isinstance(notice, ShowNotice), "at once, on the console of the node"
    assert notice.text.startswith("diagnosis: device. NVML: GPU is lost")
    assert "\n" not in notice.text
    for agent in agents:
        order = notice
        while isinstance(order, ShowNotice):  # one of them is the first node of the world, where all notices are shown
            order = (await asyncio.wait_for(agent.orders.get(), 20)).order
        assert order.round == 1


class _Plugin:
    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.is_held = threading.Event()

    def diagnose(self, portrait: object) -> object:
        if self.answer == "hold":
            self.is_held.wait(30)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


VERDICT = Verdict(fault=FaultClass.UNKNOWN, diagnostician="mine", evidence=("x" * 10_000,))


@pytest.mark.parametrize("answer", [VERDICT, [VERDICT], None, ValueError("no"), SystemExit(1), 7])
async def test_a_users_diagnostician_may_answer_anything(answer: object) -> None:
    plugins = UserDiagnosticians({"mine": _Plugin(answer)})
    found = await plugins.ask("mine", _Plugin(answer), portrait_of(Picture()))
    checked = [plugins.check(each) for each in found]
    assert len(checked) == (1 if answer in (VERDICT, [VERDICT]) else 0)
    assert all(each is not None and len(each.evidence[0]) <= 2048 for each in checked)
    assert plugins.check("nonsense") is None
    plugins.close()


async def test_a_users_diagnostician_that_hangs_is_waited_for_and_counted() -> None:
    plugin = _Plugin("hold")
    plugins = UserDiagnosticians({"mine": plugin}, time_limit=0.05)
    asked = asyncio.ensure_future(plugins.ask("mine", plugin, portrait_of(Picture())))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done, "it would be started again while the first call still runs"
    plugin.is_held.set()
    await asyncio.wait_for(asked, 20)
    plugins.close()


class Hot(OldDiagnostician):
    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        portrait = kwargs["portrait"]
        return DiagnosisObservation("it is hot", {"nodes": str(len(portrait.scene.places))})

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> list[DiagnosisAction]:
        return [
            EventAction(event_msg="hot"),
            NodeAction(node_id=7, reason="cool it", action_type=DiagnosisActionType.RELAUNCH_WORKER),
            JobAbortionAction(timestamp=1.0),  # long over
        ]


def test_a_diagnostician_of_the_original_is_understood() -> None:
    verdict = Translated("hot", Hot()).diagnose(portrait_of(Picture()))
    assert verdict is not None
    assert (verdict.action, verdict.evidence) == (ActionKind.RELAUNCH_NODE, ("it is hot", "nodes: 0"))
    assert ([culprit.node for culprit in verdict.culprits], verdict.reasoning) == ([7], "cool it")
