"""
A mistake in the script: what no restart can mend, told from what may pass.

A script with a mistake fails in the first life of the job, before any step, in all ranks and with the same traceback. Each of these
four is asked for, and the proof is complete only when every rank of the world has told its own failure: one rank that fails alone may
have a bad disk, and one that was stopped has told nothing. So an agent gives the other workers of such a round a moment to
fail by themselves before it stops them, and joins the next round after it has told how they ended.

Errors that come from outside may pass, although all ranks have them alike: files, connections, timeouts, torch's own store and
process groups. They are restarted as usual.
"""

from __future__ import annotations

import re

from msgspec import Struct

from dlrover.protocol.messages.job import FailureKind, RestartPolicy, Round, WorkerFailure

FIRST_LIFE = Round(1)
SENTENCE = (
    "All ranks failed with the same exception before the first step: the script has a mistake, and a restart would repeat it. "
    "Correct the script; --max-restarts N restarts it all the same."
)
_MAY_PASS = re.compile(r"^(OSError|Dist\w*Error)$|Timeout|Connect|Network|HTTP|Rpc")
"""Names of types, their bases included. The second half are those by which libraries for networks call theirs."""


class Alike(Struct):
    """How many ranks of one round have failed as a mistake of the script makes them fail, all with one traceback."""

    traceback_digest: str = ""
    num_ranks: int = 0

    def count(self, failure: WorkerFailure, traceback_digest: str) -> None:
        if (
            may_be_mistake(failure)
            and traceback_digest
            and traceback_digest == (self.traceback_digest or traceback_digest)
        ):
            self.traceback_digest = traceback_digest
            self.num_ranks += 1


def may_be_mistake(failure: WorkerFailure) -> bool:
    """Whether the script itself may be to blame for this failure, before its first step."""
    is_exception = failure.kind is FailureKind.EXCEPTION and "Exception" in failure.exceptions
    may_pass = any(_MAY_PASS.search(name) for name in failure.exceptions)
    return is_exception and not may_pass and failure.is_before_step and not failure.node_error


def is_mistake(policy: RestartPolicy, alike: Alike, *, round_: Round, world_size: int) -> bool:
    """Who gives a number of restarts wants them."""
    return policy.max_restarts is None and round_ == FIRST_LIFE and 0 < world_size <= alike.num_ranks
