"""
All objects of one kind, kept up to date.
"""

from __future__ import annotations

import asyncio

from tests.kubernetes.kubelet.client import Body, Cluster


class Followed:
    """`run` follows; `objects` is by uid; `changed` is set at each change and cleared by its one reader."""

    def __init__(self, cluster: Cluster, path: str, changed: asyncio.Event) -> None:
        self._cluster = cluster
        self._path = path
        self._changed = changed
        self.objects: dict[str, Body] = {}
        self.is_listed = False

    async def run(self) -> None:
        async for kind, seen in self._cluster.follow(self._path):
            if kind == "LISTED":
                self.objects = {each["metadata"]["uid"]: each for each in seen.get("items") or ()}
                self.is_listed = True
            elif kind == "DELETED":
                self.objects.pop(seen["metadata"]["uid"], None)
            elif kind in ("ADDED", "MODIFIED"):
                self.objects[seen["metadata"]["uid"]] = seen
            else:
                continue  # a bookmark
            self._changed.set()
