"""
Who may ask what. Each token belongs to one tenant and has one role; the database holds its hash alone.

A tenant sees and changes its own jobs. Only the role `admin` reads those of other tenants. Without any token in the database Brain serves its own machine and no other: every caller is then
the tenant `default`.
"""

from __future__ import annotations

import enum
import hmac
import re
import secrets
import time
from collections.abc import Callable

from msgspec import Struct
from sqlalchemy import Connection, delete, func, select

from dlrover.brain.store.schema import JOB, TENANT, TOKEN
from dlrover.brain.store.store import BrainStore
from dlrover.brain.store.writing import hash_of
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.brain import MAX_NAME, BrainQuestion, ClusterSeen, JobAsked, JobsAsked, PlansAsked

DEFAULT_TENANT = "default"
ALL_TENANTS = "*"
TOKEN_BYTES = 32
REREAD_EVERY = 2.0
"""Seconds: so long a new token waits, and a removed one still opens."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class TokenRole(enum.StrEnum):
    JOB = "job"
    """Writes and reads the jobs of its tenant."""
    READER = "reader"
    """Reads them."""
    ADMIN = "admin"
    """Does everything, and reads the jobs of all tenants."""
    MONITOR = "monitor"
    """Tells what a cluster has."""


class TokenHolder(Struct, frozen=True, kw_only=True):
    tenant: str
    role: TokenRole


class TenantRow(Struct, frozen=True, kw_only=True):
    name: str
    roles: dict[str, int]
    """TokenRole to the number of its tokens."""
    row_limit: int
    num_jobs: int


class Doorkeeper:
    """Knows the tokens. `refresh` reads them again. `may_open`: without any token this machine's own programs may do everything."""

    def __init__(
        self, store: BrainStore, *, may_open: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._may_open = may_open
        self._clock = clock
        self._callers: dict[str, tuple[str, TokenHolder]] = {}
        self._read_at: float | None = None

    @property
    def is_open(self) -> bool:
        """There is no token, and none is needed."""
        return self._may_open and not self._callers

    @property
    def is_useless(self) -> bool:
        """There is no token, and one is needed."""
        return not self._may_open and not self._callers

    async def refresh(self) -> None:
        if self._read_at is None or self._clock() - self._read_at >= REREAD_EVERY:
            self._read_at = self._clock()
            hashes = await self._store.read(_callers_by_hash)
            self._callers = {hash_[:16]: (hash_, caller) for hash_, caller in hashes.items()}

    def caller_of(self, token: str) -> TokenHolder | None:
        """None: the token is missing or wrong. The time that this takes tells nothing about a token: only hashes are compared."""
        if self.is_open:
            return TokenHolder(tenant=DEFAULT_TENANT, role=TokenRole.ADMIN)
        given = hash_of(token)
        known, caller = self._callers.get(given[:16], ("", None))
        return caller if hmac.compare_digest(known, given) else None


def check_right(caller: TokenHolder, question: BrainQuestion) -> None:
    """Raises Rejected."""
    allowed: tuple[TokenRole, ...]
    match question:
        case ClusterSeen():
            allowed = (TokenRole.MONITOR, TokenRole.ADMIN)
        case JobsAsked() | JobAsked() | PlansAsked():
            allowed = (TokenRole.JOB, TokenRole.READER, TokenRole.ADMIN)
            if question.tenant not in ("", caller.tenant) and caller.role is not TokenRole.ADMIN:
                raise Rejected("Only a token with the role `admin` may read the jobs of another tenant.")
        case _:
            allowed = (TokenRole.JOB, TokenRole.ADMIN)
    if caller.role not in allowed:
        names = " or ".join(f"`{role}`" for role in allowed)
        raise Rejected(
            f"{type(question).__name__} needs a token with the role {names}; your token has the role `{caller.role}`."
        )


def add_token(connection: Connection, tenant: str, role: TokenRole, now: float, *, row_limit: int | None = None) -> str:
    """Makes the tenant if there is none. Gives the new token, which is nowhere else."""
    if not _NAME.fullmatch(tenant) or len(tenant) > MAX_NAME:
        raise ConfigError(f"tenant {tenant!r}: give a name of letters, digits, `.`, `_` and `-`.")
    known = connection.execute(select(TENANT.c.name).where(TENANT.c.name == tenant)).scalar()
    if known is None:
        connection.execute(TENANT.insert().values(name=tenant, row_limit=row_limit or 0, made_at=now))
    elif row_limit is not None:
        connection.execute(TENANT.update().where(TENANT.c.name == tenant).values(row_limit=row_limit))
    token = secrets.token_urlsafe(TOKEN_BYTES)
    connection.execute(TOKEN.insert().values(hash=hash_of(token), tenant=tenant, role=role.value, made_at=now))
    return token


def remove_tokens(connection: Connection, tenant: str, role: TokenRole | None) -> int:
    """Of one role, or all of the tenant. Its jobs stay. Gives the number of tokens."""
    where = [TOKEN.c.tenant == tenant, *([TOKEN.c.role == role.value] if role is not None else [])]
    return connection.execute(delete(TOKEN).where(*where)).rowcount


def list_tenants(connection: Connection) -> list[TenantRow]:
    roles: dict[str, dict[str, int]] = {}
    for tenant, role, count in connection.execute(
        select(TOKEN.c.tenant, TOKEN.c.role, func.count()).group_by(TOKEN.c.tenant, TOKEN.c.role)
    ):
        roles.setdefault(tenant, {})[role] = count
    limits = {row.name: row.row_limit for row in connection.execute(select(TENANT))}
    counted = select(JOB.c.tenant, func.count().label("jobs")).group_by(JOB.c.tenant)
    jobs = {row.tenant: row.jobs for row in connection.execute(counted)}
    return [
        TenantRow(name=name, roles=roles.get(name, {}), row_limit=limits.get(name, 0), num_jobs=jobs.get(name, 0))
        for name in sorted({*limits, *jobs})
    ]


def _callers_by_hash(connection: Connection) -> dict[str, TokenHolder]:
    found = connection.execute(select(TOKEN.c.hash, TOKEN.c.tenant, TOKEN.c.role))
    return {hash_: TokenHolder(tenant=tenant, role=TokenRole(role)) for hash_, tenant, role in found}
