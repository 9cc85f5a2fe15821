"""
Storage saves that this rank asked for, until it is known what became of them.

The agent tells. Where none does (a shard of another process without an agent), the tracker can only be looked at.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from dlrover.snapshot.storage.commit import latest_step, read_global_manifest
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.persist import SaveRequest
from dlrover.snapshot.storage.storage import LocalStorage, join
from dlrover.snapshot.storage.user_storage import storage_of
from dlrover.trainer.torch.flash_checkpoint.saving.outlets import SaveOutlet

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

_TRACKER_LOOK_AFTER = 0.1


class StorageSaves:
    """Of one engine."""

    def __init__(self, outlet: SaveOutlet, writing: threading.Lock) -> None:
        """`writing` guards the outlet."""
        self._outlet = outlet
        self._writing = writing
        self._newest: SaveRequest | None = None
        self._unsettled: dict[str, int] = {}
        """Attempts that this rank commits and of which the end is not known yet, with their step."""

    def add(self, request: SaveRequest) -> None:
        """It is in memory and the outlet knows of it. Called with the lock."""
        self._newest = request
        self._forget_settled()
        if request.is_committer:
            self._unsettled[request.attempt] = request.step

    def wait_for_newest(self, timeout: float) -> bool:
        """Whether it is committed; False as soon as it is known to have failed."""
        wanted = self._newest
        if wanted is None:
            return True
        deadline = time.monotonic() + timeout
        while True:
            with self._writing:
                self._outlet.listen()
                news = self._outlet.settled.get(wanted.attempt)
            if news is not None and not news.is_committed:
                log.warning("step %d was not committed: %s", wanted.step, news.reason)
                return False
            if news is not None or _is_committed(wanted):
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning(
                    "step %d was not committed within %g s; it may still be committed later",
                    wanted.step,
                    timeout,
                )
                return False
            self._outlet.wait_for_news(min(left, _TRACKER_LOOK_AFTER))

    def wait_for_all(self, timeout: float) -> bool:
        """Until the end of each that this rank commits is known; whether it is."""
        deadline = time.monotonic() + timeout
        while True:
            with self._writing:
                self._outlet.listen()
                self._forget_settled()
            left = deadline - time.monotonic()
            if not self._unsettled or left <= 0:
                break
            self._outlet.wait_for_news(min(left, _TRACKER_LOOK_AFTER))
        if self._unsettled:
            log.warning(
                "steps %s were neither committed nor given up within %g s", sorted(self._unsettled.values()), timeout
            )
        return not self._unsettled

    def _forget_settled(self) -> None:
        for attempt in self._unsettled.keys() & self._outlet.settled.keys():
            del self._unsettled[attempt]


def _is_committed(request: SaveRequest) -> bool:
    """As the storage says. The attempt is compared too: the step may have been saved before."""
    directory = request.directory
    storage = storage_of(directory, request.storage)
    try:
        if latest_step(storage, directory) != request.step:
            return False
        manifest = read_global_manifest(storage, join(directory, request.target))
        if manifest is None or manifest.attempt != request.attempt:
            return False
        last = list(request.trackers.items())[-1:]  # the framework's own, written after ours, one by one
        # Links come last of all. The committer makes those of its own request: with several shards only those that all requests name.
        is_linked_here = isinstance(storage, LocalStorage) and (request.num_shards == 1 or len(request.links) > 1)
        folder = join(directory, request.target)
        links = request.links.items() if is_linked_here else ()
        if not all(os.path.samefile(join(folder, path), link) for path, link in links):
            return False
        return all(storage.read(join(directory, name)) == content.encode() for name, content in last)
    except FileNotFoundError:
        return False
    except (OSError, ManifestInvalid) as error:
        log.info("The tracker in %s cannot be read: %s", directory, error)
        return False
