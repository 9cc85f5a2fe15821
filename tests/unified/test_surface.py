"""What is checked when a multi-role job is built: entry points, needs, layout."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import dlrover.unified
from dlrover.protocol.errors import ConfigError
from dlrover.unified import Ensemble, Role
from dlrover.unified.core.spec import OnFailure
from dlrover.unified.layout import RoleSize, Spread, check_room, lay_out
from dlrover.unified.plan import PLAN, ProcessGroup, RoleKind, pack

ENTRY = "tests.unified.test_surface.Thing"


class Thing:
    def run(self) -> None:
        """It is only looked up here."""


def simple(name: str, **more: Any) -> Role:
    return Role.simple(name, more.pop("entry", ENTRY), **{"driver": True, **more})


def test_a_job_becomes_a_plan_that_survives_its_encoding(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("print()")
    job = Ensemble(
        "job",
        roles=[
            Role.elastic("policy", f"{script} --lr 1", nodes=(1, 2), nproc=2, cpus=2, memory_mb=10),
            simple("rollout", count=2, per_group=2, needs=["policy"]),
            Role.stream("samples", batch=4),
        ],
        config={"lr": 1},
    )
    plan = job.build("uid")
    assert PLAN.decode(pack(plan)) == plan
    assert {name: (role.kind, role.num_ranks) for name, role in plan.roles.items()} == {
        "policy": (RoleKind.ELASTIC, 4),
        "rollout": (RoleKind.SIMPLE, 2),
        "samples": (RoleKind.STREAM, 1),
    }
    assert plan.layout.bundles == ({"CPU": 2.0, "memory": 10.0 * 2**20}, {"CPU": 2.0})
    assert plan.layout.places == {"policy": (0,), "rollout": (1, 1)}
    assert plan.roles["policy"].job is not None
    assert plan.roles["policy"].job.job_name == "job.policy"


def test_the_environment_of_the_driver_is_no_part_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Spec 11, §19, row 23. What is kept of a node has no environment either."""
    monkeypatch.setenv("SOME_PASSWORD", "verysecretvalue")
    (tmp_path / "train.py").write_text("print()")
    job = Ensemble("job", roles=[Role.elastic("policy", f"{tmp_path}/train.py"), simple("rollout")], env={"A": "mine"})
    kept = pack(job.build("uid"))
    assert b"mine" in kept
    assert b"verysecretvalue" not in kept
    assert b"SOME_PASSWORD" not in kept


def test_no_default_is_the_time_of_an_import():
    """Spec 11, §19, row 25: a default that asks a clock, or for chance, would be the same for all that is made later."""
    found = []
    for path in sorted(Path(dlrover.unified.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            defaults: list[ast.expr | None] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                defaults = [*node.args.defaults, *node.args.kw_defaults]
            elif isinstance(node, ast.ClassDef):
                defaults = [each.value for each in node.body if isinstance(each, ast.AnnAssign | ast.Assign)]
            calls = [call for each in defaults if each is not None for call in ast.walk(each)]
            words = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
            found += [f"{path}: {word}" for word in words if word.startswith(("time.", "datetime.", "os.", "uuid."))]
    assert found == []


@pytest.mark.parametrize(
    ("entry", "declared", "takes_calls"),
    [("train.py", None, False), ("train.py", True, True), (ENTRY, None, True), (ENTRY, False, False)],
)
def test_calls_to_a_script_are_declared(tmp_path: Path, entry: str, declared: bool | None, takes_calls: bool):
    (tmp_path / "train.py").write_text("print()")
    role = Role.elastic("policy", entry.replace("train.py", str(tmp_path / "train.py")), takes_calls=declared)
    plan = Ensemble("job", roles=[role, simple("rollout")]).build("uid")
    assert plan.silent_roles() == (() if takes_calls else ("policy",))


def test_the_ranks_of_an_elastic_role_are_forked_or_actors():
    elastic = Role.elastic("policy", ENTRY, nodes=2, nproc=2, cpus=3, gpus=4, memory_mb=10, takes_calls=False)
    forked = Ensemble("job", roles=[elastic]).build("uid")
    again = Ensemble("job", roles=[elastic.in_actor().forked()]).build("uid")
    assert (again.spec, again.layout) == (forked.spec, forked.layout)
    assert again.roles["policy"].kind is forked.roles["policy"].kind is RoleKind.ELASTIC

    plan = Ensemble("job", roles=[elastic.in_actor()]).build("uid")
    role, spec = plan.roles["policy"], plan.spec.role("policy")
    assert (role.kind, role.num_ranks, role.local_world_size, spec.count) == (RoleKind.SIMPLE, 4, 2, 4)
    assert (spec.on_failure, spec.is_driver, role.process_group) == (OnFailure.ROLE, True, ProcessGroup())
    assert plan.layout.demands["policy"] == {"CPU": 1.5, "GPU": 2.0, "memory": 5.0 * 2**20}
    assert plan.layout.bundles == forked.layout.bundles, "a machine has room for the same ranks"
    assert plan.layout.places["policy"] == (0, 0, 1, 1)
    assert plan.silent_roles() == ("policy",)


@pytest.mark.parametrize(
    ("role", "why"),
    [
        (simple("a").in_actor(), r"in_actor\(\) applies only to roles of Role.elastic, but this is a simple role"),
        (simple("a").forked(), r"forked\(\) applies only to roles of Role.elastic, but this is a simple role"),
        (Role.stream("a", batch=1).in_actor(), "this is a stream role"),
        (Role.elastic("a", "train.py").in_actor(), "actors cannot run a script"),
        (Role.elastic("a", ENTRY, nodes=(1, 2)).in_actor(), r"the number of nodes cannot change.*got 1 to 2"),
        (Role.elastic("a", ENTRY, standby=1).in_actor(), "cannot have standby nodes"),
        (Role.elastic("a", ENTRY, options=["--max-restarts=1"]).in_actor(), "have no effect .got --max-restarts=1"),
        (Role.elastic("a", ENTRY, on_failure="instance").in_actor(), "so they must restart together"),
        (Role.elastic("a", ENTRY, nproc=2, gpus=3).in_actor(), "each of the 2 ranks of a node gets 1.5 GPUs"),
        (Role.elastic("a", ENTRY, nproc=3, gpus=2).in_actor(), "3 ranks do not fit on 2 GPUs of a node"),
        (Role.elastic("a", ENTRY, nproc=0).in_actor(), "nproc must be at least 1"),
    ],
)
def test_a_home_that_ranks_cannot_have_is_refused_when_the_job_is_built(role: Role, why: str):
    with pytest.raises(ConfigError, match=why):
        Ensemble("job", roles=[role, simple("driver")]).build()


def test_roles_that_are_together_share_their_bundles():
    layout = Ensemble(
        "job",
        roles=[simple("a", count=2), simple("b", count=4, per_group=2, cpus=0.5), simple("c")],
        together=[["a", "b"]],
    ).layout()
    assert layout.bundles == ({"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0})
    assert layout.places == {"a": (0, 1), "b": (0, 0, 1, 1), "c": (2,)}
    assert layout.members[0] == "a-0, b-0 and b-1"


@pytest.mark.parametrize(
    ("roles", "more", "why"),
    [
        ([], {}, "has no role"),
        ([simple("a", needs=["b"]), simple("b", needs=["a"])], {}, "in a circle: a -> b -> a"),
        ([simple("a", needs=["x"])], {}, "needs x, which is not defined"),
        ([simple("a"), simple("a")], {}, "defined 2 times"),
        ([simple("a", entry="main")], {}, "give a dotted name"),
        ([simple("a", entry="no.such.Thing")], {}, "module no.such of the entry point no.such.Thing cannot be found"),
        ([simple("a", entry=f"{__name__}.Absent")], {}, "but .* does not define it"),
        ([simple("a", entry="absent.py --x")], {}, "absent.py does not exist"),
        ([simple("a", count=3, per_group=2)], {}, "cannot be divided into groups of 2"),
        ([simple("a", driver=False)], {}, "is a driver, so it would never end"),
        (
            [simple("a"), simple("b", count=2)],
            {"together": [["a", "b"]]},
            "the same number of groups: a has 1, b has 2",
        ),
        ([simple("a")], {"together": [["a", "z"]]}, "z, which is not defined"),
        ([simple("a"), simple("b")], {"together": [["a"], ["a", "b"]]}, r"names the role .* twice"),
        ([simple("a")], {"spread": "WIDE"}, "spread 'WIDE'"),
        ([simple("a")], {"working_dir": "/no/such/dir"}, "no such directory"),
    ],
)
def test_mistakes_are_told_in_a_sentence(roles: list[Role], more: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        Ensemble("job", roles=roles, **more).build()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: simple("a", on_failure="never"), "on_failure 'never'"),
        (lambda: simple("a", cpus=-1), "CPU must be 0 or more"),
        (lambda: Role.elastic("a", "x.py", nodes=(3, 2)), "min <= max"),
        (lambda: Role.stream("a", batch=0), "batch must be at least 1"),
    ],
)
def test_mistakes_of_one_role_are_told_at_once(make: Any, why: str):
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_layout_that_cannot_be_placed_names_what_is_too_large():
    machines = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}]
    check_room(lay_out([RoleSize(name="a", count=3, demand={"CPU": 2.0})], []), machines)
    layout = lay_out([RoleSize(name="b", count=2, demand={"CPU": 5.0})], [])
    with pytest.raises(ConfigError, match="large enough for b-0: it asks for 5 CPU"):
        check_room(layout, machines)
    with pytest.raises(ConfigError, match="asks for 8 CPU in all, but this cluster has only 6 CPU"):
        check_room(lay_out([RoleSize(name="a", count=4, demand={"CPU": 2.0})], []), machines)
    with pytest.raises(ConfigError, match="STRICT_SPREAD needs one machine for each of 3 groups"):
        check_room(
            lay_out([RoleSize(name="a", count=3, demand={"CPU": 1.0})], [], spread=Spread.STRICT_SPREAD), machines
        )
