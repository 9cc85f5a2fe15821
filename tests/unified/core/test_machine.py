"""The life of an ensemble, fault by fault: what starts, what restarts, whom it drags along, and how the job ends."""

from __future__ import annotations

import pytest

from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.unified.core.machine import EXIT_NO_ROOM, EnsembleMachine
from dlrover.unified.core.messages import (
    BeginEnsemble,
    BundlesPlaced,
    Command,
    ConductorTook,
    CreateInstance,
    Effect,
    EndInstance,
    FinishEnsemble,
    InstanceBlamed,
    InstanceFailed,
    InstanceGone,
    InstanceId,
    InstanceReady,
    InstanceSucceeded,
    MachineReplaced,
    PlaceBundles,
    ReplaceMachine,
    RestartEnsemble,
    RunInstance,
    StageOfJob,
    StopEnsemble,
)
from dlrover.unified.core.spec import EnsembleSpec, OnFailure, RoleSpec, check_spec

POLICY = RoleSpec(name="policy", on_failure=OnFailure.SELF)
ROLLOUT = RoleSpec(
    name="rollout", count=2, needs=("policy",), is_driver=False, on_failure=OnFailure.INSTANCE, max_restarts=2
)


def id_of(name: str, incarnation: int = 1) -> InstanceId:
    role, _, rank = name.partition("-")
    return InstanceId(role, int(rank), incarnation)


class Stage:
    """A machine with a clock, and what it asked for in short words."""

    def __init__(self, *roles: RoleSpec, **more: object) -> None:
        self.machine = EnsembleMachine()
        self.seconds = 0.0
        self.spec = EnsembleSpec(name="job", roles=roles or (POLICY, ROLLOUT), **more)

    def tell(self, command: Command) -> list[str]:
        return [short(effect) for effect in self.machine.apply(command, Micros(micros(self.seconds))).effects]

    def later(self, seconds: float) -> list[str]:
        self.seconds += seconds
        found = []
        for command in self.machine.due(Micros(micros(self.seconds))):
            found += self.tell(command)
        return found

    def begin(self) -> None:
        """Until all of it runs."""
        todo = self.tell(BeginEnsemble(self.spec)) + self.tell(BundlesPlaced())
        while todo:
            word, _, name = todo.pop(0).partition(" ")
            if word == "create":
                name, _, incarnation = name.partition("#")
                todo += self.tell(InstanceReady(id_of(name, int(incarnation or 1))))
        assert self.machine.stage is StageOfJob.RUNNING

    def fail(self, name: str, incarnation: int = 1, cause: str = "ValueError: 1") -> list[str]:
        return self.tell(InstanceFailed(id_of(name, incarnation), cause))

    def gone(self, name: str, incarnation: int = 1) -> list[str]:
        return self.tell(InstanceGone(id_of(name, incarnation)))


def short(effect: Effect) -> str:
    match effect:
        case PlaceBundles():
            return "place"
        case CreateInstance(instance):
            return f"create {instance}{number(instance)}"
        case RunInstance(instance):
            return f"run {instance}{number(instance)}"
        case EndInstance(instance, is_kill):
            return f"{'kill' if is_kill else 'end'} {instance}{number(instance)}"
        case ReplaceMachine(instance):
            return f"replace the machine of {instance}{number(instance)}"
        case FinishEnsemble(exit_code, reason):
            return f"finish {exit_code}: {reason}"


def number(instance: InstanceId) -> str:
    return f"#{instance.incarnation}" if instance.incarnation > 1 else ""


def test_roles_start_in_the_order_of_their_needs_and_run_together():
    stage = Stage()
    assert stage.tell(BeginEnsemble(stage.spec)) == ["place"]
    assert stage.tell(BundlesPlaced()) == ["create policy-0"]
    assert stage.tell(InstanceReady(id_of("policy-0"))) == ["create rollout-0", "create rollout-1"]
    assert stage.tell(InstanceReady(id_of("rollout-1"))) == []
    assert stage.machine.stage is StageOfJob.INIT
    assert stage.tell(InstanceReady(id_of("rollout-0"))) == ["run policy-0", "run rollout-0", "run rollout-1"]
    assert stage.machine.stage is StageOfJob.RUNNING


def test_a_job_is_over_when_its_drivers_ended_well():
    stage = Stage()
    stage.begin()
    assert stage.tell(InstanceSucceeded(id_of("rollout-0"))) == []
    assert stage.tell(InstanceSucceeded(id_of("policy-0"))) == ["end policy-0", "end rollout-0", "end rollout-1"]
    assert stage.gone("policy-0") + stage.gone("rollout-0") == []
    assert stage.gone("rollout-1") == ["finish 0: all drivers ended well"]
    with pytest.raises(Rejected, match="the job is over"):
        stage.tell(StopEnsemble("again"))


def test_an_instance_that_dies_restarts_alone_with_growing_pauses_and_then_its_role():
    stage = Stage()
    stage.begin()
    assert stage.gone("rollout-1") == ["create rollout-1#2"]
    assert stage.tell(InstanceReady(id_of("rollout-1", 2))) == ["run rollout-1#2"], "nobody waits for it"
    assert stage.fail("rollout-1", 2) == ["end rollout-1#2"]
    assert stage.gone("rollout-1", 2) == [], "it has a pause"
    assert stage.later(0.9) == []
    assert stage.later(0.2) == ["create rollout-1#3"]
    assert stage.fail("rollout-1", 3, "KeyError: 2") == ["end rollout-0", "end rollout-1#3"], (
        "its own budget is used up"
    )
    assert stage.gone("rollout-0") + stage.gone("rollout-1", 3) == ["create rollout-0#2", "create rollout-1#4"]
    assert stage.tell(InstanceReady(id_of("rollout-0", 2))) == [], "a role that restarts runs together"
    assert stage.tell(InstanceReady(id_of("rollout-1", 4))) == ["run rollout-0#2", "run rollout-1#4"]
    assert stage.machine.state.roles["policy"].instances[0].incarnation == 1


def test_a_role_whose_budget_is_used_up_restarts_the_job_and_then_ends_it():
    worker = RoleSpec(name="worker", on_failure=OnFailure.ROLE, max_restarts=1)
    stage = Stage(worker, max_job_restarts=1)
    stage.begin()
    for incarnation, cause in enumerate(["ValueError", "KeyError"], start=1):
        assert stage.fail("worker-0", incarnation, cause) == [f"end worker-0{number(id_of('worker-0', incarnation))}"]
        assert stage.gone("worker-0", incarnation) == [f"create worker-0#{incarnation + 1}"]
        assert stage.tell(InstanceReady(id_of("worker-0", incarnation + 1))) == [f"run worker-0#{incarnation + 1}"]
    assert stage.machine.state.num_job_restarts == 1
    assert stage.fail("worker-0", 3, "OSError: disk") == ["end worker-0#3"]
    assert stage.gone("worker-0", 3) == ["finish 1: worker-0 failed: OSError: disk"]


def test_the_same_traceback_again_and_again_is_not_met_with_the_same_restart():
    worker = RoleSpec(name="worker", on_failure=OnFailure.INSTANCE, max_restarts=100)
    stage = Stage(worker, max_job_restarts=0)
    stage.begin()
    incarnation = 1
    while stage.machine.stage is StageOfJob.RUNNING and incarnation < 300:
        stage.fail("worker-0", incarnation)
        stage.gone("worker-0", incarnation)
        stage.later(40)
        incarnation += 1
        if stage.machine.stage is StageOfJob.RUNNING:
            stage.tell(InstanceReady(id_of("worker-0", incarnation)))
    ways = [role.budget.used for role in stage.machine.state.roles.values()]
    assert stage.machine.state.roles["worker"].instances[0].budget.used == 3
    assert ways == [100], "the role's own budget ends it"


def test_the_first_failure_is_the_reason_of_the_end_and_its_followers_are_not():
    """Spec 11, §19, row 4: who failed after it, because of it, is not blamed."""
    stage = Stage(POLICY, RoleSpec(name="judge", count=2, on_failure=OnFailure.STOP))
    stage.begin()
    stage.fail("judge-1", cause="ValueError: the first one")
    with pytest.raises(Rejected):
        stage.fail("judge-0", cause="ConnectionError: judge-1 is gone")
    stage.gone("judge-0")
    stage.gone("policy-0")
    assert stage.gone("judge-1") == ["finish 1: judge-1 failed: ValueError: the first one"]


def test_a_budget_recovers_by_one_in_each_hour_without_a_failure():
    worker = RoleSpec(name="worker", on_failure=OnFailure.INSTANCE, max_restarts=1)
    stage = Stage(worker, max_job_restarts=0)
    stage.begin()
    for incarnation in range(1, 6):
        assert stage.gone("worker-0", incarnation) == [f"create worker-0#{incarnation + 1}"]
        stage.tell(InstanceReady(id_of("worker-0", incarnation + 1)))
        stage.later(3601)
    stage.gone("worker-0", 6)
    stage.tell(InstanceReady(id_of("worker-0", 7)))
    stage.later(3599)
    assert stage.tell(InstanceFailed(id_of("worker-0", 7), "x")) == ["end worker-0#7"]
    assert stage.machine.state.roles["worker"].budget.used == 1, "not yet a whole hour: the role is next"


def test_what_does_not_end_in_its_time_is_killed():
    stage = Stage(RoleSpec(name="worker"), stop_grace=10.0)
    stage.begin()
    assert stage.tell(StopEnsemble("a person", 3)) == ["end worker-0"]
    assert stage.later(9) == []
    assert stage.later(2) == ["kill worker-0"]
    assert stage.gone("worker-0") == ["finish 3: a person"]


def test_a_job_without_room_ends_and_says_so():
    stage = Stage(placement_timeout=600.0)
    stage.tell(BeginEnsemble(stage.spec))
    assert stage.later(599) == []
    assert stage.later(2) == [f"finish {EXIT_NO_ROOM}: no room for all its instances within 600 s"]


@pytest.mark.parametrize("stop_at", ["INIT", "READY", "RUNNING", "STOPPING"])
def test_a_new_conductor_restarts_nothing_in_any_stage_and_asks_again_for_what_is_open(stop_at: str):
    stage = Stage()
    stage.tell(BeginEnsemble(stage.spec))
    stage.tell(ConductorTook(1))
    expected = {"INIT": ["place"], "READY": ["create policy-0#2"], "RUNNING": [], "STOPPING": []}[stop_at]
    if stop_at != "INIT":
        stage = Stage()
        stage.begin()
        stage.tell(ConductorTook(1))
        expected = expected or ["run policy-0", "run rollout-0", "run rollout-1"]
    if stop_at == "READY":
        stage.tell(RestartEnsemble("a person"))
        for name in ("rollout-0", "rollout-1", "policy-0"):
            stage.gone(name)
    if stop_at == "STOPPING":
        stage.tell(StopEnsemble("a person"))
        expected = ["end policy-0", "end rollout-0", "end rollout-1"]
    restarts = [each.num_restarts for _, each in stage.machine.instances()]
    assert stage.machine.stage == stop_at
    assert stage.tell(ConductorTook(2)) == []
    assert stage.machine.stage == stop_at
    assert [short(effect) for effect in stage.machine.open_effects()] == expected
    assert [each.num_restarts for _, each in stage.machine.instances()] == restarts
    with pytest.raises(Rejected, match="was replaced by conductor 2"):
        stage.tell(ConductorTook(2))


def test_a_report_of_a_former_life_changes_nothing():
    stage = Stage()
    stage.begin()
    stage.gone("rollout-0")
    before = stage.machine.digest()
    for command in (InstanceGone, InstanceReady, InstanceSucceeded):
        with pytest.raises(Rejected, match="came too late"):
            stage.tell(command(id_of("rollout-0")))
    with pytest.raises(Rejected, match="has no instance judge-0"):
        stage.gone("judge-0")
    assert stage.machine.digest() == before


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        ((), "Job job has no role"),
        ((RoleSpec(name="a"), RoleSpec(name="a")), "Role a is defined 2 times"),
        ((RoleSpec(name="a", needs=("b",)),), "Role a needs b, which is not defined. Roles are a"),
        ((RoleSpec(name="a", count=0),), "count must be between 1 and 10000 (got 0)"),
        ((RoleSpec(name="a b"),), "a name has letters, digits and underscores"),
        ((RoleSpec(name="a", is_driver=False),), "would never end"),
        (
            (RoleSpec(name="a", needs=("b",)), RoleSpec(name="b", needs=("c",)), RoleSpec(name="c", needs=("a",))),
            "in a circle: a -> b -> c -> a",
        ),
        ((RoleSpec(name="a", needs=("a",)),), "in a circle: a -> a"),
    ],
)
def test_a_description_that_makes_no_sense_is_said(roles: tuple[RoleSpec, ...], sentence: str):
    spec = EnsembleSpec(name="job", roles=roles)
    with pytest.raises(ConfigError) as error:
        check_spec(spec)
    assert sentence in str(error.value)
    with pytest.raises(Rejected):
        EnsembleMachine().apply(BeginEnsemble(spec), Micros(0))


def test_an_instance_that_fails_too_often_on_one_machine_waits_for_another():
    """Spec 11, §14. The others of its job go on meanwhile."""
    worker = RoleSpec(name="worker", count=2, on_failure=OnFailure.INSTANCE, max_restarts=9, max_failures_per_machine=1)
    stage = Stage(worker, max_machine_replacements=1)
    stage.begin()
    assert stage.gone("worker-0") == ["create worker-0#2"], "once is no reason"
    assert stage.gone("worker-0", 2) == ["replace the machine of worker-0#2"]
    assert stage.later(60) == [], "whatever its pause was"
    assert stage.gone("worker-1") == ["create worker-1#2"]
    assert short_all(stage.machine.open_effects()) == ["replace the machine of worker-0#2", "create worker-1#2"]
    with pytest.raises(Rejected, match="worker-1 does not wait for a machine"):
        stage.tell(MachineReplaced(id_of("worker-1", 2), is_replaced=True))
    assert stage.tell(MachineReplaced(id_of("worker-0", 2), is_replaced=False)) == ["create worker-0#3"]
    with pytest.raises(Rejected, match="does not wait"):
        stage.tell(MachineReplaced(id_of("worker-0", 2), is_replaced=False))

    # What was not replaced is not counted; the machine has its failures again.
    assert stage.tell(InstanceGone(id_of("worker-0", 3), "killed")) == []
    assert stage.later(60) == ["create worker-0#4"]
    assert stage.gone("worker-0", 4) == ["replace the machine of worker-0#4"]
    assert stage.later(60) == []
    assert stage.tell(MachineReplaced(id_of("worker-0", 4), is_replaced=True)) == ["create worker-0#5"]
    assert stage.machine.state.num_machine_replacements == 1

    # One machine was all that the job may have.
    assert stage.gone("worker-1", 2) == ["end worker-0#5"]
    assert stage.machine.state.reason.startswith(
        "worker-1 failed 2 times on one machine, and 1 machines were replaced before"
    )
    assert stage.gone("worker-0", 5)[-1].startswith("finish 1: worker-1 failed 2 times")


def short_all(effects: list[Effect]) -> list[str]:
    return [short(effect) for effect in effects]


def test_a_failure_counts_for_the_machine_of_the_instance_that_a_diagnosis_names():
    """Spec 11, §19, row 4. Without a diagnosis it counts for the instance that failed."""
    worker = RoleSpec(name="worker", count=2, on_failure=OnFailure.ROLE, max_failures_per_machine=0, max_restarts=0)
    stage = Stage(worker, max_job_restarts=1)
    stage.begin()
    stage.tell(InstanceBlamed(id_of("worker-1"), "its link loses packets"))
    assert stage.fail("worker-0") == ["replace the machine of worker-1", "end worker-0", "end worker-1"]
    assert stage.machine.status().verdict == (
        "worker-0 failed (ValueError: 1; the cause is worker-1: its link loses packets): the whole job restarts."
    )
    assert stage.gone("worker-0") + stage.gone("worker-1") == ["create worker-0#2"]
    with pytest.raises(Rejected, match="came too late"):
        stage.tell(InstanceBlamed(id_of("worker-0"), "of a former life"))
    assert stage.tell(MachineReplaced(id_of("worker-1"), is_replaced=True)) == ["create worker-1#2"]

    # What was said has been used up.
    for name in ("worker-0", "worker-1"):
        stage.tell(InstanceReady(id_of(name, 2)))
    assert stage.fail("worker-0", 2)[0] == "replace the machine of worker-0#2"
    assert stage.machine.state.reason == "worker-0 failed: ValueError: 1"
