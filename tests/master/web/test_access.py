"""Who may look, who may act, and for how long."""

from __future__ import annotations

import pytest

from dlrover.master.web.access import (
    LINK_SECONDS,
    SESSION_SECONDS,
    Access,
    Scope,
    is_own_origin,
    one_time_link,
    read_only_token,
)

TOKEN = "a long and secret token"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(clock: Clock) -> Access:
    return Access(TOKEN, clock=clock)


def test_the_token_acts_and_what_is_derived_from_it_only_looks(access: Access) -> None:
    assert access.scope_of_token(TOKEN) is Scope.ACT
    assert access.scope_of_token(read_only_token(TOKEN)) is Scope.READ
    assert TOKEN not in read_only_token(TOKEN)
    for stranger in ("", TOKEN[:-1], read_only_token("another"), "ünï\udcffcode"):
        assert access.scope_of_token(stranger) is None


def test_a_link_works_once_and_not_for_long(access: Access, clock: Clock) -> None:
    link = one_time_link(TOKEN, clock.now)
    assert access.scope_of_token(link) is None, "it is no token"
    assert access.scope_of_link(link) is Scope.ACT
    assert access.scope_of_link(link) is None
    late = one_time_link(TOKEN, clock.now)
    clock.now += LINK_SECONDS
    assert access.scope_of_link(late) is None


def test_a_cookie_is_believed_by_the_next_master_too_until_it_ends(access: Access, clock: Clock) -> None:
    cookie = access.cookie(Scope.READ)
    assert Access(TOKEN, clock=clock).scope_of_cookie(cookie) is Scope.READ
    assert Access("another", clock=clock).scope_of_cookie(cookie) is None
    clock.now += SESSION_SECONDS
    assert access.scope_of_cookie(cookie) is None


def test_nobody_makes_more_of_a_cookie_or_a_cookie_of_a_link(access: Access, clock: Clock) -> None:
    cookie = access.cookie(Scope.READ)
    _, until, nonce, mac = cookie.split(".")
    for forged in (
        f"act.{until}.{nonce}.{mac}",
        f"read.{int(until) + 1}.{nonce}.{mac}",
        f"root.{until}.{nonce}.{mac}",
        f"read.x.{nonce}.{mac}",
        f"read.²³.{nonce}.{mac}",
        "....",
        one_time_link(TOKEN, clock.now),
    ):
        assert access.scope_of_cookie(forged) is None
    assert access.scope_of_link(access.cookie(Scope.ACT)) is None


def test_only_our_own_page_is_our_origin() -> None:
    assert is_own_origin("http://127.0.0.1:8080", "127.0.0.1:8080", "http")
    for origin in ("", "null", "http://evil.example", "https://127.0.0.1:8080", "http://127.0.0.1:80"):
        assert not is_own_origin(origin, "127.0.0.1:8080", "http")
    assert not is_own_origin("http://", "", "http")
