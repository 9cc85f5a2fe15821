"""
How many files a process may have open.

Most systems give 1,024 to a program that does not ask for more, because of programs that use select(). We ask: a node needs a dozen for each
worker, the master one for each node. Users' programs find what the user has.
"""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 1 << 20
"""What the kernel allows at most, unless it was configured otherwise."""


def raise_limit() -> None:
    """For this process and what it starts from now on, as far as the administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that forbids it: then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class UsersLimit:
    """As it is when this is made, for programs that are started later."""

    def __init__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def give_back(self, pid: int) -> None:
        """To a child of ours that has just been started, and what that starts."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or as above
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self._limits)
