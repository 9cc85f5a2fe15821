"""Launch from Python: functions and their return values, also those of a script's `__main__`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlrover.protocol.errors import JobError
from dlrover.trainer.torch.elastic_run import ElasticLaunch, ElasticLaunchConfig
from tests.integration.jobs import DEADLINE

SCRIPT = """
import os, sys
from dlrover.trainer.torch.elastic_run import ElasticLaunch, ElasticLaunchConfig

class Answer:
    def __init__(self, value):
        self.value = value

def work(offset):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(5)
    dist.barrier()
    dist.destroy_process_group()
    return Answer(rank + offset)

if __name__ == "__main__":
    from beside import Asked

    config = ElasticLaunchConfig(nproc_per_node=2, dynamic_failover_extension=Asked())
    answers = ElasticLaunch(config, work)(40)
    print({rank: answer.value for rank, answer in answers.items()})
"""

BESIDE = """
from dlrover.python.elastic_agent.torch import dynamic_failover

class Asked(dynamic_failover.DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        with open("asked", "a") as file:
            file.write(failure_info.log_content)
        return dynamic_failover.FailoverStrategy.NORMAL_FAILOVER
"""


def test_return_values_of_a_scripts_function_survive_a_crash(jobs, tmp_path):
    script = tmp_path / "launches.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    done = subprocess.run(
        [sys.executable, script],
        env=jobs.env(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{0: 40, 1: 41}"
    assert '"exit_code": 5' in (tmp_path / "asked").read_text(), "the extension of the configuration was asked"


def test_a_failed_function_raises_with_the_cause(jobs, monkeypatch):
    for name, value in jobs.env().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match="ZeroDivisionError"):
        ElasticLaunch(ElasticLaunchConfig(nproc_per_node=1, max_restarts=0), divmod)(1, 0)
