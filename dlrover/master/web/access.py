"""
Who may look at the page, and who may act on the job.

The job's token opens everything. From it a second one is derived that only lets people look, so a link with it can be shared; the first
cannot be computed from it. A browser is given neither: it gets a signed cookie that says what it may do and until when, so that a
master that was started again still knows it, and nothing has to be stored.

Links for opening the page are valid for a few minutes and once: links stay behind in histories and logs.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping

LINK_SECONDS = 600
"""For which a link to open the page is valid."""
SESSION_SECONDS = 12 * 3600
"""For which a browser is remembered: a working day."""
MAX_USED_LINKS = 10_000


class Scope(enum.StrEnum):
    READ = "read"
    ACT = "act"


class Access:
    """`clock` gives seconds of the wall clock: links are made in other processes."""

    def __init__(self, token: str, *, clock: Callable[[], float] = time.time) -> None:
        assert token, "a page without a token would be open to every user"
        self._token = token
        self._read_only = read_only_token(token)
        self._clock = clock
        self._used: dict[str, int] = {}  # links by when they would end

    def scope_of_token(self, given: str) -> Scope | None:
        """What a token in an Authorization header allows."""
        if _is_equal(given, self._token):
            return Scope.ACT
        return Scope.READ if _is_equal(given, self._read_only) else None

    def scope_of_link(self, given: str) -> Scope | None:
        """The same for what a link carries. One that was made for a single use is used up by it."""
        scope = self.scope_of_token(given)
        if scope is not None:
            return scope
        now = round(self._clock())
        self._used = {link: until for link, until in self._used.items() if until > now}
        if not self._is_valid(given, "link", now) or given in self._used or len(self._used) >= MAX_USED_LINKS:
            return None
        self._used[given] = int(given.split(".")[1])
        return Scope.ACT

    @property
    def cookie_name(self) -> str:
        """Of this job alone: browsers keep one jar for all ports of a host, where other jobs have pages of their own."""
        return f"dlrover_session_{_sign(self._token, 'cookie name', '')[:12]}"

    def cookie(self, scope: Scope) -> str:
        return _signed(self._token, "cookie", scope.value, round(self._clock()) + SESSION_SECONDS)

    def scope_of_cookie(self, given: str) -> Scope | None:
        if not self._is_valid(given, "cookie", round(self._clock())):
            return None
        return Scope(given.split(".")[0])

    def _is_valid(self, given: str, purpose: str, now: int) -> bool:
        parts = given.split(".")
        if (
            len(parts) != 4
            or parts[0] not in (Scope.READ, Scope.ACT)
            or not parts[1].isascii()
            or not parts[1].isdigit()
        ):
            return False
        expected = _sign(self._token, purpose, ".".join(parts[:3]))
        return _is_equal(parts[3], expected) and int(parts[1]) > now


def read_only_token(token: str) -> str:
    """Lets people look, and nothing else."""
    return _sign(token, "read-only", "")


def one_time_link(token: str, now: float) -> str:
    """What to put behind `?token=`; the browser that opens it first may act on the job."""
    return _signed(token, "link", Scope.ACT.value, round(now) + LINK_SECONDS)


def bearer_of(headers: Mapping[str, str]) -> str:
    """What a program shows; empty: nothing."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def is_own_origin(origin: str, host: str, scheme: str) -> bool:
    """Whether a request comes from a page that we served: a browser always says where an action comes from."""
    return bool(host) and origin == f"{scheme}://{host}"


def _signed(token: str, purpose: str, scope: str, until: int) -> str:
    content = f"{scope}.{until}.{secrets.token_hex(16)}"
    return f"{content}.{_sign(token, purpose, content)}"


def _sign(token: str, purpose: str, content: str) -> str:
    key = hashlib.sha256(f"dlrover dashboard {purpose}\0{token}".encode()).digest()
    return hmac.new(key, content.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
