"""
What torch and sockets say when another worker is gone: the consequence of a failure, not its cause.

Both sides of a node need it. The agent calls such a failure secondary; the worker holds its traceback back until the agent
knows who failed first.
"""

from __future__ import annotations

import re

_PEER_LOST_TEXTS = (
    r"connection closed by (remote )?peer",
    r"connection reset by (remote )?peer",
    r"connection (was likely )?closed",
    r"connection refused",
    r"connect(ion)? timed? ?out",
    r"socket (closed|timeout)",
    r"broken pipe",
    r"remote process exit(ed|ing)",
    r"timed out waiting|wait(ing)? timeout|timed out after \d+ ?ms|application timeout",
    r"watchdog caught collective operation timeout",
    r"ncclremoteerror|ncclsystemerror|nccl communicator was aborted",
    r"failed to recv|recv(value|bytes) failed",
    r"the client socket has (failed|timed out)",
    r"store(?:(?!store).)*(timeout|timed out)",  # up to the next "store", or the time grows with the square of a line
    r"connectfullmesh failed",
)
_PEER_LOST = re.compile("|".join(_PEER_LOST_TEXTS), re.IGNORECASE)
_PEER_EXCEPTIONS = re.compile(
    r"(RuntimeError|DistError|DistBackendError|DistNetworkError|DistStoreError|Connection\w*Error)\b"
)
"""A user's own exception may mention anything; only what torch and sockets raise counts."""


def mentions_lost_peer(text: str) -> bool:
    """For the last lines of a process that C++ ended."""
    return _PEER_LOST.search(text) is not None


def tells_of_lost_peer(exception: str) -> bool:
    """For `Type: message` of an exception that no code caught."""
    return _PEER_EXCEPTIONS.search(exception) is not None and mentions_lost_peer(exception)
