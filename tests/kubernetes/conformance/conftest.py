"""Each test runs in a namespace of its own, against each server that there is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.kubernetes.conformance.client import Client, Json, fresh
from tests.kubernetes.servers import Server

CRDS = Path(__file__).parents[3] / "deploy" / "crds"


@pytest.fixture
def server(api_server: Server) -> Server:
    return api_server


@pytest.fixture
def controllers(server: Server) -> None:
    if not server.has_controllers:
        pytest.skip("needs controller-manager")


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Client]:
    namespace = fresh("test")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(server, session, namespace)
        made = await client.create("namespaces", {"metadata": {"name": namespace}}, namespace="")
        assert made.status == 201, made
        if server.has_accounts:
            account = lambda: client.get("serviceaccounts", "default")  # noqa: E731
            await client.soon(account, lambda answer: answer.status == 200)
        yield client
        await client.delete("namespaces", namespace, namespace="")


@pytest.fixture
async def jobs(api: Client) -> str:
    """The path of ElasticJobs, whose definition is served."""
    return await define(api, yaml.safe_load((CRDS / "elasticjobs.yaml").read_text()))


async def define(api: Client, definition: Json) -> str:
    """Creates a definition if it is not there, and waits until it is served. Returns the resource's path."""
    plural = "apiextensions.k8s.io/v1/customresourcedefinitions"
    made = await api.create(plural, definition, namespace="")
    assert made.status in (201, 409), made
    spec = definition["spec"]
    path = f"{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    await api.soon(lambda: api.get(path, namespace=""), lambda answer: answer.status == 200)
    return path
