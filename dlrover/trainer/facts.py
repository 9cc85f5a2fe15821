"""
Facts of the job that the libraries in a worker find out: batch, dataset, size of the model. Told once by global rank 0, and again if they change.

They help the part that decides about the size of the job, and people who look at it. Training neither waits for the answer nor notices if there is none.
"""

from __future__ import annotations

import logging
import os
import threading

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.scaling import JobFacts
from dlrover.trainer import environment
from dlrover.trainer.agent_link import current_link

log = logging.getLogger("dlrover.trainer")

TIMEOUT = 30.0
_told: JobFacts | None = None


def tell_facts(facts: JobFacts) -> None:
    """Does nothing outside `dlrover-run`, on other ranks, and for what was told before."""
    global _told
    if environment.current() is None or os.environ.get("RANK", "0") != "0" or facts == _told:
        return
    _told = facts
    threading.Thread(target=_send, args=(facts,), name="dlrover facts", daemon=True).start()


def _send(facts: JobFacts) -> None:
    try:
        current_link().ask(facts, timeout=TIMEOUT)
    except DLRoverError as error:
        log.debug("facts of the job were not heard: %s", error)
