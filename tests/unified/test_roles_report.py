"""What people are told of the roles of a job: how many instances are wanted and ready, their restarts, and the newest failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.roles import REPORT, RoleLine, RolesReport
from dlrover.unified import Ensemble, Role
from dlrover.unified.core.messages import InstanceId, InstanceReady, InstanceSucceeded
from dlrover.unified.plan import EnsemblePlan, RoleKind, RolePlan
from dlrover.unified.shell.elastic_role import ElasticRole
from dlrover.unified.shell.roles_report import roles_report
from tests.unified.core.test_machine import Stage, id_of
from tests.unified.fake_ray import RayActorError, fake_ray


def lines(stage: Stage) -> dict[str, RoleLine]:
    kinds = {"policy": RoleKind.ELASTIC, "rollout": RoleKind.SIMPLE}
    roles = {name: RolePlan(kind=kind) for name, kind in kinds.items()}
    plan = EnsemblePlan(job_uid="uid", spec=stage.spec, roles=roles, layout=Ensemble("job", roles=[]).layout())
    report = roles_report(stage.machine.status(), plan)
    assert report.job == "job"
    assert report.verdict == stage.machine.status().verdict
    return {role.name: role for role in report.roles}


def test_each_role_tells_what_it_wants_what_it_has_and_its_newest_failure():
    stage = Stage()
    stage.begin()
    assert lines(stage) == {
        "policy": RoleLine(
            name="policy", kind="elastic", num_wanted=1, num_ready=1, states="1 running", num_restarts=0
        ),
        "rollout": RoleLine(
            name="rollout", kind="simple", num_wanted=2, num_ready=2, states="2 running", num_restarts=0
        ),
    }
    stage.seconds = 7.0
    stage.fail("rollout-1", cause="ValueError: 1")
    stage.seconds = 9.0
    stage.fail("rollout-0", cause="KeyError: 2")
    stage.gone("rollout-0")
    rollout = lines(stage)["rollout"]
    assert (rollout.num_wanted, rollout.num_ready, rollout.num_restarts) == (2, 0, 2)
    assert rollout.states == "1 starting, 1 ending"
    assert (rollout.failure, rollout.failed_at) == ("rollout-0: KeyError: 2", Micros(micros(9.0)))
    assert lines(stage)["policy"].failure == ""

    # What it recovers from stays told, and what ended well counts as ready.
    stage.tell(InstanceReady(id_of("rollout-0", 2)))
    stage.tell(InstanceSucceeded(id_of("rollout-0", 2)))
    rollout = lines(stage)["rollout"]
    assert (rollout.num_ready, rollout.failure) == (1, "rollout-0: KeyError: 2")


class Host:
    """Stands where the host of an elastic role is."""

    def __init__(self, told: list[bytes]) -> None:
        self.told = told

    async def show_roles(self, report: bytes) -> None:
        if self.told:
            raise OSError("its disk is full")
        self.told.append(report)


async def test_the_report_reaches_the_host_of_a_role_and_a_host_that_is_away_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.py").write_text("print()")
    plan = Ensemble("job", roles=[Role.elastic("policy", f"{tmp_path}/train.py")]).build("uid")
    report = RolesReport(job="job", stage="RUNNING", num_job_restarts=0, verdict="", roles=())
    told: list[bytes] = []
    with fake_ray(monkeypatch) as ray:
        nothing: Any = lambda *args: None  # noqa: E731
        role = ElasticRole(plan, InstanceId("policy", 0, 1), on_line=nothing, say=nothing)
        await role.show_roles(report)  # it is not there yet
        host = ray.remote(Host).options(namespace=role.namespace, name="host").remote(told)
        await role.show_roles(report)
        assert [REPORT.decode(each) for each in told] == [msgspec.structs.replace(report, own_role="policy")]
        await role.show_roles(report)  # it fails
        ray.kill(host)
        ray.actors[host.key] = host  # dead, and Ray does not know yet
        await role.show_roles(report)
        with pytest.raises(RayActorError):
            await host.show_roles.remote(b"")
        assert len(told) == 1
