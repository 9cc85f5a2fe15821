"""dlrover-run with stand-ins for agent and master."""

import errno
import functools
import os
import sys

from dlrover.agent.workers import process_tree
from dlrover.cli import run
from dlrover.cli.launch import launcher
from dlrover.cli.launch.launcher import LaunchPatience, Programs

here = os.path.dirname(os.path.abspath(__file__))
programs = Programs(
    agent=(sys.executable, os.path.join(here, "agent.py")), master=(sys.executable, os.path.join(here, "master.py"))
)


def fail(*_: object, **__: object) -> list[int]:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


if os.environ.get("STANDIN_SWEEP") == "fail":
    process_tree.kill_descendants = fail
patience = LaunchPatience(
    find_master=float(os.environ.get("STANDIN_FIND_MASTER", "0.2")),
    agent_margin=0.2,
    master=0.2,
    restart=float(os.environ.get("STANDIN_RESTART_PATIENCE", "60")),
)
launcher.launch = functools.partial(launcher.launch, programs=programs, patience=patience)
sys.exit(run.main())
