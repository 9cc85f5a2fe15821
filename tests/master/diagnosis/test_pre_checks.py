"""The pre-check in a real master, with operators that pass, fail, raise and end the job; and how they are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover.master.diagnosis.old_actions import (
    DiagnosisAction,
    DiagnosisActionQueue,
    DiagnosisActionType,
    EventAction,
    JobAbortionAction,
    NoAction,
    NodeAction,
)
from dlrover.master.diagnosis.pre_check_runner import PreCheckRunner
from dlrover.master.diagnosis.pre_checks import (
    ConnectionPreCheckOperator,
    JobView,
    Operator,
    PlatformNodeView,
    PreCheckOperator,
    PreCheckResult,
    SchedulingPreCheckOperator,
    WantedCheck,
    load_operators,
    parse_operators,
)
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    ReplicaSpec,
)
from dlrover.protocol.messages.goodput import AskEvents, Events, JobEvent
from dlrover.protocol.messages.job import AskStatus, JobStatus, JobTerms, PlatformId, Run, Wait
from dlrover.protocol.messages.precheck import OperatorState, PreCheckNoted, PreCheckStage
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Connect, MakeMaster, MasterProcess, StartMaster
from tests.master.diagnosis.pre_check_operators import Hangs

HERE = "tests.master.diagnosis.pre_check_operators"


async def status_when(master: MasterProcess, stage: PreCheckStage, num_tries: int = 0) -> JobStatus:
    async with asyncio.timeout(30):
        while True:
            status = await ask(master.address, AskStatus(), token=TOKEN, timeout=10)
            assert isinstance(status, JobStatus)
            tries = max((each.num_tries for each in status.pre_check.results), default=0)
            if status.pre_check.stage is stage and tries >= num_tries:
                return status
            await asyncio.sleep(0.05)


async def event_names(master: MasterProcess) -> set[str]:
    told = await ask(master.address, AskEvents(limit=1000), token=TOKEN, timeout=10)
    assert isinstance(told, Events)
    return {event.name for event in told.events}


async def test_training_begins_when_all_have_passed_and_broken_or_bypassed_ones_keep_nobody(
    make_master: MakeMaster, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    monkeypatch.setenv("A_FILE", str(file))
    master = make_master(
        job_name="a-job",
        pre_check_ops=f"[('{HERE}', 'Raises', 'no'), ('{HERE}', 'Fails', 'True'), ('no.such', 'One'), ('{HERE}', 'FileIsThere')]",
    )
    master.start()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    await agent.join()
    await agent.wish(Wait)
    status = await status_when(master, PreCheckStage.CHECKING, num_tries=2)
    assert status.round == 0
    assert "no-file" in await event_names(master)
    master.kill()
    master.start()  # the next one begins again
    file.write_text("good")
    await agent.wish(Run)
    status = await status_when(master, PreCheckStage.PASS)
    assert [(each.name, each.state) for each in status.pre_check.results] == [
        ("Raises", OperatorState.BROKEN),
        ("Fails", OperatorState.BYPASSED),
        ("FileIsThere", OperatorState.PASSED),
    ]
    assert "no such luck" in status.pre_check.results[0].message
    assert {"pre_check_error", "pre_check_pass"} <= await event_names(master)
    assert "pre-check no.such::One is not used" in master.log()


async def test_an_operator_may_end_the_job(
    make_master: MakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("bad")
    monkeypatch.setenv("A_FILE", str(tmp_path / "file"))
    master = make_master(pre_check_ops=f"{HERE}::FileIsThere")
    assert await asyncio.to_thread(master.run_to_end) == 1
    assert "The pre-check ends the job (BAD_FILE): give another" in master.log()


async def test_an_operator_that_does_not_come_back_is_left_behind(start_master: StartMaster) -> None:
    master = await start_master()
    told: list[JobEvent] = []
    operators = load_operators(parse_operators(f"{HERE}::Hangs"))
    runner = PreCheckRunner(master.master_loop, operators, limit=60, tell=told.append, time_limit=0.1)
    runner.begin()
    await asyncio.wait_for(runner.run(), 20)
    status = await master.status()
    assert status.pre_check.stage is PreCheckStage.PASS
    assert status.pre_check.results[0].state is OperatorState.BROKEN
    assert [event.name for event in told] == ["pre_check_error"]
    Hangs.let_go.set()


async def test_nothing_is_asked_before_the_platform_has_shown_its_nodes(start_master: StartMaster) -> None:
    master = await start_master()
    operators = load_operators([WantedCheck("dlrover.master.diagnosis.pre_checks", "SchedulingPreCheckOperator")])
    runner = PreCheckRunner(master.master_loop, operators, limit=60, tell=lambda _event: None, has_platform=True)
    runner.begin()
    noted = asyncio.Event()
    master.master_loop.listeners.on_decided.append(
        lambda command, *_: noted.set() if isinstance(command, PreCheckNoted) else None
    )
    running = asyncio.ensure_future(runner.run())
    await master.status()
    assert not noted.is_set()
    spec = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=1)})
    await master.master_loop.tell(DefineFleet(spec=spec))
    await master.master_loop.tell(NodesListed(nodes=()))
    await asyncio.wait_for(noted.wait(), 20)
    assert (await master.status()).pre_check.results[0].message == "1 nodes wait for their resources"
    node = PlatformNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=NodePhase.RUNNING, name="n0")
    await master.master_loop.tell(NodeChanged(kind=NodeEventKind.MODIFIED, node=node))
    await asyncio.wait_for(running, 20)
    assert (await master.status()).pre_check.stage is PreCheckStage.PASS


class OneIsBad(PreCheckOperator):
    num_checks = 0

    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 0.0

    def check(self, *args: Any, **kwargs: Any) -> PreCheckResult:
        self.num_checks += 1
        bad = [node for node in kwargs["job_args"].platform_nodes if node.id == 0]
        return PreCheckResult(result=len(bad), result_msg="the first is bad", abnormal_nodes=bad)

    def failed_actions(self, *args: Any, **kwargs: Any) -> list[DiagnosisAction]:
        return [NodeAction(node_id=node, reason="bad") for node in kwargs["abnormal_nodes"] * 2]


async def test_a_bad_node_is_exchanged_once_and_the_checks_begin_again(start_master: StartMaster) -> None:
    master = await start_master()
    intents: list[LaunchNode | RemoveNode] = []
    master.master_loop.listeners.on_intent = intents.append
    spec = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=2)})
    await master.master_loop.tell(DefineFleet(spec=spec))
    await master.master_loop.tell(NodesListed(nodes=()))
    operator = OneIsBad()
    runner = PreCheckRunner(
        master.master_loop, [Operator("OneIsBad", operator, False)], limit=60, tell=lambda _: None, has_platform=True
    )
    runner.begin()
    await asyncio.wait_for(runner.run(), 20)
    assert operator.num_checks == 2
    assert [intent.id for intent in intents if isinstance(intent, LaunchNode)] == [0, 1, 2]
    assert [intent.id for intent in intents if isinstance(intent, RemoveNode)] == [0]
    status = await master.status()
    assert (status.pre_check.stage, status.pre_check.results[0].num_tries) == (PreCheckStage.PASS, 2)


class Strange(PreCheckOperator):
    """Gives what it was made with."""

    def __init__(self, result: object, *actions: DiagnosisAction) -> None:
        self.result, self.actions = result, list(actions)

    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 0.0

    def check(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def failed_actions(self, *args: Any, **kwargs: Any) -> list[DiagnosisAction]:
        return self.actions


WRONG: Any = "wrong"


class Mute:
    def __str__(self) -> str:
        raise LookupError("no words")


MUTE: Any = Mute()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Strange(RuntimeError("caf\udce9")), "caf?"),
        (lambda: Strange(None), "NoneType"),
        (lambda: Strange(PreCheckResult(result=1, result_msg=MUTE)), "LookupError: no words"),
        # Made when the test begins: an action expires some minutes later.
        (lambda: Strange(PreCheckResult(result=1), NodeAction(node_id=WRONG)), "ValueError"),
        (lambda: Strange(PreCheckResult(result=1), NodeAction(timestamp=WRONG)), "TypeError"),
    ],
)
async def test_an_operator_that_gives_nonsense_is_left_out(
    start_master: StartMaster, make: Callable[[], Strange], says: str
) -> None:
    master = await start_master()
    told: list[JobEvent] = []
    runner = PreCheckRunner(master.master_loop, [Operator("Strange", make(), False)], limit=60, tell=told.append)
    runner.begin()
    await asyncio.wait_for(runner.run(), 20)
    status = await master.status()
    assert status.pre_check.stage is PreCheckStage.PASS
    assert status.pre_check.results[0].state is OperatorState.BROKEN
    assert says in status.pre_check.results[0].message
    assert [event.name for event in told] == ["pre_check_error"]


async def test_an_operator_may_say_none_for_no_nodes_and_anything_for_a_text(start_master: StartMaster) -> None:
    master = await start_master()
    result = PreCheckResult(result=1, result_msg={"bad": "caf\udce9"}, abnormal_nodes=None)  # type: ignore[arg-type]
    operator = Strange(result, JobAbortionAction(reason="caf\udce9", msg=7))  # type: ignore[arg-type]
    runner = PreCheckRunner(master.master_loop, [Operator("Strange", operator, False)], limit=60, tell=lambda _: None)
    runner.begin()
    await asyncio.wait_for(runner.run(), 20)
    status = await master.status()
    assert status.pre_check.stage is PreCheckStage.FAIL
    assert status.pre_check.message == "The pre-check ends the job (caf?): 7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("[]", ()),
        ("a.b::C,d::E?", (WantedCheck("a.b", "C"), WantedCheck("d", "E", True))),
        ("[('a.b', 'C', True), ('d', 'E')]", (WantedCheck("a.b", "C", True), WantedCheck("d", "E"))),
        ('("a.b", "C", "y")', (WantedCheck("a.b", "C", True),)),
    ],
)
def test_operators_are_named_in_two_ways(text: str, expected: tuple[WantedCheck, ...]) -> None:
    assert parse_operators(text) == expected


@pytest.mark.parametrize("text", ["a.b", "a.b::C d", "[1]", "[('a',)]", "[('a', 'b', 1, 2)]", "[", "('os; x', 'y')"])
def test_a_wrong_name_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="my_checks"):
        parse_operators(text)


def test_the_historical_module_has_the_built_in_ones() -> None:
    module = "dlrover.python.master.diagnosis.precheck_operator"
    wanted = [WantedCheck(module, f"{name}PreCheckOperator") for name in ("No", "Scheduling", "Connection")]
    assert len(load_operators(wanted)) == 3


def job(*nodes: dict[str, Any], **details: Any) -> JobView:
    usual = {"node_type": "worker", "is_running": False, "is_attached": False, "waited": 5.0}
    views = tuple(
        PlatformNodeView(id=10 + rank, rank=rank, name=f"n{rank}", **usual | node) for rank, node in enumerate(nodes)
    )
    return JobView(job_name="j", platform_nodes=views, **{"pending_timeout": 900.0} | details)


RUNS: dict[str, Any] = {"is_running": True}
LATE: dict[str, Any] = {"waited": 901.0, "message": "no room"}


def test_scheduling_waits_and_then_ends_the_job() -> None:
    operator = SchedulingPreCheckOperator()
    assert operator.check(job_args=JobView(job_name="j")).is_success()
    assert operator.check(job_args=job(LATE, pending_timeout=0.0)).is_success()
    assert operator.check(job_args=job(RUNS, RUNS)).is_success()
    assert operator.check(job_args=job(RUNS, {})).is_pending
    result = operator.check(job_args=job(RUNS, LATE))
    assert (result.is_success(), result.abnormal_nodes) == (False, [11])
    (action,) = operator.failed_actions(result_msg=result.result_msg, abnormal_nodes=[11])
    assert isinstance(action, JobAbortionAction)
    assert "no room" in action.msg
    servers = ({"node_type": "ps", "is_running": True}, {"node_type": "worker", "rank": 0, "is_running": True}, LATE)
    with_rank = [dict(node) for node in servers]
    del with_rank[1]["rank"]
    ps = "ParameterServerStrategy"
    assert not operator.check(job_args=job(*with_rank, distribution_strategy=ps, pending_fail_strategy=2)).is_success()


def test_connection_has_silent_nodes_replaced() -> None:
    operator = ConnectionPreCheckOperator()
    come = {"is_running": True, "is_attached": True, "waited": 1000.0}
    assert operator.check(job_args=job(come, LATE)).is_success(), "who does not run yet is the scheduler's matter"
    assert operator.check(job_args=job(come, RUNS)).is_pending
    result = operator.check(job_args=job(come, RUNS | {"waited": 301.0}))
    (action,) = operator.failed_actions(result_msg=result.result_msg, abnormal_nodes=result.abnormal_nodes)
    assert isinstance(action, NodeAction)
    assert (action.node_id, action.action_type) == (11, DiagnosisActionType.MASTER_RELAUNCH_WORKER)


def test_actions_expire_go_by_importance_and_are_not_doubled() -> None:
    now = 1000.0
    queue = DiagnosisActionQueue(lambda: now, max_queued=20)
    at: dict[str, Any] = {"timestamp": now, "instance": 3}
    old = EventAction(event_msg="old", timestamp=now, instance=3, expired_time_period=10)
    assert queue.add_action(old)
    assert not queue.add_action(EventAction(event_msg="old", event_labels={"count": "2"}, **at))
    assert not queue.add_action(NoAction(timestamp=now))
    later = NodeAction(node_id=1, reason="a", executable_time_period=50, **at)
    assert queue.add_action(later)
    assert not queue.add_action(NodeAction(node_id=1, reason="a", **at)), "the same, only sooner"
    assert queue.add_action(EventAction(event_msg="new", **at))
    assert queue.add_action(JobAbortionAction(reason="b", **at))
    assert isinstance(queue.next_action(3), JobAbortionAction)
    now = 1011.0
    assert queue.next_action(3) == EventAction(event_msg="new", **at), "the first has expired, the node may not yet"
    assert isinstance(queue.next_action(3), NoAction)
    now = 1060.0
    assert queue.next_action(3) is later
    assert len(queue) == 0
    for number in range(25):
        queue.add_action(EventAction(event_msg=str(number), timestamp=now))
    assert len(queue) == 20
    assert queue.next_action(-1).event_msg == "5"  # type: ignore[attr-defined]
    action = NodeAction.from_json('{"node_id": 4, "reason": "r", "new_key": 1}')
    assert NodeAction.from_json(action.to_json()) == action
