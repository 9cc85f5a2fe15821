"""
Settings as an operator writes them: entries in an order, each for the jobs that its scopes fit.

The parameters of the historical algorithms have their old keys (spec 07 §13.6).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete

from dlrover.brain.room import ROOM_KEY
from dlrover.brain.store.reading import find_settings
from dlrover.brain.store.schema import SETTING
from dlrover.brain.store.writing import set_setting
from dlrover.core.scaling.history.parameters import parameters_of
from dlrover.core.scaling.history.selection import ALGORITHM_KEY, ALGORITHMS, OPTIMIZER_KEY, OPTIMIZERS
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.brain import MAX_NAME, MAX_SETTINGS

SCOPES = ("user", "namespace", "cluster", "app", "tenant")


def change_setting(
    connection: Connection,
    position: int,
    values: Sequence[str],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> None:
    """The given parts of an entry are replaced; an empty value removes its key. Raises ConfigError."""
    known = {entry.position: entry for entry in find_settings(connection)}.get(position)
    kept = dict(known.values) if known is not None else {}
    kept |= dict(_pair(each, "--set") for each in values)
    kept = {key: value for key, value in kept.items() if value}
    if len(kept) > MAX_SETTINGS:
        raise ConfigError(f"An entry has at most {MAX_SETTINGS} values.")
    former_include = known.include if known is not None else {}
    former_exclude = known.exclude if known is not None else {}
    set_setting(
        connection,
        position,
        former_include if include is None else _scope(include, "--include"),
        former_exclude if exclude is None else _scope(exclude, "--exclude"),
        kept,
    )


def remove_setting(connection: Connection, position: int) -> bool:
    """Whether there was such an entry."""
    return connection.execute(delete(SETTING).where(SETTING.c.position == position)).rowcount > 0


def warnings_about(values: Sequence[str]) -> tuple[str, ...]:
    """Keys that no algorithm reads, with the one that was probably meant. Raises ConfigError for a value that is wrong."""
    pairs = dict(_pair(each, "--set") for each in values)
    for key, known in ((ALGORITHM_KEY, (*ALGORITHMS, *OPTIMIZERS)), (OPTIMIZER_KEY, OPTIMIZERS)):
        if pairs.get(key) and pairs[key] not in known:
            raise ConfigError(f"--set {key}={pairs[key]}: give one of {', '.join(known)}.")
    if (room := pairs.get(ROOM_KEY)) and not (room.isascii() and room.isdigit()):
        raise ConfigError(f"--set {ROOM_KEY}={room}: give a number of nodes.")
    return parameters_of({key: value for key, value in pairs.items() if value})[1]


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not key or not equals or max(len(key), len(value)) > MAX_NAME or "\0" in text:
        raise ConfigError(f"{option} {text[:60]}: give KEY=VALUE, each of at most {MAX_NAME} characters.")
    return key, value


def _scope(texts: Sequence[str], option: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in texts:
        key, value = _pair(text, option)
        if key not in SCOPES:
            raise ConfigError(f"{option} {text}: give KEY=VALUE,VALUE with one of the keys {', '.join(SCOPES)}.")
        found.setdefault(key, []).extend(each.strip() for each in value.split(",") if each.strip())
    return found
