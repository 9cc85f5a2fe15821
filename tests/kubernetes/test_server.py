"""What our API server has beyond a real one: faults on demand, counts, absence, a small history, a life as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.kubernetes.server import ApiServer
from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.custom.cel import CelError, Rule
from tests.kubernetes.server.faults import Fault

PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"
POD = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "main", "image": "x"}]}}


def session(server: ApiServer) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {server.token}"})


async def test_a_status_strikes_as_often_as_it_should() -> None:
    async with ApiServer() as server, session(server) as client:
        server.faults.inject(Fault(effect="status", verb="list", plural="pods", code=429, retry_after=3, times=2))
        seen = []
        for _ in range(3):
            async with client.get(PODS) as answer:
                seen.append((answer.status, answer.headers.get("Retry-After")))
        assert seen == [(429, "3"), (429, "3"), (200, None)]
        async with client.get(MAPS) as answer:
            assert answer.status == 200
        assert server.faults.counts["list", "pods"] == 3


async def test_a_cut_breaks_the_connection_and_nothing_is_carried_out() -> None:
    async with ApiServer() as server, session(server) as client:
        server.faults.inject(Fault(effect="cut", verb="create", plural="pods", times=1))
        with pytest.raises(aiohttp.ClientError):
            await client.post(PODS, json=POD)
        assert server.cluster.store.get(("", "pods"), ("default", "a")) is None


async def test_a_lost_answer_was_carried_out() -> None:
    async with ApiServer() as server, session(server) as client:
        server.faults.inject(Fault(effect="lose", verb="create", plural="pods", times=1))
        with pytest.raises(aiohttp.ClientError):
            await client.post(PODS, json=POD)
        assert server.cluster.store.get(("", "pods"), ("default", "a")) is not None


async def test_a_request_hangs_until_the_fault_is_withdrawn() -> None:
    async with ApiServer() as server, session(server) as client:
        fault = server.faults.inject(Fault(effect="hang", verb="list", plural="pods"))
        asked = asyncio.ensure_future(client.get(PODS))
        await until(lambda: server.faults.counts["list", "pods"] == 1)
        assert not asked.done()
        server.faults.withdraw(fault)
        async with await asked as answer:
            assert answer.status == 200


async def test_a_page_of_a_proxy_is_no_json() -> None:
    async with ApiServer() as server, session(server) as client:
        server.faults.inject(Fault(effect="html", times=1))
        async with client.get(PODS) as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")


async def test_a_watch_is_cut_or_told_that_its_version_is_gone() -> None:
    async with ApiServer() as server, session(server) as client:
        server.faults.inject(Fault(effect="gone", verb="watch", plural="pods", times=1))
        async with client.get(
            PODS, params={"watch": "1", "resourceVersion": str(server.cluster.store.version)}
        ) as answer:
            lines = [json.loads(line) async for line in answer.content]
        assert [(line["type"], line["object"]["code"]) for line in lines] == [("ERROR", 410)]
        async with client.get(PODS, params={"watch": "1"}) as answer:
            await until(lambda: server.faults.num_watches == 1)
            assert server.faults.cut_watches() == 1
            with pytest.raises(aiohttp.ClientError):
                await answer.content.readline()


async def test_a_server_that_was_away_has_its_objects_at_its_address() -> None:
    async with ApiServer() as server:
        url = server.url
        async with session(server) as client:
            assert (await client.post(PODS, json=POD)).status == 201
        await server.stop()
        async with session(server) as client:
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(PODS)
        await server.start()
        assert server.url == url
        async with session(server) as client:
            assert (await client.get(f"{PODS}/a")).status == 200


async def test_a_watch_behind_the_history_is_gone() -> None:
    async with ApiServer(history=5) as server, session(server) as client:
        async with client.get(MAPS) as answer:
            version = (await answer.json())["metadata"]["resourceVersion"]
        for number in range(7):
            await client.post(MAPS, json={"metadata": {"name": f"m{number}"}})
        async with client.get(MAPS, params={"watch": "1", "resourceVersion": version}) as answer:
            line = json.loads(await answer.content.readline())
        assert (line["type"], line["object"]["code"]) == ("ERROR", 410)


async def test_rights_hold_for_users_that_a_test_adds() -> None:
    async with ApiServer() as server:
        server.cluster.tokens.add("of-jane", User("jane", ("system:authenticated",)))
        async with aiohttp.ClientSession(server.url, headers={"Authorization": "Bearer of-jane"}) as client:
            async with client.get(PODS) as answer:
                body = await answer.json()
        assert (answer.status, body["message"]) == (
            403,
            'pods is forbidden: User "jane" cannot list resource "pods" in API group "" in the namespace "default"',
        )


async def test_tls_is_served_with_an_authority_of_its_own() -> None:
    async with ApiServer(tls=True) as server:
        said = yaml.safe_load(server.kubeconfig.read_text())
        assert "certificate-authority-data" in said["clusters"][0]["cluster"]
        good, other = ssl.create_default_context(cadata=server.certificate), ssl.create_default_context()
        async with session(server) as client:
            async with client.get(PODS, ssl=good) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get(PODS, ssl=other)


def test_a_process_serves_counts_faults_and_absence(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [
        sys.executable,
        "-m",
        "tests.kubernetes.server",
        "--ready-file",
        str(ready),
        "--directory",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(ready.exists)
        said = json.loads(ready.read_text())
        assert said["pid"] == process.pid
        assert yaml.safe_load(Path(said["kubeconfig"]).read_text())["clusters"][0]["cluster"]["server"] == said["url"]
        asyncio.run(use_process(said))
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


async def use_process(said: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(said["url"], headers={"Authorization": f"Bearer {said['token']}"}) as client:
        async with client.post("/test/faults", json={"effect": "status", "code": 503, "times": 1}) as answer:
            assert answer.status == 200
        async with client.post("/test/faults", json={"effect": "nonsense"}) as answer:
            assert answer.status == 400
        async with client.get(PODS) as answer:
            assert answer.status == 503
        async with client.get("/test/counts") as answer:
            assert (await answer.json())["requests"] == {"list pods": 1}
        assert (await client.post("/test/away", params={"seconds": "0.5"})).status == 200
        was_away = False
        async with asyncio.timeout(60):
            while True:
                try:
                    async with client.get(PODS) as answer:
                        if was_away:
                            assert answer.status == 200
                            return
                except aiohttp.ClientError:
                    was_away = True
                await asyncio.sleep(0.02)


async def until(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends_at, "it did not happen"
        await asyncio.sleep(0.01)


def wait_for(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends_at, "it did not happen"
        time.sleep(0.02)


NUMBERS = {
    "type": "object",
    "properties": {
        "min": {"type": "integer"},
        "max": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
}


@pytest.mark.parametrize(
    ("rule", "value", "wanted"),
    [
        ("self.min <= self.max", {"min": 1, "max": 2}, True),
        ("self.min <= self.max", {"min": 3, "max": 2}, False),
        ("!has(self.min) || self.min > 1", {}, True),
        ("self.min > 1 || !has(self.min)", {}, True),
        ("has(self.min) && self.min > 1", {}, False),
        ("self.names.all(n, n.startsWith('a'))", {"names": ["ab", "ac"]}, True),
        ("self.names.exists_one(n, n == 'ab')", {"names": ["ab", "ab"]}, False),
        ("self.names.filter(n, n != 'a').size() == 1", {"names": ["a", "b"]}, True),
        ("self.map.all(k, self.map[k] > 0)", {"map": {"x": 1, "y": 0}}, False),
        ("'x' in self.map && self.map['x'] == 1", {"map": {"x": 1}}, True),
        ("size(self.names) == 2 ? true : false", {"names": ["a"]}, False),
        ("self.min + 2 * 3 - 1 == 6", {"min": 1}, True),
        ("self.names[0].matches('^a+$')", {"names": ["aaa"]}, True),
    ],
)
def test_rules_are_evaluated(rule: str, value: dict[str, Any], wanted: bool) -> None:
    assert Rule(rule, NUMBERS).value(value) is wanted


@pytest.mark.parametrize(
    "rule", ["self.nothing == 1", "self.min ==", "foo(self.min)", "self.min.foo()", "min > 1", "self.min @ 2"]
)
def test_rules_that_do_not_compile_are_refused(rule: str) -> None:
    with pytest.raises(CelError):
        Rule(rule, NUMBERS)


def test_a_rule_that_needs_a_missing_field_fails() -> None:
    with pytest.raises(CelError, match="no such key: min"):
        Rule("self.min > 1", NUMBERS).value({})
