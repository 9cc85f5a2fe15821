"""The historical builder and its configuration: what is accepted, what is refused, and what it becomes."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import pytest

pytest.importorskip("omegaconf", reason="the extra `ray` is not installed: use `make test-ray`")

from dlrover.python.unified.api.builder import DLJobBuilder, RLJobBuilder
from dlrover.python.unified.common.config import DLConfig, JobConfig
from dlrover.python.unified.common.workload_desc import NodeGroupFailoverDesc, ResourceDesc, SimpleWorkloadDesc
from dlrover.python.unified.driver.main import main

from dlrover.unified.api.config import new_config
from dlrover.unified.api.translate import NO_SET_VARIABLES, ensemble_of
from dlrover.unified.core.spec import OnFailure
from dlrover.unified.plan import RoleKind

ENTRY = "tests.unified.api.test_builder.Entry"


class Entry:
    def run(self) -> None:
        """It is only looked up here."""


def builder() -> DLJobBuilder:
    return DLJobBuilder().node_num(2).device_per_node(4).device_type("CPU")


def rl() -> RLJobBuilder:
    return RLJobBuilder().node_num(3).device_per_node(4).device_type("CPU")


def job_config(job: Any, **more: Any) -> JobConfig:
    return new_config(job.dl_config, "name", more, {})


def test_a_chain_without_end_builds_a_job():
    job = (
        builder()
        .global_env({"A": "1"})
        .role("policy").train(ENTRY).nnodes(2).nproc_per_node(2).env({"B": "2"}).not_driver()
        .role("judge").run(ENTRY).total(2).resource(cpu=4, mem=512)
        .build()
    )  # fmt: skip
    assert (job.node_num, job.device_type, job.env) == (2, "CPU", {"A": "1"})
    policy, judge = job.get_workload("policy"), job.workloads["judge"]
    assert (policy.total, policy.per_group, policy.backend, policy.is_driver) == (4, 2, "elastic", False)
    assert (policy.resource.accelerator, judge.resource.cpu, judge.resource.memory) == (1, 4, 512)
    again = DLConfig.model_validate_json(job.model_dump_json())
    assert again == job.dl_config


@pytest.mark.parametrize("entry", ["x.y", "x::y", "x.py a", "./x.py", "/p/x.py"])
def test_entry_points_that_are_accepted(entry: str):
    assert SimpleWorkloadDesc(entry_point=entry).entry_point == entry.replace("::", ".")


@pytest.mark.parametrize("entry", ["main", "a b", "1.x", "x.", " "])
def test_entry_points_that_are_refused(entry: str):
    with pytest.raises(ValueError, match="dotted name"):
        SimpleWorkloadDesc(entry_point=entry)


@pytest.mark.parametrize(("num_roles", "share"), [(2, 0.5), (3, 0.33)])
def test_collocated_roles_share_an_accelerator_and_a_group(num_roles: int, share: float):
    chain: Any = builder().device_type("GPU")
    names = ["a", "B", "c"][:num_roles]
    for name in names:
        chain = chain.role(name).run(ENTRY).resource(cpu=1, gpu=1)
    job = chain.with_collocation(*names).build()
    assert {(w.resource.accelerator, w.group, w.resource.cpu) for w in job.workloads.values()} == {
        (share, "collocation_0", 1)
    }
    plan = ensemble_of(job_config(job)).build("uid")
    assert len(plan.layout.bundles) == 1
    assert plan.layout.bundles[0]["CPU"] == num_roles


def test_a_role_in_two_collocations_or_an_unknown_one_is_refused():
    chain = builder().role("a").run(ENTRY).role("b").run(ENTRY)
    with pytest.raises(ValueError, match="more than one collocation"):
        chain.with_collocation("a", "b").with_collocation("a").build()
    with pytest.raises(ValueError, match="ghost, which is not defined"):
        builder().role("a").run(ENTRY).with_collocation("a", "ghost").build()


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: builder().build(), "workloads"),
        (lambda: builder().run(ENTRY), "No role has a name yet"),
        (lambda: builder().role("a").run(ENTRY).role("a").run(ENTRY), "defined twice"),
        (lambda: builder().role("a").run(ENTRY).total(3).per_group(2).build(), "multiple of per_group"),
        (lambda: builder().role("a").run(ENTRY).resource(memory=5).build(), "Memory alone"),
        (lambda: builder().role("a").run(ENTRY).total(9).build(), "9 accelerators in all"),
        (lambda: builder().role("a").run(ENTRY).total(5).per_group(5).build(), "5 accelerators on one node"),
        (lambda: builder().node_num(0).role("a").run(ENTRY).build(), "node_number"),
        (lambda: rl().trainer(ENTRY).build(), "needs the role ACTOR"),
        (lambda: rl().actor(ENTRY).role("OTHER").run(ENTRY).build(), "OTHER is unknown"),
        (lambda: rl().actor(ENTRY).as_data_stream().build(), "task streams"),
        (lambda: builder().role("a").run(ENTRY).forked(), r"Role a: forked\(\) applies only to roles of train"),
        (lambda: builder().role("a").run(ENTRY).in_actor(), r"in_actor\(\) applies only to roles of train"),
        (lambda: builder().role("a").train("x.py").in_actor().build(), "Actors cannot run the script x.py"),
        (lambda: builder().by_dlrover_run_cmd("python x.py"), "must begin with dlrover-run"),
        (lambda: builder().by_dlrover_run_cmd("torchrun --nnodes=a x.py"), "whole numbers"),
    ],
)
def test_mistakes_are_told_when_the_job_is_built(build: Any, why: str):
    with pytest.raises(ValueError, match=why):
        build()


@pytest.mark.parametrize(("timeout", "is_taken"), [(29, False), (30, True), (59, True)])
def test_the_timeout_of_a_group_of_nodes_has_one_limit(timeout: int, is_taken: bool):
    """Spec 11, §19, row 15: what the builder takes, the description takes, too."""
    job = builder().role("a").run(ENTRY).enable_node_group_failover("rack", timeout).build()
    found = job.workloads["a"].node_group_failover
    assert (found.enabled, found.timeout) == ((True, timeout) if is_taken else (False, 300))
    plan = ensemble_of(job_config(job, node_max_restart=4)).build("uid")
    rule = plan.roles["a"].machine_group
    assert (rule.label, rule.timeout) == (("rack", timeout) if is_taken else ("", 300))
    assert plan.spec.role("a").max_failures_per_machine == 3
    assert plan.spec.max_machine_replacements == 4
    if not is_taken:
        with pytest.raises(ValueError, match="greater than or equal to 30"):
            NodeGroupFailoverDesc(timeout=timeout)


@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_a_failure_is_handled_when_it_happens_whatever_the_trigger_strategy(
    strategy: int, caplog: pytest.LogCaptureFixture
):
    """Spec 11, §19, row 16: also the failure of a role that is no driver. A setting without effect is told."""
    job = builder().role("a").run(ENTRY).role("b").run(ENTRY).not_driver().build()
    ensemble = ensemble_of(job_config(job, failover_trigger_strategy=strategy, failover_exec_strategy=2))
    assert {role.name: (role.is_driver, role.on_failure) for role in ensemble.roles} == {
        "a": (True, OnFailure.ROLE),
        "b": (False, OnFailure.ROLE),
    }
    assert ("is treated as 2" in caplog.text) is (strategy < 2)


def test_roles_of_reinforcement_learning_have_their_defaults():
    job = rl().trainer(ENTRY).actor(ENTRY).rollout(ENTRY).reward(ENTRY).with_collocation_all().build()
    trainer = job.workloads["TRAINER"]
    assert (trainer.total, trainer.resource.cpu, trainer.resource.memory, trainer.is_driver) == (1, 4, 8192, True)
    assert trainer.group is None
    assert {w.group for name, w in job.workloads.items() if name != "TRAINER"} == {"collocation_0"}
    assert [w.is_driver for name, w in job.workloads.items() if name != "TRAINER"] == [False] * 3
    assert (job.workloads["ACTOR"].backend, job.workloads["REWARD"].backend) == ("elastic", "simple")


@pytest.mark.parametrize(
    ("command", "total", "nproc"),
    [
        ("dlrover-run --nnodes=2 --nproc-per-node=2 train.py --lr 1", 4, 2),
        ("torchrun --nnodes 1:2 --nproc_per_node 3 train.py", 6, 3),
    ],
)
def test_a_command_line_becomes_an_elastic_role(command: str, total: int, nproc: int):
    job = DLJobBuilder().by_dlrover_run_cmd(command).build()
    desc = job.workloads["ELASTIC"]
    assert (desc.total, desc.per_group, desc.entry_point.split()[0]) == (total, nproc, "train.py")
    assert job.device_type == "GPU"
    assert desc.comm_pre_check is command.startswith("torchrun")


def test_the_name_of_an_argument_goes_before_the_environment_and_that_before_a_generated_one():
    dl = builder().role("a").run(ENTRY).build().dl_config
    environ = {"DLROVER_UNIFIED_JOB_NAME": "env", "DLROVER_UNIFIED_MASTER_CPU": "7"}
    assert new_config(dl, "given", {}, environ).job_name == "given"
    assert new_config(dl, None, {}, environ).job_name == "env"
    assert new_config(dl, None, {}, {}).job_name.startswith("dlrover-")
    assert new_config(dl, None, {"master_cpu": 3}, environ).master_cpu == 3
    assert new_config(dl, None, {}, environ).master_cpu == 7
    with pytest.raises(ValueError, match="Extra inputs"):
        new_config(dl, None, {"mistake": 3}, {})


def test_memory_is_in_megabytes_and_an_isolation_resource_changes_no_description():
    job = builder().role("a").run(ENTRY).total(2).resource(cpu=1, memory=512).build()
    config = job_config(job, worker_isolation_schedule_resource="box", failover_exec_strategy=2)
    plan = ensemble_of(config).build("uid")
    assert plan.layout.demands["a"] == {"CPU": 1.0, "memory": 512 * 2**20, "box": 1.0}
    assert job.workloads["a"].resource.user_defined == {}
    assert plan.spec.role("a").on_failure is OnFailure.ROLE


def test_a_class_trains_in_actors_and_a_script_in_forked_workers():
    job = (
        builder()
        .role("classes").train(ENTRY).nnodes(1).nproc_per_node(2)
        .role("script").train(f"{os.path.abspath(__file__)} --lr 1").nnodes(2).nproc_per_node(2)
        .no_setup_process_group().build()
    )  # fmt: skip
    plan = ensemble_of(job_config(job)).build("uid")
    assert (plan.roles["classes"].kind, plan.spec.role("classes").count) == (RoleKind.SIMPLE, 2)
    assert plan.roles["classes"].process_group is not None
    assert not plan.roles["classes"].process_group.is_set_up
    assert (plan.roles["script"].kind, plan.roles["script"].num_ranks) == (RoleKind.ELASTIC, 4)
    assert plan.spec.role("script").on_failure is OnFailure.SELF


def test_a_switch_says_where_the_workers_of_a_class_live(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    job = (
        builder()
        .role("forked").train(ENTRY).nnodes(2).nproc_per_node(2).forked()
        .role("actors").train(ENTRY).nnodes(1).nproc_per_node(2).in_actor()
        .build()
    )  # fmt: skip
    assert DLConfig.model_validate_json(job.model_dump_json()) == job.dl_config
    plan = ensemble_of(job_config(job)).build("uid")
    forked, actors = plan.roles["forked"], plan.roles["actors"]
    assert (forked.kind, forked.num_ranks, forked.takes_calls) == (RoleKind.ELASTIC, 4, True)
    assert plan.spec.role("forked").on_failure is OnFailure.SELF
    assert (actors.kind, actors.process_group is not None) == (RoleKind.SIMPLE, True)
    assert ".forked()" not in caplog.text, "who has chosen is not told of the choice"
    job.workloads["actors"].home = None
    ensemble_of(job_config(job))
    assert "Role actors runs in actors" in caplog.text
    assert "call .forked() on the role" in caplog.text


def test_configurations_of_many_kinds_are_taken_and_written_back():
    pytest.importorskip("omegaconf")
    for given in ({"lr": 1, "twice": "${lr}"}, argparse.Namespace(lr=1, twice="${lr}")):
        config = DLConfig(user_config=given, workloads={"a": SimpleWorkloadDesc(entry_point="a.b", res={"cpu": 1})})
        assert json.loads(config.model_dump_json())["user_config"] == {"lr": 1, "twice": 1}
    assert DLConfig(user_config=None, workloads=config.workloads).user_config == {}


def test_old_names_of_fields_are_taken():
    resource = ResourceDesc.model_validate({"cpu": 1, "mem": 2, "gpu": 3, "ud_resource": {"x": 1}})
    assert (resource.memory, resource.accelerator, resource.user_defined) == (2, 3, {"x": 1})
    desc = SimpleWorkloadDesc.model_validate({"num": 4, "res": {"cpu": 1}, "env": {"A": "1"}, "entrypoint": "a.b"})
    assert (desc.total, desc.envs, desc.entry_point) == (4, {"A": "1"}, "a.b")


@pytest.mark.parametrize("device_type", ["GPU", "CPU"])
def test_devices_are_chosen_by_rank_where_instances_share_them(device_type: str, caplog: pytest.LogCaptureFixture):
    """Ray sets no visible devices then, also if two roles have half of each. Without it Ray may give one device to two of them."""
    chain: Any = builder().device_per_node(8).device_type(device_type)
    for name in ("a", "b"):
        chain = chain.role(name).train(ENTRY).nnodes(2).nproc_per_node(8).resource(accelerator=0.5)
    job = chain.build()
    ensemble_of(job_config(job))
    assert ("may give one GPU to two of them" in caplog.text) is (device_type == "GPU")
    job.workloads["a"].rank_based_gpu_selection = True
    plan = ensemble_of(job_config(job)).build("uid")
    is_gpu = device_type == "GPU"
    assert [plan.roles[name].is_device_by_rank for name in ("a", "b")] == [is_gpu, False]
    assert (plan.roles["a"].environ == dict.fromkeys(NO_SET_VARIABLES, "true")) is is_gpu
    assert plan.roles["b"].environ == {}


def test_ray_can_be_kept_from_setting_visible_devices():
    job = builder().role("a").run(ENTRY).disable_ray_auto_visible_device().env({"X": "1"}).build()
    assert job.workloads["a"].envs == {**dict.fromkeys(NO_SET_VARIABLES, "true"), "X": "1"}
    assert len(NO_SET_VARIABLES) == 7


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "Give one argument: the JobConfig of the job as JSON"),
        (["{}", "{}"], "Give one argument"),
        (["{"], "Invalid JSON"),
        (['{"job_name": "x"}'], "dl_config"),
    ],
)
def test_the_driver_as_a_program_takes_one_configuration(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert why in capsys.readouterr().err


def test_a_configuration_travels_as_json():
    config = job_config(builder().config({"lr": 1}).role("a").run(ENTRY).build(), job_max_restart=4)
    again = JobConfig.model_validate_json(config.model_dump_json())
    assert ensemble_of(again).build("uid").spec == ensemble_of(config).build("uid").spec
    assert (again.job_max_restart, again.dl_config) == (4, config.dl_config)
