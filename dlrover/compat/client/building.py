"""Which master client a process gets: over its agent, alone, or one that says what is missing."""

from __future__ import annotations

import logging
import os

from dlrover.compat.client.master_client import MasterClient
from dlrover.compat.launch import environment as node_environment
from dlrover.compat.names.constants import JobConstant, NodeEnv
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.job import Reply, WorkerRequest
from dlrover.trainer import environment

log = logging.getLogger(__name__)


def build_master_client(master_addr: str | None = None, timeout: float | None = None) -> MasterClient:
    """
    The client of this process. Where there is neither an agent nor an address it works alone (`LocalMasterClient`).

    `timeout`: seconds for one request, by default 60; the variable MASTER_CLIENT_TIMEOUT wins.
    """
    seconds = JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT if timeout is None else timeout
    told = os.environ.get(NodeEnv.MASTER_CLIENT_TIMEOUT, "")
    if told.isdigit() and int(told):
        seconds = int(told)
    elif told:
        log.warning("MASTER_CLIENT_TIMEOUT=%s is ignored: give whole seconds of at least 1.", told)
    address = os.environ.get(NodeEnv.DLROVER_MASTER_ADDR, "") if master_addr is None else str(master_addr)
    node_id, node_type = node_environment.get_node_id(), node_environment.get_node_type()
    if environment.current() is None and not address:
        from dlrover.compat.client.local_master import (
            LocalMasterClient,  # the whole core: workers of a job start without it
        )

        return LocalMasterClient(node_id, node_type=node_type, timeout=seconds)
    link = None if environment.current() is not None else _NoAgent(address)
    return MasterClient(address, node_id, node_type, seconds, link=link)


class _NoAgent:
    """Implements `Link` where an address is given and no agent is there: every request says what is missing."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        raise Unavailable(
            f"No agent runs this process, so the master at {self._address} cannot be asked. Start the script with "
            "`dlrover-run`; without a master, unset DLROVER_MASTER_ADDR."
        )


class _Lazy(type):
    @property
    def MASTER_CLIENT(cls) -> MasterClient:  # noqa: N802  the published name
        return MasterClient.singleton_instance()


class GlobalMasterClient(metaclass=_Lazy):
    """`GlobalMasterClient.MASTER_CLIENT`: the process's client, built at first use."""
