"""
Programmatic launch under its historical name; also `python -m dlrover.trainer.torch.elastic_run` for `dlrover-run`.

The only modules of `trainer` that know of `cli`: they are names for it that users have in their scripts, nothing of the
library inside a worker imports them.
"""

from __future__ import annotations

import sys

from dlrover.cli.programmatic import ElasticLaunch, ElasticLaunchConfig, launch_agent

elastic_launch = ElasticLaunch  # the older name

__all__ = ["ElasticLaunch", "ElasticLaunchConfig", "elastic_launch", "launch_agent"]

if __name__ == "__main__":
    from dlrover.cli.run import main

    sys.exit(main())
