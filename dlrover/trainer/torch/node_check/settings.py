"""
What the agent tells a node check task, read once from the environment.

The usual variables of torch say which rank this is and where the others are. The rest is ours, and the `MOCK_` ones
inject faults for tests and drills.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, MutableMapping

from msgspec import Struct

DEFAULT_TIMEOUT = 180.0
"""Seconds. Long enough for the slowest device to start, short enough that an agent's own limit of 300 s never strikes."""


class FaultKind(enum.StrEnum):
    """What `MOCK_ERR_KIND` may ask for."""

    COMMUNICATION = "communication"
    """Fail after the collective."""
    COMPUTE = "compute"
    SETUP = "setup"
    HANG = "hang"
    """Never take part in the collective, as a frozen node does."""


class Faults(Struct, frozen=True, kw_only=True):
    """What is to go wrong here on purpose."""

    kind: FaultKind | None = None
    delay: float = 0.0
    """Seconds that the computation takes longer."""


class CheckSettings(Struct, frozen=True, kw_only=True):
    global_rank: int
    local_rank: int
    """Which device. Always 0 under --virtual-local-rank."""
    slot: int
    """Position on this node, also under --virtual-local-rank: the name of the result file."""
    world_size: int
    coordinator_host: str
    coordinator_port: int
    timeout: float = DEFAULT_TIMEOUT
    directory: str = ""
    """Where the result goes; empty: nowhere."""
    faults: Faults = Faults()


def read(environ: Mapping[str, str]) -> CheckSettings:
    """Raises ValueError with a sentence if something is missing or makes no sense."""
    local_rank = _number(environ, "LOCAL_RANK")
    slot = _number(environ, "DLROVER_LOCAL_RANK") if environ.get("DLROVER_LOCAL_RANK") else local_rank
    settings = CheckSettings(
        global_rank=_number(environ, "RANK"),
        local_rank=local_rank,
        slot=slot,
        world_size=_number(environ, "WORLD_SIZE"),
        coordinator_host=_word(environ, "MASTER_ADDR"),
        coordinator_port=_number(environ, "MASTER_PORT"),
        timeout=_timeout(environ),
        directory=environ.get("DLROVER_CHECK_DIR", ""),
        faults=_faults(environ, slot),
    )
    if not 0 <= settings.global_rank < settings.world_size or settings.local_rank < 0:
        raise ValueError(
            f"RANK={settings.global_rank} WORLD_SIZE={settings.world_size} LOCAL_RANK={settings.local_rank}: a "
            "rank must be at least 0 and below the world size."
        )
    return settings


def apply_library_settings(environ: MutableMapping[str, str], name: str) -> None:
    """`NCCL_SETTINGS=K=V,K=V` and its relatives: variables for the communication library, set only for the check."""
    for pair in filter(None, (part.strip() for part in environ.get(name, "").split(","))):
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"{name}: {pair!r} is not NAME=VALUE; separate several by commas.")
        environ[key.strip()] = value.strip()


def _faults(environ: Mapping[str, str], slot: int) -> Faults:
    kind = None
    if _is_meant(environ, "MOCK_ERR", slot):
        word = environ.get("MOCK_ERR_KIND", "") or FaultKind.COMMUNICATION
        if word not in list(FaultKind):
            raise ValueError(f"MOCK_ERR_KIND={word}: give one of {', '.join(FaultKind)}.")
        kind = FaultKind(word)
    delay = 0.0
    if _is_meant(environ, "MOCK_STRAGGLER", slot):
        delay = _seconds(environ, "MOCK_STRAGGLER_SECONDS", 5.0)
    return Faults(kind=kind, delay=max(delay, 0.0))


def _is_meant(environ: Mapping[str, str], prefix: str, slot: int) -> bool:
    """`<prefix>_RANK` names local ranks; `<prefix>_NODE_RANK`, if given, the only nodes to which that applies."""
    if slot not in _numbers(environ, f"{prefix}_RANK"):
        return False
    nodes = _numbers(environ, f"{prefix}_NODE_RANK")
    if not environ.get(f"{prefix}_NODE_RANK", "").strip():
        return True
    return bool(environ.get("NODE_RANK", "").strip()) and _number(environ, "NODE_RANK") in nodes


def _numbers(environ: Mapping[str, str], name: str) -> list[int]:
    words = [word.strip() for word in environ.get(name, "").split(",")]
    try:
        return [int(word) for word in words if word]
    except ValueError:
        raise ValueError(f"{name}={environ[name]}: give a number, or several separated by commas.") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    word = _word(environ, name)
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{name}={word} is not a number.") from None


def _word(environ: Mapping[str, str], name: str) -> str:
    word = environ.get(name, "").strip()
    if not word:
        raise ValueError(
            f"{name} is not set. dlrover-run sets it for the node check. To run the check by hand, use torchrun -m."
        )
    return word


def _timeout(environ: Mapping[str, str]) -> float:
    seconds = _seconds(environ, "NETWORK_CHECK_TIMEOUT", DEFAULT_TIMEOUT)
    return seconds if seconds > 0 else DEFAULT_TIMEOUT


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    word = environ.get(name, "").strip()
    try:
        seconds = float(word) if word else default
    except ValueError:
        raise ValueError(f"{name}={word} is not a number of seconds.") from None
    if not abs(seconds) < 1e6:
        raise ValueError(f"{name}={word}: give less than a million seconds.")
    return seconds
