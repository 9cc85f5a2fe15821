"""dlrover-run with stand-ins for agent and master."""

import os
import sys

from dlrover.cli.launcher import Patience, Programs, launch
from dlrover.cli.settings import read_settings

here = os.path.dirname(os.path.abspath(__file__))
programs = Programs(
    agent=(sys.executable, os.path.join(here, "agent.py")), master=(sys.executable, os.path.join(here, "master.py"))
)
_, settings = read_settings(sys.argv[1:], os.environ)
sys.exit(
    launch(settings, os.environ, programs=programs, patience=Patience(find_master=0.2, agent_margin=0.2, master=0.2))
)
