"""The resources that every server has, each with what is particular about it."""

from __future__ import annotations

import base64
import binascii
import re

from tests.kubernetes.server.access.rights import GROUP as RBAC
from tests.kubernetes.server.answers import Complaints, Json, bad_request
from tests.kubernetes.server.custom.definitions import GROUP as DEFINITIONS
from tests.kubernetes.server.custom.definitions import DefinitionRules
from tests.kubernetes.server.kinds import Kind, Rules, keep_part
from tests.kubernetes.server.pods.rules import PodRules

CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
_DATA_KEY = re.compile(r"^[-._a-zA-Z0-9]+$")
_DATA_KEY_WORDS = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', "
    "regex used for validation is '[-._a-zA-Z0-9]+')"
)


class StatusRules(Rules):
    has_status = True


class SpecCountedRules(Rules):
    has_generation = True


class SecretRules(Rules):
    selectable = ("type",)

    def fill_in(self, body: Json) -> None:
        body.setdefault("type", "Opaque")
        if plain := body.pop("stringData", None):
            data = body.setdefault("data", {})
            data.update({key: base64.b64encode(value.encode()).decode() for key, value in plain.items()})

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        _check_keys(body.get("data") or {}, complaints)
        for key, value in (body.get("data") or {}).items():
            try:
                base64.b64decode(value, validate=True)
            except binascii.Error as error:
                raise bad_request(
                    f'Secret in version "v1" cannot be handled as a Secret: illegal base64 data in {key}: {error}'
                ) from error


class ServiceRules(Rules):
    """Services get an address of the cluster, unless they are headless (`clusterIP: None`)."""

    has_status = True
    returns_deleted = True
    selectable = ("spec.clusterIP", "spec.type")

    def __init__(self) -> None:
        super().__init__()
        self._next = 1

    def fill_in(self, body: Json) -> None:
        spec = body.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or []:
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port.get("port"))

    def begin(self, body: Json) -> None:
        body["status"] = {"loadBalancer": {}}
        spec = body["spec"]
        if spec["type"] == "ClusterIP" and not spec.get("clusterIP"):
            self._next += 1
            spec["clusterIP"] = f"10.96.{self._next // 250}.{self._next % 250 + 1}"
        spec.setdefault("clusterIPs", [spec["clusterIP"]] if spec.get("clusterIP") else [])
        spec.setdefault("internalTrafficPolicy", "Cluster")

    def keep(self, new: Json, old: Json) -> None:
        super().keep(new, old)
        for field in ("clusterIP", "clusterIPs"):
            new["spec"].setdefault(field, old["spec"].get(field))

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        spec = body["spec"]
        if not spec.get("ports") and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
            complaints.required("spec.ports")
        if old is not None and spec.get("clusterIP") != old["spec"].get("clusterIP"):
            complaints.invalid("spec.clusterIPs[0]", [spec.get("clusterIP")], "may not change once set")


class EventRules(Rules):
    selectable = (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "reason",
        "type",
    )


class NamespaceRules(Rules):
    has_status = True
    selectable = ("status.phase",)

    def begin(self, body: Json) -> None:
        body["status"] = {"phase": "Active"}
        body.setdefault("spec", {})["finalizers"] = ["kubernetes"]
        body["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = body["metadata"]["name"]

    def keep(self, new: Json, old: Json) -> None:
        super().keep(new, old)
        keep_part(new, old, "spec")

    def hold(self, body: Json) -> bool:
        body["status"] = {**body.get("status", {}), "phase": "Terminating"}
        return True


class NodeRules(Rules):
    has_status = True
    selectable = ("spec.unschedulable",)

    def begin(self, body: Json) -> None:
        """A node may be created with its status: that is how kubelets register."""

    def fields(self, body: Json) -> dict[str, str]:
        found = super().fields(body)
        found["spec.unschedulable"] = found["spec.unschedulable"] or "false"
        return found


class ConfigMapRules(Rules):
    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        _check_keys(body.get("data") or {}, complaints)


def _check_keys(data: Json, complaints: Complaints) -> None:
    for key in data:
        if not _DATA_KEY.match(key):
            complaints.invalid(f"data[{key}]", key, _DATA_KEY_WORDS)


class ClaimRules(Rules):
    """A claim stays Pending here: no volume is ever made for it by the server."""

    has_status = True
    returns_deleted = True

    def fill_in(self, body: Json) -> None:
        body.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")

    def begin(self, body: Json) -> None:
        body["status"] = {"phase": "Pending"}
        finalizers = body["metadata"].setdefault("finalizers", [])
        if CLAIM_PROTECTION not in finalizers:
            finalizers.append(CLAIM_PROTECTION)


class BudgetRules(Rules):
    has_status = True
    has_generation = True

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        spec = body.get("spec") or {}
        if "minAvailable" in spec and "maxUnavailable" in spec:
            shown = {
                "MinAvailable": spec["minAvailable"],
                "Selector": spec.get("selector"),
                "MaxUnavailable": spec["maxUnavailable"],
            }
            shown["UnhealthyPodEvictionPolicy"] = spec.get("unhealthyPodEvictionPolicy")
            complaints.invalid("spec", shown, "minAvailable and maxUnavailable cannot be both set")


class PolicyRules(Rules):
    has_generation = True

    def fill_in(self, body: Json) -> None:
        spec = body.setdefault("spec", {})
        spec.setdefault("policyTypes", ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])


class BindingRules(Rules):
    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        reference = body.get("roleRef") or {}
        if reference.get("kind") not in ("Role", "ClusterRole"):
            complaints.unsupported("roleRef.kind", reference.get("kind", ""), ["Role", "ClusterRole"])
        if not reference.get("name"):
            complaints.required("roleRef.name")
        if old is not None and reference != old.get("roleRef"):
            shown = {
                "APIGroup": reference.get("apiGroup"),
                "Kind": reference.get("kind"),
                "Name": reference.get("name"),
            }
            complaints.invalid("roleRef", shown, "cannot change roleRef")


_SHORT = {
    "pods": "po",
    "configmaps": "cm",
    "services": "svc",
    "serviceaccounts": "sa",
    "events": "ev",
    "nodes": "no",
    "namespaces": "ns",
    "resourcequotas": "quota",
    "persistentvolumeclaims": "pvc",
    "poddisruptionbudgets": "pdb",
    "priorityclasses": "pc",
    "networkpolicies": "netpol",
    "customresourcedefinitions": "crd",
}


def built_in() -> list[Kind]:
    kinds = _built_in()
    for kind in kinds:
        kind.short_names = (_SHORT[kind.plural],) if kind.plural in _SHORT else ()
    return kinds


def _built_in() -> list[Kind]:
    return [
        Kind("", "v1", "pods", "Pod", PodRules()),
        Kind("", "v1", "configmaps", "ConfigMap", ConfigMapRules()),
        Kind("", "v1", "secrets", "Secret", SecretRules()),
        Kind("", "v1", "services", "Service", ServiceRules()),
        Kind("", "v1", "serviceaccounts", "ServiceAccount", Rules(returns_deleted=True)),
        Kind("", "v1", "events", "Event", EventRules()),
        Kind("", "v1", "resourcequotas", "ResourceQuota", StatusRules(returns_deleted=True)),
        Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", ClaimRules()),
        Kind("", "v1", "nodes", "Node", NodeRules(), namespaced=False),
        Kind("", "v1", "namespaces", "Namespace", NamespaceRules(), namespaced=False),
        Kind("coordination.k8s.io", "v1", "leases", "Lease", Rules()),
        Kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", SpecCountedRules(), namespaced=False),
        Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", BudgetRules()),
        Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", PolicyRules()),
        Kind(RBAC, "v1", "roles", "Role", Rules()),
        Kind(RBAC, "v1", "rolebindings", "RoleBinding", BindingRules()),
        Kind(RBAC, "v1", "clusterroles", "ClusterRole", Rules(), namespaced=False),
        Kind(RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", BindingRules(), namespaced=False),
        Kind(
            DEFINITIONS,
            "v1",
            "customresourcedefinitions",
            "CustomResourceDefinition",
            DefinitionRules(),
            namespaced=False,
        ),
    ]
