"""One question to a running Brain, from a terminal."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dlrover.cli.options.brain_settings import ADDRESS, CA_FILE, DEFAULT_PORT, TOKEN_FILE
from dlrover.protocol.addresses import LOOPBACK, TlsConfig, parse_address
from dlrover.protocol.errors import ConfigError, Rejected

if TYPE_CHECKING:
    from dlrover.protocol.messages.brain import BrainQuestion, BrainReply, JobRecord

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds."""


class BrainWay(NamedTuple):
    """How to reach a Brain."""

    address: str
    token: str
    tls: TlsConfig | None


def ask(question: BrainQuestion, kind: type[T], address: str, token_file: str, ca: str) -> T:
    """Raises ConfigError, Rejected or Unavailable."""
    answer = asyncio.run(_ask(question, find_way(address, token_file, ca)))
    if not isinstance(answer, kind):
        raise Rejected(f"Brain answered {type(question).__name__} with {type(answer).__name__}.")
    return answer


def find_way(address: str, token_file: str, ca: str) -> BrainWay:
    """What is not given comes from the environment. Raises ConfigError."""
    text = address or os.environ.get(ADDRESS, "").strip() or f"{LOOPBACK}:{DEFAULT_PORT}"
    parsed = parse_address(text, default_port=DEFAULT_PORT, shown=f"--brain {text}")
    token_file = token_file or os.environ.get(TOKEN_FILE, "")
    token = ""
    if token_file:
        try:
            with open(token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The token file {token_file} for Brain cannot be read: {error}") from error
    ca = ca or os.environ.get(CA_FILE, "")
    return BrainWay(str(parsed), token, TlsConfig(ca=ca) if ca else None)


async def _ask(question: BrainQuestion, way: BrainWay) -> BrainReply:
    from dlrover.protocol.rpc.brain import BrainChannel

    channel = BrainChannel(way.address, token=way.token, tls=way.tls)
    try:
        return await channel.ask(question, timeout=PATIENCE)
    finally:
        await channel.close()


def ask_for_job(uid: str, most: int, tenant: str, address: str, token_file: str, ca: str) -> JobRecord:
    """By its uid, else the newest of that name. Raises as `ask`."""
    from dlrover.protocol.messages.brain import JobAsked, JobList, JobRecord, JobsAsked

    try:
        return ask(JobAsked(uid=uid, most=most, tenant=tenant), JobRecord, address, token_file, ca)
    except Rejected:
        named = ask(JobsAsked(name=uid, most=1, tenant=tenant), JobList, address, token_file, ca).jobs
        if not named:
            raise
    newest = named[0]
    return ask(JobAsked(uid=newest.uid, most=most, tenant=tenant and newest.tenant), JobRecord, address, token_file, ca)


def as_json(answer: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
