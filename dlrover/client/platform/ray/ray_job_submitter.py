"""
`RayJobSubmitter`: hands a command to a Ray cluster's job server, as scripts of the original do.

The command runs on the cluster, for example `dlrover ray run ... -- train.py`. Failures to submit are raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.platforms.ray.access import load_ray
from dlrover.protocol.errors import ConfigError

ENDED = ("SUCCEEDED", "STOPPED", "FAILED")


class SubmitterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    dashboard_url: str
    command: str
    working_dir: str = "./"
    requirements: list[str] | str = []
    """Packages, or the file that lists them."""


class RayJobSubmitter:
    def __init__(self, conf_path: str) -> None:
        """Raises `ConfigError` for a file that cannot be read, and if Ray is not installed."""
        self.config = _read(conf_path)
        load_ray()
        from ray.job_submission import JobSubmissionClient

        try:
            self.client: Any = JobSubmissionClient(self.config.dashboard_url)
        except (ConnectionError, RuntimeError) as error:
            raise ConfigError(f"No Ray job server answers at {self.config.dashboard_url}: {error}") from error

    def submit(self) -> str:
        """Gives the id of the job."""
        runtime_env: dict[str, object] = {"working_dir": self.config.working_dir}
        if self.config.requirements:
            runtime_env["pip"] = self.config.requirements
        return str(self.client.submit_job(entrypoint=self.config.command, runtime_env=runtime_env))

    def wait_until_finish(self, job_id: str, timeout: float = 30) -> str:
        """The status at the end, or when the time is over. A poll, each second: the job server has no other way."""
        until = time.monotonic() + timeout
        while True:
            status = self.status(job_id)
            if status in ENDED or time.monotonic() >= until:
                return status
            time.sleep(1)

    def stop_job(self, job_id: str) -> bool:
        return bool(self.client.stop_job(job_id))

    def status(self, job_id: str) -> str:
        return str(getattr(self.client.get_job_status(job_id), "value", ""))

    def log_iter(self, job_id: str) -> AsyncIterator[str]:
        lines: AsyncIterator[str] = self.client.tail_job_logs(job_id)
        return lines

    def list(self) -> Any:
        return self.client.list_jobs()


def _read(path: str) -> SubmitterConfig:
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file.")
    with open(path, "rb") as file:
        try:
            return msgspec.yaml.decode(file.read(), type=SubmitterConfig)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path}: {error}. The keys are dashboardUrl, command, workingDir and requirements."
            ) from error
        except ImportError as error:
            raise ConfigError(
                f"{path}: YAML files need the package pyyaml. Install it with: pip install 'dlrover[ray]'."
            ) from error
