"""The names that `import dlrover` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dlrover
from dlrover.protocol.errors import ConfigError
from tests.integration.jobs import SCRIPTS


def test_each_name_leads_somewhere():
    for name in dlrover.__all__:
        assert callable(getattr(dlrover, name)), name
        assert name in dir(dlrover)
    with pytest.raises(AttributeError, match="has no attribute 'checkpointer'"):
        _ = dlrover.checkpointer


@pytest.mark.timeout(240)
def test_a_launched_function_meets_the_other_worker_at_a_barrier(jobs, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "first_names.py", tmp_path],
        env=jobs.env(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ["one-0", "one-1", "two-0", "two-1"]
    assert done.stdout.strip() == str({0: names, 1: names})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "two"}, 'give a number of nodes, or "MIN:MAX"'),
        (
            {"nproc": 2},
            r"launch\(\) has no option nproc\. Its options are nnodes and the fields of ElasticLaunchConfig",
        ),
    ],
)
def test_a_misspelt_launch_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        dlrover.launch(print, **options)
