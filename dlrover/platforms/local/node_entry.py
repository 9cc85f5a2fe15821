"""
First lines of a local node, before it becomes the node's program.

Run as a file, with the standard library alone: it ties the process to the node host, puts it into its network
namespace and its memory cgroup, and then `exec`s. A fork with Python code in between would do the same in fewer
milliseconds, but not safely in a host that has threads (it asks the master over gRPC).
"""

import argparse
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
EXIT_NO_START = 126


def main() -> None:
    parser = argparse.ArgumentParser(prog="node_entry")
    parser.add_argument("--host-pid", type=int, required=True)
    parser.add_argument("--network", default="", help="file of the network namespace")
    parser.add_argument("--cgroup", default="", help="cgroup.procs to enter")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if options.cgroup:
            with open(options.cgroup, "w", encoding="ascii") as procs:
                procs.write(str(os.getpid()))
        if options.network:
            descriptor = os.open(options.network, os.O_RDONLY | os.O_CLOEXEC)
            _check(libc.setns(descriptor, _CLONE_NEWNET), "setns")
        # Last: it is the node's program that must hear of the host's end.
        _check(libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0), "prctl")
        if os.getppid() != options.host_pid:
            sys.exit(EXIT_NO_START)  # the host has gone in the meantime
        os.execvp(options.program[0], options.program)
    except OSError as error:
        sys.stderr.write(f"This node could not be started: {options.program[0]}: {error}\n")
        sys.exit(EXIT_NO_START)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
