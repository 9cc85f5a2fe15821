"""Acceptance scenarios of the historical interface (spec 11, §18) on a real cluster."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from dlrover.python.unified.api.builder import DLJobBuilder, RLJobBuilder
from dlrover.python.unified.common.enums import MasterStage
from dlrover.python.unified.controller.master import PrimeMaster

from dlrover.unified import attach
from dlrover.unified.api.config import new_config
from dlrover.unified.shell.process_group import CHECK_ROUNDS
from tests.ray.lab import RayLab, until
from tests.ray.unified.old_roles import SLOW

OLD = "tests.ray.unified.old_roles"


def elastic(folder: Path, entry: str = f"{OLD}.train") -> Any:
    return (
        DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").config({"folder": str(folder)})
        .train(entry).nnodes(2).nproc_per_node(2).resource(cpu=0.5).build()
    )  # fmt: skip


def ranks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ELASTIC-*"))


def test_a_role_in_actors_trains_survives_a_kill_and_restarts_by_hand(lab: RayLab, tmp_path: Path):
    """Scenarios 1, 2 and 4."""
    master = PrimeMaster.create(new_config(elastic(tmp_path).dl_config, "old", {}, {}))
    until(lambda: len(ranks(tmp_path)) == 4)
    assert (tmp_path / ranks(tmp_path)[1]).read_text() == "ELASTIC_4-1_2-1"
    os.kill(int(ranks(tmp_path)[0].rpartition("-")[2]), signal.SIGKILL)
    until(lambda: len(ranks(tmp_path)) == 8, lambda: str(attach("old").status()))
    assert master.get_status().job_restart_count == 0, "the role restarted, and not the job"
    until(lambda: master.get_status().stage is MasterStage.RUNNING)
    master.restart()
    until(lambda: len(ranks(tmp_path)) == 12, lambda: str(attach("old").status()))
    assert master.get_status().job_restart_count == 1
    (tmp_path / "stop").touch()
    assert master.wait() == 0
    lab.await_nothing_left(master.handle.job_uid)


def test_a_class_whose_workers_are_forked(lab: RayLab, tmp_path: Path):
    job = (
        DLJobBuilder().device_per_node(2).device_type("CPU").config({"folder": str(tmp_path)}).skip_node_check()
        .role("member").train(f"{OLD}.Forked").nnodes(1).nproc_per_node(2).resource(cpu=0.5).forked().build()
    )  # fmt: skip
    assert job.submit("forked") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"member-{rank} sum 2, below agent" for rank in (0, 1)]
    lab.await_nothing_left()


@pytest.mark.parametrize(("strategy", "limit", "num_tries"), [(0, 10, 1), (1, 1, 2)])
def test_an_entry_point_that_fails_ends_the_job(lab: RayLab, tmp_path: Path, strategy: int, limit: int, num_tries: int):
    """Scenario 1: at once, or after as many restarts of the job as it may have."""
    job = (
        DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
        .role("worker").run(f"{OLD}.fail").resource(cpu=0.1).build()
    )  # fmt: skip
    assert job.submit("failing", failover_exec_strategy=strategy, job_max_restart=limit) == 1
    assert (tmp_path / "tries").read_text() == num_tries * "x"
    lab.await_nothing_left()


def test_a_communication_check_that_fails_once_restarts_the_role(
    lab: RayLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Scenario 3; row 22 of section 19: it fails on one rank of two, and that one is named."""
    job = (
        DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
        .role("broken").train(f"{OLD}.checked").nnodes(1).nproc_per_node(2).resource(cpu=0.5).build()
    )  # fmt: skip
    assert job.submit("checked", blocking=False).handle.wait(240, show=True) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checked-0-2", "checked-1-2"]
    said = capsys.readouterr().err
    assert "broken-1 failed (JobError: The communication check failed: a cable is out): role broken restarts." in said
    lab.await_nothing_left()


def test_a_communication_check_names_slow_ranks_with_their_seconds(
    lab: RayLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Row 22 of section 19: each rank of three is timed by itself, an odd number is no trouble, and a slow one may train."""
    job = (
        DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
        .role("slow").train(f"{OLD}.checked").nnodes(1).nproc_per_node(3).resource(cpu=0.5).build()
    )  # fmt: skip
    assert job.submit("slow", blocking=False).handle.wait(240, show=True) == 0
    found = re.search(
        r"slow in the communication check: rank 2 took ([\d.]+) s; the median is ([\d.]+) s", capsys.readouterr().out
    )
    assert found is not None
    slow, median = map(float, found.groups())
    assert slow >= CHECK_ROUNDS * SLOW > median
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checked-{rank}-1" for rank in range(3)]
    lab.await_nothing_left()


def test_a_job_of_reinforcement_learning_as_of_old(lab: RayLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Scenario 10, queues, proxies, questions to the controller, and a submission that does not wait."""
    job = (
        RLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").config({"folder": str(tmp_path)})
        .global_env({"DLROVER_EVENT_FILE_DIR": str(tmp_path / "events")})
        .trainer(f"{OLD}.Trainer").resource(cpu=0.5)
        .actor(f"{OLD}.Actor").total(1).resource(cpu=0.5)
        .rollout(f"{OLD}.Rollout").total(2).resource(cpu=0.5)
        .build()
    )  # fmt: skip
    code = job.submit("rl", blocking=False)
    assert code == 0
    assert code.handle.wait(120, show=True) == 0, code.handle.report
    assert code.wait() == 0
    said = capsys.readouterr().err
    assert "A diagnosis names ROLLOUT-1 as a cause: 7: its device is hot" in said
    assert "ROLLOUT-0 as a cause" not in said
    assert (tmp_path / "trainer").read_text() == "done"
    lab.await_nothing_left(code.handle.job_uid)

    # Tools of the original follow the job by its events.
    events = "".join(path.read_text() for path in (tmp_path / "events").glob("events_[0-9]*_*.log"))
    for target, names in {
        "DLROVER_Controller": "inited creating_placement_group stage_changed stop_requested stopping",
        "DLROVER_worker": "import_user_entrypoint instantiate_user_class running",
        "DLROVER_elastic_worker": "init_process_group comm_check",
    }.items():
        assert [name for name in names.split() if f"[{target}] [#{name}]" not in events] == []
