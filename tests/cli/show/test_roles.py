"""Roles of a multi-role job in the terminal: printed once, or followed until the job is over, also while its conductor is away."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dlrover.cli.connection import SeveralRoles
from dlrover.cli.show.roles import MAX_FAILURES, watch_roles
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.roles import RoleLine, RolesReport


def report(stage: str) -> RolesReport:
    failure = {"failure": "rollout-1: killed", "failed_at": Micros(1)}
    roles = (
        RoleLine(name="policy", kind="elastic", num_wanted=1, num_ready=1, states="1 running", num_restarts=0),
        RoleLine(
            name="rollout", kind="simple", num_wanted=2, num_ready=1, states="1 running", num_restarts=3, **failure
        ),
    )
    return RolesReport(job="grpo", stage=stage, num_job_restarts=1, verdict="rollout-1 restarts alone.", roles=roles)


class Conductor:
    """Gives one report after the other, and is away in between: None."""

    def __init__(self, *reports: RolesReport | None) -> None:
        self.reports = list(reports)
        self.known: list[RolesReport | None] = []

    def ask(self, known: RolesReport | None) -> RolesReport:
        self.known.append(known)
        found = self.reports.pop(0) if self.reports else None
        if found is None:
            raise Unavailable("it does not answer")
        return found

    def is_over(self) -> bool:
        return not self.reports


def shown(conductor: Conductor, *, once: bool = False, is_terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=is_terminal)
    watch_roles(conductor.ask, console, once=once, is_over=conductor.is_over, pause=lambda seconds: None)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_roles_are_printed_once(is_terminal: bool):
    text = shown(Conductor(report("RUNNING")), once=True, is_terminal=is_terminal)
    assert "grpo: RUNNING, 1 restart of the whole job. rollout-1 restarts alone." in text
    [line] = [line for line in text.splitlines() if line.startswith("rollout ")]
    assert line.split()[:8] == ["rollout", "simple", "1", "of", "2", "1", "running", "3"]
    assert line.rstrip().endswith("rollout-1: killed")


def test_the_roles_are_followed_until_the_job_is_over_also_while_its_conductor_is_away():
    conductor = Conductor(report("READY"), None, report("RUNNING"), None, report("STOPPING"))
    text = shown(conductor)
    assert [each and each.stage for each in conductor.known] == [None, *2 * ["READY"], *2 * ["RUNNING"], "STOPPING"]
    places = [text.index(word) for word in ("READY", "it does not answer", "RUNNING", "STOPPING")]
    assert places == sorted(places)
    assert "grpo: STOPPING" in text.splitlines()[-4], "the newest one stays on the screen"


def test_a_conductor_that_stays_away_is_an_error():
    conductor = Conductor(report("RUNNING"), *(MAX_FAILURES + 1) * [None], report("RUNNING"))
    with pytest.raises(Unavailable):
        shown(conductor)


def test_who_asks_for_a_master_learns_which_roles_have_one():
    assert str(SeveralRoles("grpo", ["grpo.policy"])) == (
        "Job grpo has several roles, and no master of its own. Name one with a master: grpo.policy. `dlrover top grpo --ray …` and "
        "`dlrover ray status grpo` show all roles."
    )
    assert "Name one" not in str(SeveralRoles("grpo", []))
