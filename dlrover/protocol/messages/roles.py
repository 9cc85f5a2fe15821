"""How the roles of a multi-role job do, as its conductor reports it to pages and commands. A file or the answer of an actor; no master is sent it."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.protocol.messages.identity import Micros

REPEAT = 10.0
"""Seconds after which a conductor reports again, also if nothing has changed: a host that was away hears it then."""


class RoleLine(Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    """simple, elastic or stream."""
    num_wanted: int
    """Instances. An elastic role is one: its nodes are counted by its own master."""
    num_ready: int
    """They serve calls, or have ended well."""
    states: str
    """For example `2 running, 1 starting`."""
    num_restarts: int
    """Of its instances, added up."""
    failure: str = ""
    """The newest failure of an instance: its name and the cause. Empty: none has failed."""
    failed_at: Micros = Micros(0)


class RolesReport(Struct, frozen=True, kw_only=True):
    job: str
    stage: str
    num_job_restarts: int
    verdict: str
    """The newest decision of the conductor."""
    roles: tuple[RoleLine, ...]
    own_role: str = ""
    """Whose master shows it."""


REPORT = msgspec.json.Decoder(RolesReport)
