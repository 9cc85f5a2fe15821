"""Admission of pods: service account, priority, default tolerations. The words are those of a real server."""

from __future__ import annotations

import secrets

from tests.kubernetes.server.answers import Json, forbidden
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry

TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_SYSTEM_CLASSES = {"system-cluster-critical": 2000000000, "system-node-critical": 2000001000}


class PodAdmission:
    def __init__(self, registry: Registry, *, accounts: bool) -> None:
        self._store = registry.store
        self._accounts = accounts
        """False: pods need no service account, as in a server that runs without that plugin."""
        registry.mutating.append(self.admit)

    def admit(self, kind: Kind, body: Json, old: Json | None, options: Options) -> None:
        if kind.resource != ("", "pods"):
            return
        if old is not None:
            for field in ("priority", "preemptionPolicy"):
                if field in old["spec"]:
                    body["spec"].setdefault(field, old["spec"][field])
            return
        if self._accounts:
            self._admit_account(body)
        self._admit_priority(body)
        _tolerate(body["spec"])

    def _admit_account(self, body: Json) -> None:
        spec, meta = body["spec"], body["metadata"]
        name = spec.get("serviceAccountName") or "default"
        spec["serviceAccountName"] = spec["serviceAccount"] = name
        account = self._store.get(("", "serviceaccounts"), (meta["namespace"], name))
        if account is None:
            why = f'error looking up service account {meta["namespace"]}/{name}: serviceaccount "{name}" not found'
            raise forbidden("pods", "", meta.get("name", ""), why)
        if spec.get("automountServiceAccountToken", account.body.get("automountServiceAccountToken", True)):
            _mount_token(spec)

    def _admit_priority(self, body: Json) -> None:
        spec = body["spec"]
        name = spec.get("priorityClassName")
        value, policy = 0, "PreemptLowerPriority"
        if name:
            record = self._store.get(("scheduling.k8s.io", "priorityclasses"), ("", name))
            if record is not None:
                value, policy = record.body["value"], record.body.get("preemptionPolicy", policy)
            elif name in _SYSTEM_CLASSES:
                value = _SYSTEM_CLASSES[name]
            else:
                raise forbidden(
                    "pods", "", body["metadata"].get("name", ""), f"no PriorityClass with name {name} was found"
                )
        else:
            for record in self._store.every(("scheduling.k8s.io", "priorityclasses")):
                if record.body.get("globalDefault"):
                    spec["priorityClassName"], value = record.body["metadata"]["name"], record.body["value"]
                    policy = record.body.get("preemptionPolicy", policy)
        if spec.get("priority", value) != value:
            why = (
                f"the integer value of priority ({spec['priority']}) must not be provided in pod spec; "
                f"priority admission controller computed {value} from the given PriorityClass name"
            )
            raise forbidden("pods", "", body["metadata"].get("name", ""), why)
        spec["priority"] = value
        spec.setdefault("preemptionPolicy", policy)


def _mount_token(spec: Json) -> None:
    """A projected volume with token, certificate and namespace, in each container that has nothing at that path."""
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    bare = [
        one
        for one in containers
        if all(mount.get("mountPath") != TOKEN_PATH for mount in one.get("volumeMounts") or [])
    ]
    if not bare:
        return
    name = f"kube-api-access-{''.join(secrets.choice('bcdfghjklmnpqrstvwxz2456789') for _ in range(5))}"
    sources: list[Json] = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]
            }
        },
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": name, "projected": {"sources": sources, "defaultMode": 420}},
    ]
    for container in bare:
        mount = {"name": name, "readOnly": True, "mountPath": TOKEN_PATH}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]


def _tolerate(spec: Json) -> None:
    """A machine that is not ready or unreachable keeps its pods for 300 s, unless the pod says otherwise."""
    tolerations = spec.get("tolerations") or []
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if any(one.get("key", key) == key and one.get("effect", "NoExecute") == "NoExecute" for one in tolerations):
            continue
        added = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        tolerations = [*tolerations, added]
    spec["tolerations"] = tolerations
