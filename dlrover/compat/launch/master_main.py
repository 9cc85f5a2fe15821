"""
`python -m dlrover.python.master.main`: the master under its historical name.

It differs from `dlrover master` where commands of the original would fail: nodes come from `pyk8s` unless something else is asked for, an
option that is unknown or has no effect costs a line in the log, and a port of HOST_PORTS is taken before the one that was given.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from dlrover.cli.cluster_master import CLUSTER_PLATFORMS
from dlrover.cli.console import say_block
from dlrover.cli.launch.launcher import EXIT_USAGE
from dlrover.cli.master_command import build_parser, read_options, reset_options_without_effect, run
from dlrover.cli.options.environment import read_environment
from dlrover.protocol.errors import ConfigError

log = logging.getLogger(__name__)

PLATFORM = "pyk8s"


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser("python -m dlrover.python.master.main", allow_abbrev=True)
    parser.set_defaults(platform=PLATFORM)
    options, unknown = read_options(parser, argv)
    if unknown:
        log.warning("Unknown options are ignored: %s", " ".join(unknown))
    for note in reset_options_without_effect(options):
        log.warning("%s", note)
    try:
        starts_nodes = options.fleet or options.platform in CLUSTER_PLATFORMS
        if not starts_nodes and options.dynamic_failover_extension:
            name, options.dynamic_failover_extension = options.dynamic_failover_extension, ""
            log.warning("--dynamic_failover_extension %s is ignored: this master starts no nodes.", name)
        if read_environment(os.environ).host_ports:
            options.port = 0
        return run(options)
    except ConfigError as error:
        say_block(f"dlrover.python.master.main: error: {error}")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
