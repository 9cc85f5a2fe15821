"""
Where the trainers of a node save, and with which classes: the only words about storage that their agent follows.

A snapshot carries a `SaveRequest`: a directory, names of classes, links and trackers. A copy that came from another node carries one
too, and every holder of the job's token can send such a copy. So the agent takes from it what the state is (shard, step, attempt) and not what
to do with it. It writes such a copy only into a place that a trainer of its own node has named, with the storage and the deletion
rules that this trainer named. It never imports or calls what only the copy names.
"""

from __future__ import annotations

import logging

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.persist import SaveRequest
from dlrover.snapshot.storage.user_deletion import DeletionRule

log = logging.getLogger("dlrover.snapshot")

FRAMEWORK_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
"""The trackers of DeepSpeed and Megatron-LM. A copy may name the checkpoint in these, and write no other file beside the checkpoints."""


class NotNamed(DLRoverError):
    """A copy from another node asks for something that no trainer of this node has named."""


class SavePlace(Struct, frozen=True, kw_only=True):
    """Where one checkpointer of a trainer saves, and how."""

    directory: str
    storage: ClassMeta | None = None
    deletion: DeletionRule = DeletionRule()


_DECODER = msgspec.msgpack.Decoder(SavePlace)


def encode_place(place: SavePlace) -> bytes:
    return msgspec.msgpack.encode(place)


class SavePlaces:
    """What the trainers of this node have named since the agent started."""

    def __init__(self) -> None:
        self._named: dict[str, list[SavePlace]] = {}
        """By directory; the newest last."""

    def add(self, encoded: bytes) -> bool:
        """A trainer of this node names a place. Whether it is a new one. Raises NotNamed when the words cannot be read."""
        try:
            place = _DECODER.decode(encoded)
        except msgspec.MsgspecError as error:
            raise NotNamed(
                "The agent does not write a trainer's checkpoints, because the trainer's description of its "
                f"storage cannot be read: {error}"
            ) from error
        known = self._named.setdefault(place.directory, [])
        is_new = place not in known
        if not is_new:
            known.remove(place)
        known.append(place)
        return is_new

    def restrict(self, request: SaveRequest) -> SaveRequest:
        """
        What this node does with a request that came from another node. Raises NotNamed when it may not follow it at all.

        Classes are the same if module, name and arguments are; the path to search is the own trainer's. Deletion rules are the
        own trainer's in any case. Links stay away: they may lead anywhere on this machine.
        """
        _check_name(request)
        here = self._named.get(request.directory)
        if not here:
            raise NotNamed(
                f"The snapshot of another node should be written to {request.directory}, but no trainer of this "
                "node saves there."
            )
        place = next((each for each in reversed(here) if _is_same(each.storage, request.storage)), None)
        if place is None:
            raise NotNamed(
                f"The snapshot of another node names {_words(request.storage)} as the storage of "
                f"{request.directory}. The trainers of this node use {_words(here[-1].storage)}."
            )
        rule = place.deletion
        if request.deletion is not None and not _is_same(rule.custom, request.deletion):
            log.warning(
                "step %d: the snapshot of another node names the deletion strategy %s, which no trainer of "
                "this node uses. The strategy of this node applies.",
                request.step,
                _words(request.deletion),
            )
        if request.links:
            log.warning(
                "step %d: this node writes the checkpoint of another node, but does not make the links %s. For "
                "safety, an agent makes only links that a trainer of its own node asks for. If you need them, "
                "make them by hand.",
                request.step,
                ", ".join(sorted(request.links.values())),
            )
        names = (request.target, str(request.step))
        trackers = {key: text for key, text in request.trackers.items() if key in FRAMEWORK_TRACKERS and text in names}
        return replace(
            request,
            storage=place.storage,
            deletion=rule.custom,
            keep_latest=rule.keep_latest,
            keep_interval=rule.keep_interval,
            keep=rule.keep,
            links={},
            trackers=trackers,
        )


def _check_name(request: SaveRequest) -> None:
    try:
        request.as_attempt()
    except ValueError as error:
        raise NotNamed(f"The snapshot of another node names an invalid checkpoint: {error}") from error


def _is_same(one: ClassMeta | None, other: ClassMeta | None) -> bool:
    if one is None or other is None:
        return one is other
    return replace(one, search_path="") == replace(other, search_path="")


def _words(meta: ClassMeta | None) -> str:
    return "no class" if meta is None else f"{meta.module_path}.{meta.class_name} with {meta.kwargs}"
