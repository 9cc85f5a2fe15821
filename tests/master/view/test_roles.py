"""What the page of an elastic role knows of the other roles: the newest report of the conductor, and whether that still reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.master.view.gatherer import Gatherer
from dlrover.master.view.roles import STALE, gather_roles
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.roles import RoleLine, RolesReport
from tests.master.web.page_lab import StandInJob

REPORT = RolesReport(
    job="grpo",
    stage="RUNNING",
    num_job_restarts=0,
    verdict="rollout-1 failed (its process died): it restarts alone.",
    own_role="policy",
    roles=(
        RoleLine(name="policy", kind="elastic", num_wanted=1, num_ready=1, states="1 running", num_restarts=0),
        RoleLine(
            name="rollout",
            kind="simple",
            num_wanted=2,
            num_ready=1,
            states="1 running, 1 starting",
            num_restarts=1,
            failure="rollout-1: its process died",
            failed_at=Micros(5),
        ),
    ),
)


async def test_the_page_follows_the_report_and_says_when_it_is_old(tmp_path: Path):
    path = tmp_path / "roles.json"
    now = 0.0
    gatherer = Gatherer(StandInJob())
    gatherer.sources.append(gather_roles(str(path), clock=lambda: now))

    async def shown() -> dict[str, object]:
        await gatherer.look()
        return gatherer.board.section("roles")

    assert await shown() == {}, "a job without roles"
    path.write_bytes(msgspec.json.encode(REPORT))
    written_at = path.stat().st_mtime
    now = written_at + STALE - 1
    assert await shown() == {"": {**msgspec.to_builtins(REPORT), "is_stale": False}}
    version = gatherer.board.version
    await gatherer.look()
    assert "roles" not in gatherer.board.delta(version).sections, "what is the same is not told again"
    now = written_at + STALE + 1
    assert await shown() == {"": {**msgspec.to_builtins(REPORT), "is_stale": True}}

    path.write_bytes(b"half of")
    assert await shown() == {"": {**msgspec.to_builtins(REPORT), "is_stale": True}}, "the page stays as it was"
