"""Real TensorFlow jobs: `make test-tensorflow` runs these in an environment of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed here: make test-tensorflow has an environment with it"
)

from tests.tensorflow.cluster_job import ClusterJob

HAS_OWN_ESTIMATOR = importlib.util.find_spec("tensorflow_estimator") is not None
"""TensorFlow 2.15 and older."""


class StartJob(Protocol):
    def __call__(self, *options: str, **environ: object) -> ClusterJob: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    jobs: list[ClusterJob] = []

    def begin(*options: str, **environ: object) -> ClusterJob:
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        jobs.append(ClusterJob(directory, *options, **environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
