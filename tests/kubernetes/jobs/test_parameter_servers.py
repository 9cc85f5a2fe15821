"""A TensorFlow job with parameter servers in pods, from the example's manifest. Run by `make test-tensorflow-clusters`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow-clusters")

import numpy as np

from tests.kubernetes.jobs.stage import TrainingJob
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.machine import REPOSITORY, LocalCluster
from tests.tensorflow.cluster_job import ShownJob, checkpoint_values, newest_checkpoint

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

NAME = "servers"
RECORDS = 2500
MANIFEST = REPOSITORY / "examples" / "tensorflow" / "ctr" / "job.yaml"
MODEL = REPOSITORY / "tests" / "tensorflow" / "job" / "counting_conf.py"
PATIENCE = 300.0


class ServersJob(TrainingJob):
    """The example's job with a model that counts what it has learned from."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster, NAME, workers=1)

    async def submit_counting(self) -> ShownJob:
        job, claim = yaml.safe_load_all(MANIFEST.read_text())
        job["metadata"]["name"] = NAME
        claim["metadata"]["name"] = f"{NAME}-data"
        settings = {"dir": "/data", "records": RECORDS, "pace": 0.05, "save_steps": 20, "exact_saves": 1, "table": 1000}
        job["spec"]["envs"] = {f"COUNTING_{name.upper()}": {"value": str(value)} for name, value in settings.items()}
        for replica in job["spec"]["replicaSpecs"].values():
            spec = replica["template"]["spec"]
            spec["volumes"] = [
                {"name": "program", "configMap": {"name": f"{NAME}-program"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": f"{NAME}-data"}},
            ]
            [container] = spec["containers"]
            container["command"] = [
                word.replace("conf.TrainConf", "counting_conf.Conf") for word in container["command"]
            ]
            container["resources"] = {"requests": {"cpu": "250m", "memory": "512Mi"}}
        program: Body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{NAME}-program"},
            "data": {MODEL.name: MODEL.read_text()},
        }
        made = await self.cluster.apply(yaml.safe_dump_all([program, claim, job]))
        self.uid = made[2]["metadata"]["uid"]
        self.folder = self.cluster.folder / "claims" / made[1]["metadata"]["uid"]
        return ShownJob(self.folder, Path())

    async def until_steps(self, shown: ShownJob, who: str, count: int, *, version: int) -> None:
        await self.cluster.until(
            lambda: len(shown.steps_of(who, version)) >= count,
            f"{count} steps of {who} in version {version}; there are {shown.steps(who)[-1:]}",
            PATIENCE,
        )


async def test_a_killed_server_is_replaced_and_no_record_is_lost(cluster: LocalCluster) -> None:
    """Chief and workers reach the servers by the addresses of their pods, which change with each version."""
    job = ServersJob(cluster)
    shown = await job.submit_counting()
    await job.until_steps(shown, "chief-0", 25, version=1)
    await job.until_steps(shown, "worker-0", 5, version=1)
    [lost] = (await job.running("ps")).values()
    assert sorted([*await job.running("chief"), *await job.running("worker")]) == [0, 0]
    cluster.tell(lost["spec"]["nodeName"], "signal", pod=f"default/{lost['metadata']['name']}", number=9)
    await job.until_lost(lost)
    await job.until_steps(shown, "chief-0", 1, version=2)
    restored = np.load(job.folder / "restored-2.npz")
    saved = checkpoint_values(job.folder / "model" / f"model.ckpt-{int(restored['step'])}")
    assert np.array_equal(restored["table"].view(np.uint32), saved["counting/table"].view(np.uint32))
    [replacement] = (await job.running("ps")).values()
    assert replacement["metadata"]["name"] != lost["metadata"]["name"]
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    counts = checkpoint_values(newest_checkpoint(shown.model_dir))["counting/seen"].ravel()
    assert counts.tolist() == [1.0] * RECORDS
    assert list((shown.model_dir / "export" / "best").iterdir()), "the evaluator has exported the best model"
