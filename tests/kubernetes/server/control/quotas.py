"""ResourceQuota for pods: what a namespace uses, and the refusal of what exceeds it."""

from __future__ import annotations

from fractions import Fraction

from tests.kubernetes.server.answers import Json, forbidden
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.quantities import quantity, shown_quantity
from tests.kubernetes.server.registry import Options, Registry, parse_stamp
from tests.kubernetes.server.store import Record

_PODS = ("", "pods")
_QUOTAS = ("", "resourcequotas")


class Quotas:
    """Refuses pods beyond a quota and keeps `status.used`. The status is right at once: there is no lag of a controller."""

    def __init__(self, registry: Registry, quota_kind: Kind) -> None:
        self._registry = registry
        self._kind = quota_kind
        registry.validating.append(self.admit)
        registry.after.append(self.note)

    def admit(self, kind: Kind, body: Json, old: Json | None, options: Options) -> None:
        if kind.resource != _PODS or old is not None:
            return
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        for record in self._registry.store.every(_QUOTAS, namespace):
            hard = {key: quantity(value) for key, value in (record.body["spec"].get("hard") or {}).items()}
            asked = {key: value for key, value in _usage(body).items() if key in hard}
            missing = sorted(key for key in hard if key not in asked and key in _COMPUTE)
            if missing:
                containers = ",".join(sorted(one["name"] for one in body["spec"]["containers"]))
                sentences = "; ".join(f"must specify {key} for: {containers}" for key in missing)
                raise forbidden("pods", "", name, f"failed quota: {record.body['metadata']['name']}: {sentences}")
            used = self._used(namespace)
            over = sorted(key for key, value in asked.items() if used.get(key, Fraction()) + value > hard[key])
            if over:
                quota = record.body["metadata"]["name"]
                requested, taken, most = (_listed(part, over) for part in (asked, used, hard))
                why = f"exceeded quota: {quota}, requested: {requested}, used: {taken}, limited: {most}"
                raise forbidden("pods", "", name, why)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        record = after or before
        if record is None or kind.resource not in (_PODS, _QUOTAS):
            return
        namespace = record.key[0]
        if (
            kind.resource == _PODS
            and before is not None
            and after is not None
            and _counts(before.body) == _counts(after.body)
        ):
            return
        for quota in self._registry.store.every(_QUOTAS, namespace):
            self._write(quota)

    def _write(self, quota: Record) -> None:
        hard = quota.body["spec"].get("hard") or {}
        used = self._used(quota.key[0])
        status = {"hard": hard, "used": {key: shown_quantity(used.get(key, Fraction())) for key in hard}}
        if quota.body.get("status") != status:
            self._registry.change(
                self._kind,
                quota.key,
                lambda body: {**body, "status": status},
                Options(manager="control-plane", subresource="status"),
            )

    def _used(self, namespace: str) -> dict[str, Fraction]:
        total: dict[str, Fraction] = {}
        for pod in self._registry.store.every(_PODS, namespace):
            if _counts(pod.body) and not self._is_overdue(pod.body):
                for key, value in _usage(pod.body).items():
                    total[key] = total.get(key, Fraction()) + value
        return total

    def _is_overdue(self, body: Json) -> bool:
        """A pod that is past its grace on a dead machine holds no quota."""
        at = body["metadata"].get("deletionTimestamp")
        return at is not None and parse_stamp(at) < self._registry.clock()


_COMPUTE = {"cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"}


def _counts(body: Json) -> bool:
    return body.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _usage(body: Json) -> dict[str, Fraction]:
    used = {"pods": Fraction(1), "count/pods": Fraction(1)}
    for container in body["spec"].get("containers") or []:
        for part in ("requests", "limits"):
            for name, text in (container["resources"].get(part) or {}).items():
                keys = [f"{part}.{name}", name] if part == "requests" else [f"{part}.{name}"]
                for key in keys:
                    used[key] = used.get(key, Fraction()) + quantity(text)
    return used


def _listed(values: dict[str, Fraction], keys: list[str]) -> str:
    return ",".join(f"{key}={shown_quantity(values.get(key, Fraction()))}" for key in keys)
