"""Claims: a claim that a pod uses stays until that pod has ended."""

from __future__ import annotations

import asyncio

from tests.kubernetes.server.answers import Json
from tests.kubernetes.server.built_in import CLAIM_PROTECTION
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry
from tests.kubernetes.server.store import ObjectKey, Record

_CLAIMS = ("", "persistentvolumeclaims")
_PODS = ("", "pods")


class Claims:
    def __init__(self, registry: Registry, claim_kind: Kind) -> None:
        self._registry = registry
        self._kind = claim_kind
        registry.after.append(self.note)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        record = after or before
        if record is None or kind.resource not in (_CLAIMS, _PODS):
            return
        for claim in self._registry.store.every(_CLAIMS, record.key[0]):
            meta = claim.body["metadata"]
            if "deletionTimestamp" in meta and CLAIM_PROTECTION in (meta.get("finalizers") or []):
                asyncio.get_running_loop().call_soon(self._release, claim.key)

    def _release(self, key: ObjectKey) -> None:
        claim = self._registry.store.get(_CLAIMS, key)
        if claim is None or any(_uses(pod.body, key[1]) for pod in self._registry.store.every(_PODS, key[0])):
            return

        def make(body: Json) -> Json:
            left = [name for name in body["metadata"].get("finalizers") or [] if name != CLAIM_PROTECTION]
            body["metadata"]["finalizers"] = left
            return body

        self._registry.change(self._kind, key, make, Options(manager="control-plane"))


def _uses(pod: Json, claim: str) -> bool:
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return False
    volumes = pod["spec"].get("volumes") or []
    return any((volume.get("persistentVolumeClaim") or {}).get("claimName") == claim for volume in volumes)
