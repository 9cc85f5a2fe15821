"""`BrainClient` of the original, against a Brain that serves."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import msgspec
import pytest

from dlrover.brain.settings import change_setting
from dlrover.compat.client.brain_client import BrainClient
from dlrover.protocol.messages.scaling import SizePlan
from tests.brain.conftest import Serve

META = {"uuid": "old-1", "name": "clicks", "user": "ann", "cluster": "c", "namespace": "n"}


async def test_a_script_of_the_original_tells_and_asks(serve: Serve) -> None:
    async with serve() as brain:
        await brain.store.write(lambda connection: change_setting(connection, 1, ["a.key=7"], None, None))
        client = BrainClient(f"127.0.0.1:{brain.port}")
        assert await asyncio.to_thread(client.available)
        assert await asyncio.to_thread(
            client.report_training_set_metric, META, {"dataset_name": "clicks", "size": 1000}
        )
        assert await asyncio.to_thread(client.report_training_hyper_params, META, {"batch_size": 32, "epoch": 2})
        metrics = {"job_meta": META, "model_feature": {"recv_op_count": 249}, "type": "ParameterServerStrategy"}
        assert await asyncio.to_thread(client.report_metrics, metrics)
        assert await asyncio.to_thread(client.get_config, "a.key") == "7"
        assert await asyncio.to_thread(client.get_config, "no.key") is None
        assert await asyncio.to_thread(client.get_optimization_plan, "old-1", "job_stage_running") == SizePlan()
        assert await asyncio.to_thread(client.get_oom_resource_plan, [], "old-1", "job_stage_ps_initial") == SizePlan()
        assert await asyncio.to_thread(client.report_job_exit_reason, META, "Completed")
        known = await asyncio.to_thread(client.get_job_metrics, "old-1")
        assert known is not None
        facts = msgspec.json.decode(known)["job"]["facts"]
        assert facts["dataset_size"] == 1000
        assert "dataset_name" not in facts, "names of data are kept as hashes"
        assert (facts["batch_size"], facts["num_epochs"], facts["recv_op_count"]) == (32, 2, 249)
        assert await asyncio.to_thread(client.get_job_metrics, "nobody") is None
        with pytest.raises(ValueError, match="invalid event type"):
            client.get_optimization_plan("old-1", "no-stage")


PROGRAM = """
import socket
def refuse(*_, **__):
    raise AssertionError("a connection at the import")
socket.socket.connect = refuse
from dlrover.python.brain.client import BrainClient, GlobalBrainClient
assert "grpc" not in __import__("sys").modules
client = GlobalBrainClient.BRAIN_CLIENT
assert client is GlobalBrainClient.BRAIN_CLIENT
print(client.address, client.available(), client.get_config("a"), client.get_job_metrics("b"))
"""


def test_defect_24_nothing_is_asked_at_the_import_and_no_call_waits_for_ever() -> None:
    """Spec 07 §19: the client was made at the import, with a probe of five seconds, and its calls had no deadline."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "DLROVER_BRAIN_SERVICE_ADDR": address}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.split() == [address, "False", "None", "None"], done.stderr[-2000:]
