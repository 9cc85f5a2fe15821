"""
`python -m dlrover.master --config FILE`: the process around one master.

Exit codes: that of the job when it is over (0, 1, 22), and these, which no job has: 2 the configuration is wrong,
3 the port is in use, 4 another master took over the journal, 5 the journal is unusable, 6 asked to stop by a signal or
by the end of the process that started us, 70 a bug. Who must be sure that the job is over looks at the end file.

It must serve again within a second after a kill, so nothing is imported here that the master does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path

# gRPC's core would write a line for each stranger that sends it rubbish; what matters is told by our own log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from dlrover.host import open_files
from dlrover.host.console import ConsoleHandler
from dlrover.host.lifeline import follow_parent
from dlrover.host.log_file import log_to_file
from dlrover.master.config import (
    EXIT_BUG,
    EXIT_FENCED,
    EXIT_JOURNAL,
    EXIT_PORT_IN_USE,
    EXIT_STOPPED,
    EXIT_USAGE,
    MasterConfig,
    read_config,
)
from dlrover.master.journal.journal import Fenced, JournalError
from dlrover.master.service import serve
from dlrover.protocol.errors import ConfigError, DLRoverError, Unavailable
from dlrover.protocol.rpc.server import PortTaken

log = logging.getLogger("dlrover.master")

GC_THRESHOLD = (50_000, 20, 100)
"""
Each look for garbage cycles is a pause, in its last form one over all that ten thousand streams and nodes consist of. Python's own
thresholds cost a quarter of the master's time while 4,000 agents come; these cost nothing that can be measured, in time or memory.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="dlrover.master", description="The master of one job.")
    parser.add_argument("--config", required=True, type=Path, help="JSON file, see dlrover/master/config.py")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        _configure_logging(config)
    except ConfigError as error:
        print(f"dlrover.master: {error}", file=sys.stderr)
        return EXIT_USAGE
    if config.parent_death and not follow_parent(signal.SIGTERM, config.parent_pid):
        log.error("the process that started this master has ended")
        return EXIT_STOPPED
    open_files.raise_limit()
    gc.freeze()  # what was imported stays for good
    gc.set_threshold(*GC_THRESHOLD)
    try:
        return asyncio.run(serve(config))
    except DLRoverError as error:
        log.error("%s", error)
        return _code_of(error)
    except Exception:  # the process edge: a bug ends the process, the launcher starts another
        log.exception("bug in the master")
        return EXIT_BUG


def _code_of(error: DLRoverError) -> int:
    match error:
        case PortTaken():
            return EXIT_PORT_IN_USE
        case ConfigError():
            return EXIT_USAGE
        case Fenced():
            return EXIT_FENCED
        case JournalError() | Unavailable():
            return EXIT_JOURNAL
        case _:
            return EXIT_BUG


def _configure_logging(config: MasterConfig) -> None:
    try:
        # A container's log driver may take no bytes for a while, and the master must serve meanwhile.
        output = (
            logging.FileHandler(config.log_file, encoding="utf-8", errors="backslashreplace")
            if config.log_file
            else ConsoleHandler()
        )
    except OSError as error:
        raise ConfigError(
            f"The log file {config.log_file} cannot be written: {error.strerror}. Give another file"
        ) from error
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(handlers=[output], level=logging.INFO, format=form)
    log_to_file(config.log_root)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Not through interpreter shutdown: gRPC's threads and the journal's need not be waited for, all is durable.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
