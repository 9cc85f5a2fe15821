"""
Which checkpoints could go, and deleting them.

The choice is the one that retention makes in a running job, from what lies there. Never chosen: the newest complete checkpoint, whatever a
tracker names, what is without our manifest (unless asked for), and what another process may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from dlrover.cli.checkpoint.listing import CheckpointPlace, Found, Listing, State, aside_target, read_trackers
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.commit import delete_checkpoint, read_global_manifest
from dlrover.snapshot.storage.retention import KeepInterval, KeepLatest
from dlrover.snapshot.storage.storage import join, parent_of

LEFTOVER_AGE = 3600.0
"""Seconds after which an attempt to which no process has written counts as dead: six times what a commit waits for its ranks."""
_ATTEMPTS = (State.STAGED, State.SET_ASIDE, State.INCOMPLETE, State.LEFTOVER)


class Rules(Struct, frozen=True, kw_only=True):
    keep_latest: int | None = None
    keep_interval: int | None = None
    """A checkpoint stays if either of the two keeps it; without both only leftovers go."""
    leftover_age: float = LEFTOVER_AGE
    has_foreign: bool = False
    """Also judge checkpoints without our manifest, older than the one that their tracker names."""

    def __post_init__(self) -> None:
        for name, value in (("--keep-latest", self.keep_latest), ("--keep-interval", self.keep_interval)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: give 1 or more.")
        if self.leftover_age < 0:
            raise ConfigError(f"--older-than {self.leftover_age:g}: give 0 or more seconds.")


class Choice(Struct, frozen=True, kw_only=True):
    found: Found
    is_going: bool
    reason: str


def choose(listing: Listing, rules: Rules, now: float) -> list[Choice]:
    """One choice for each thing in the listing, in its order."""
    ours = [each for each in listing.checkpoints if each.is_whole and each.step is not None]
    judged = ours + ([each for each in listing.checkpoints if _is_foreign(each)] if rules.has_foreign else [])
    expendable = _expendable(sorted({each.step for each in judged if each.step is not None}), rules)
    newest = max((each.step for each in ours if each.step is not None), default=None)
    tracked = max((each.step for each in judged if each.trackers and each.step is not None), default=None)
    names = {each.name: each for each in listing.checkpoints}
    choices = []
    for each in listing.checkpoints:
        is_going, reason = _judge(each, rules, now, expendable, newest, tracked, names)
        choices.append(Choice(found=each, is_going=is_going, reason=reason))
    return choices


def delete(
    place: CheckpointPlace, choices: Sequence[Choice], on_deleted: Callable[[Found], None] = lambda found: None
) -> int:
    """
    Delete what is going; returns the bytes. A job may be saving meanwhile, so each is looked at once more before it goes.

    Raises ConfigError for the first that cannot be deleted.
    """
    freed = 0
    for choice in choices:
        if not choice.is_going or _has_changed(place, choice.found):
            continue
        try:
            if choice.found.state is State.LEFTOVER:
                place.storage.remove_file(choice.found.path)
            else:
                delete_checkpoint(place.storage, choice.found.path)
        except OSError as error:
            raise ConfigError(f"{choice.found.path} could not be deleted: {error.strerror or error}.") from error
        freed += choice.found.size_bytes
        on_deleted(choice.found)
    return freed


def _judge(
    each: Found,
    rules: Rules,
    now: float,
    expendable: set[int],
    newest: int | None,
    tracked: int | None,
    names: dict[str, Found],
) -> tuple[bool, str]:
    if each.trackers:
        return False, f"the tracker {', '.join(each.trackers)} names it"
    if each.state in _ATTEMPTS and not _is_only_copy(each, names):
        return _judge_leftover(each, rules, now)
    if each.is_whole and each.step is not None:
        if each.step == newest:
            return False, "the newest complete checkpoint"
        return (True, "none of your rules keeps it") if each.step in expendable else (False, "your rules keep it")
    if each.state is State.DAMAGED:
        return False, "damaged: check it with `dlrover checkpoint verify`, and delete it by hand"
    if _is_foreign(each) and rules.has_foreign:
        if tracked is None or each.step is None or each.step > tracked:
            return False, "no tracker names a newer checkpoint"
        return (True, "none of your rules keeps it") if each.step in expendable else (False, "your rules keep it")
    return False, "it has no DLRover manifest"


def _judge_leftover(each: Found, rules: Rules, now: float) -> tuple[bool, str]:
    if each.saved_at is None:
        return False, "its age is unknown"
    age = now - each.saved_at
    if age < rules.leftover_age:
        return False, f"last written {age:.0f} s ago: perhaps a running job still writes it"
    return True, "an unfinished save left it"


def _is_only_copy(each: Found, names: dict[str, Found]) -> bool:
    """A whole checkpoint that lies under a passing name, because the power went while directories changed places."""
    target = names.get(aside_target(each.name) or "")
    return each.is_whole and (target is None or not target.is_whole)


def _is_foreign(each: Found) -> bool:
    return each.state is State.FOREIGN and each.step is not None


def _expendable(steps: list[int], rules: Rules) -> set[int]:
    """What no rule keeps."""
    if rules.keep_latest is None and rules.keep_interval is None:
        return set()
    going = set(steps)
    if rules.keep_latest is not None:
        going &= set(KeepLatest(rules.keep_latest).expendable(steps))
    if rules.keep_interval is not None:
        going &= set(KeepInterval(rules.keep_interval).expendable(steps))
    return going


def _has_changed(place: CheckpointPlace, found: Found) -> bool:
    """Another process has committed, replaced or tracked it since we looked."""
    if found.state is State.LEFTOVER:
        return not place.is_file(found.path)
    if _is_whole(place, found.path) != found.is_whole:
        return True
    directory = parent_of(found.path)
    if found.state in _ATTEMPTS:  # what a tracker means by this step is another directory, or this one would not go
        target = aside_target(found.name)
        return found.is_whole and (target is None or not _is_whole(place, join(directory, target)))
    trackers = read_trackers(place, directory)
    return any(content in (found.name, str(found.step)) for content in trackers.values())


def _is_whole(place: CheckpointPlace, path: str) -> bool:
    return read_global_manifest(place.storage, path) is not None
