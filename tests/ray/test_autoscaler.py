"""A cluster that grows by itself: the autoscaler sees a node that waits, and the node says what the autoscaler does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from dlrover.platforms.ray import cluster
from tests.ray.jobs import RunningRayJob
from tests.ray.lab import STORE_BYTES, RayLab, free_port, until


@pytest.fixture
def growing_lab(ray_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayLab]:
    """A head with Ray's own autoscaler, whose machines are raylets here."""
    port = free_port()
    config = {
        "cluster_name": "tests",
        "max_workers": 1,
        "idle_timeout_minutes": 60,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "foreground_node_launch": True,
        },
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "upscaling_speed": 1.0,
        "docker": {},
        "no_restart": False,
        **{
            name: []
            for name in (
                "initialization_commands",
                "setup_commands",
                "head_setup_commands",
                "worker_setup_commands",
                "head_start_ray_commands",
                "worker_start_ray_commands",
            )
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "small": {
                "resources": {"CPU": 1, "object_store_memory": STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 1,
            },
        },
        "head_node_type": "ray.head.default",
    }
    path = tmp_path / "autoscaler.json"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("RAY_FAKE_CLUSTER", "1")
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    lab = RayLab(ray_dir, gcs_server_port=port, autoscaling_config=str(path))
    try:
        yield lab
    finally:
        monitors = psutil.Process().children(recursive=True)
        lab.close()
        for process in [each for each in monitors if each.is_running() and f":{port}" in " ".join(each.cmdline())]:
            process.kill()


def test_the_autoscaler_is_told_of_a_waiting_node_and_the_node_tells_of_the_autoscaler(
    growing_lab: RayLab, tmp_path: Path
):
    lab = growing_lab
    until(cluster.has_autoscaler)
    job = RunningRayJob(lab, tmp_path, "--nodes", "1")
    try:
        until(lambda: "The autoscaler is adding" in job.output(), job.output)
        job.await_steps(world_size=1)
        job.let_end()
        assert job.wait() == 0, job.output()
    finally:
        job.close()
