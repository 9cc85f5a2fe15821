"""
Launch from Python under its historical name; also `python -m dlrover.trainer.torch.elastic_run` for `dlrover-run`.

The only modules of `trainer` that know of `cli`: they are names for it that users have in their scripts, nothing of the
library inside a worker imports them.
"""

from __future__ import annotations

import sys

from dlrover.cli.launch.config import ElasticLaunchConfig, LogConfig
from dlrover.cli.launch.namespace import main, parse_args, run
from dlrover.cli.launch.programmatic import ElasticLaunch, launch_agent

elastic_launch = ElasticLaunch  # the older name

__all__ = [
    "ElasticLaunch",
    "ElasticLaunchConfig",
    "LogConfig",
    "elastic_launch",
    "launch_agent",
    "main",
    "parse_args",
    "run",
]

if __name__ == "__main__":
    from dlrover.cli.run import main as run_command  # in this process: nothing else runs in it

    sys.exit(run_command())
