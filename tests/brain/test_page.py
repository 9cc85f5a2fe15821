"""The HTTP door: health, figures, read-only JSON and the historical forms."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

from dlrover.brain.serving import RunningBrain
from dlrover.brain.settings import change_setting
from dlrover.brain.tenants import TokenHolder, TokenRole, add_token
from dlrover.protocol.messages.brain import RunsTold
from tests.brain.conftest import Serve
from tests.brain.jobs import began, ref, run
from tests.brain.test_starts import SERVERS, server_run

LOCAL = TokenHolder(tenant="default", role=TokenRole.ADMIN)


async def fetch(brain: RunningBrain, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    def get() -> tuple[int, Any]:
        assert brain.http_port is not None
        connection = http.client.HTTPConnection("127.0.0.1", brain.http_port, timeout=30)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, body=data, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text

    return await asyncio.to_thread(get)


async def with_job(brain: RunningBrain, **more: object) -> None:
    await brain.desk.answer(LOCAL, began(**more), 1)


async def test_people_read_health_jobs_and_figures(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        await with_job(brain)
        await brain.desk.answer(LOCAL, RunsTold(job=ref(), runs=(run(1),)), 1)
        assert await fetch(brain, "/healthz") == (200, {"status": "ok"})
        status, jobs = await fetch(brain, "/jobs?most=5")
        assert (status, [job["uid"] for job in jobs["jobs"]]) == (200, ["job-1"])
        status, job = await fetch(brain, "/jobs/job-1")
        assert (status, job["job"]["num_runs"]) == (200, 1)
        assert (await fetch(brain, "/plans"))[0] == 200
        status, figures = await fetch(brain, "/metrics")
        assert status == 200
        assert 'dlrover_brain_questions_total{kind="JobsAsked",outcome="answered"} 1.0' in figures
        for path in ("/jobs?most=0", "/jobs?most=x", "/jobs/nothing"):
            assert (await fetch(brain, path))[0] == 400
        assert (await fetch(brain, "/nothing"))[0] == 404


async def test_a_page_in_a_browser_cannot_read_it_by_a_name_of_its_own(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        for host in ("evil.example", "127.0.0.1.evil.example", "127.evil.example:80", ""):
            assert (await fetch(brain, "/jobs", Host=host))[0] == 401
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
            assert (await fetch(brain, "/jobs", Host=host))[0] == 200


async def test_tokens_open_it_by_their_roles(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        await with_job(brain)
        token = await brain.store.write(lambda connection: add_token(connection, "team", TokenRole.READER, 1.0))
        brain.doorkeeper._read_at = None
        await brain.doorkeeper.refresh()
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": token}):
            for path in ("/jobs", "/metrics", "/plans", "/jobs/job-1"):
                assert (await fetch(brain, path, **wrong))[0] == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert await fetch(brain, "/jobs", **bearer) == (200, {"type": "JobList", "jobs": []})
        assert (await fetch(brain, "/jobs?tenant=default", **bearer))[0] == 400
        assert (await fetch(brain, "/optimize", {"type": "x"}, **bearer))[0] == 400
        assert (await fetch(brain, "/healthz"))[0] == 200


async def test_defect_27_no_plan_is_an_answer_and_no_error(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        await with_job(brain, **SERVERS)
        status, answer = await fetch(brain, "/optimize", {"type": "job_stage_running", "job": {"uuid": "job-1"}})
        assert status == 201
        assert answer["response"]["success"] is True
        assert answer["job_opt_plan"]["job_resource"] == {"node_group_resources": {}, "node_resources": {}}
        status, answer = await fetch(brain, "/optimize", {"type": "job_stage_running", "job": {"uuid": "unknown"}})
        assert (status, answer["response"]["success"]) == (201, False)
        status, answer = await fetch(brain, "/optimize", {"type": "guess", "job": {"uuid": "job-1"}})
        assert (status, answer["response"]) == (201, {"success": False, "reason": "invalid event type 'guess'"})


async def test_defect_28_stages_of_late_masters_are_known_and_the_plan_has_the_historical_form(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        await with_job(brain, **SERVERS)
        await brain.desk.answer(
            LOCAL, RunsTold(job=ref(), runs=tuple(server_run(number, (6.0, 9.0)) for number in (1, 2, 3))), 1
        )
        for stage in ("job_stage_running", "job_stage_ps_running"):
            status, answer = await fetch(brain, "/optimize", {"type": stage, "job": {"uuid": "job-1", "user": "ann"}})
            assert (status, answer["response"]["success"]) == (201, True)
            plan = answer["job_opt_plan"]
            assert plan["job_resource"]["node_resources"]["ps-1"]["cpu"] == 32
            assert set(plan["job_resource"]["node_resources"]["ps-1"]) == {
                "memory",
                "cpu",
                "gpu",
                "gpu_type",
                "priority",
            }
            assert plan["job_meta"] == {"uuid": "job-1", "cluster": "", "namespace": "", "user": "ann", "app": ""}
        named = {"optimizer_name": "BaseOptimizer"}
        status, answer = await fetch(
            brain, "/optimize", {"type": "job_stage_running", "job": {"uuid": "job-1"}, "config": named}
        )
        assert (status, answer["response"]["success"]) == (201, True)


async def test_job_config_gives_the_first_entry_that_fits(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        await brain.store.write(lambda connection: change_setting(connection, 1, ["k=v"], ["user=ann"], None))
        status, answer = await fetch(brain, "/job_config", {"type": "x", "job": {"uuid": "new", "user": "ann"}})
        assert (status, answer["job_configs"]) == (200, {"k": "v"})
        assert (await fetch(brain, "/job_config", {"job": {"user": "bob"}}))[1]["job_configs"] == {}


async def test_bodies_that_are_no_question_are_refused(serve: Serve) -> None:
    async with serve(http_port=0) as brain:
        for body in (b"", b"{", b"[]", b"\xff", b"[" * 200_000, b"x" * 300_000, b'{"type": 5}'):
            assert (await fetch(brain, "/optimize", body))[0] == 400
        assert (await fetch(brain, "/healthz"))[0] == 200
