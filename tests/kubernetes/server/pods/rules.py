"""What a pod gets by itself (defaults, quality-of-service class), what it may become, and how long it may take to go."""

from __future__ import annotations

import copy

from tests.kubernetes.server.answers import Complaints, Json
from tests.kubernetes.server.kinds import Rules
from tests.kubernetes.server.pods.checks import check_pod
from tests.kubernetes.server.quantities import quantity

UPDATABLE = (
    "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
    "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


class PodRules(Rules):
    has_status = True
    has_generation = True
    returns_deleted = True
    selectable = (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.podIPs",
        "status.nominatedNodeName",
    )

    def fill_in(self, body: Json) -> None:
        spec = body.setdefault("spec", {})
        for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
            _fill_in_container(container)
        for volume in spec.get("volumes") or []:
            _fill_in_volume(volume)
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        if spec["terminationGracePeriodSeconds"] < 0:
            spec["terminationGracePeriodSeconds"] = 1
        spec.setdefault("dnsPolicy", "ClusterFirst")
        spec.setdefault("securityContext", {})
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("enableServiceLinks", True)
        if name := spec.get("serviceAccountName") or spec.get("serviceAccount"):
            spec["serviceAccountName"] = spec["serviceAccount"] = name

    def begin(self, body: Json) -> None:
        super().begin(body)
        body["status"] = {"phase": "Pending", "qosClass": quality(body["spec"])}

    def keep_but_status(self, new: Json, old: Json) -> None:
        """The status path of pods also takes labels and annotations."""
        spec, owners = old["spec"], old["metadata"].get("ownerReferences")
        new["spec"] = spec
        new["metadata"].pop("ownerReferences", None)
        if owners is not None:
            new["metadata"]["ownerReferences"] = owners
        status = new.setdefault("status", {})
        status.setdefault("qosClass", old.get("status", {}).get("qosClass"))

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        check_pod(body["spec"], complaints)
        if old is not None and not complaints.causes:
            _check_change(body["spec"], old["spec"], complaints)

    def grace(self, body: Json, asked: int | None) -> int | None:
        spec = body["spec"]
        if not spec.get("nodeName") or body.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            return 0
        return spec.get("terminationGracePeriodSeconds", 0) if asked is None else asked

    def fields(self, body: Json) -> dict[str, str]:
        found = super().fields(body)
        found["spec.hostNetwork"] = found["spec.hostNetwork"] or "false"
        return found


def _fill_in_container(container: Json) -> None:
    container.setdefault("resources", {})
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    if "imagePullPolicy" not in container:
        image = container.get("image", "").rpartition("/")[2]
        is_latest = "@" not in image and (":" not in image or image.endswith(":latest"))
        container["imagePullPolicy"] = "Always" if is_latest else "IfNotPresent"
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    for variable in container.get("env") or []:
        if field := (variable.get("valueFrom") or {}).get("fieldRef"):
            field.setdefault("apiVersion", "v1")
    limits = container["resources"].get("limits") or {}
    if limits:
        requests = container["resources"].setdefault("requests", {})
        for name, value in limits.items():
            requests.setdefault(name, value)
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe in container:
            defaults = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
            container[probe] = {**defaults, **container[probe]}


def _fill_in_volume(volume: Json) -> None:
    if set(volume) == {"name"}:
        volume["emptyDir"] = {}
    for source in ("secret", "configMap", "downwardAPI", "projected"):
        if source in volume:
            volume[source].setdefault("defaultMode", 420)
    for part in (volume.get("projected") or {}).get("sources") or []:
        if "serviceAccountToken" in part:
            part["serviceAccountToken"].setdefault("expirationSeconds", 3600)


def quality(spec: Json) -> str:
    """Guaranteed, Burstable or BestEffort, from cpu and memory of all containers."""
    asked, limited, equal = False, False, True
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        requests, limits = container["resources"].get("requests") or {}, container["resources"].get("limits") or {}
        for name in ("cpu", "memory"):
            request, limit = quantity(requests.get(name, 0)), quantity(limits.get(name, 0))
            asked, limited = asked or bool(request), limited or bool(limit)
            equal = equal and bool(limit) and request == limit
    if not asked and not limited:
        return "BestEffort"
    return "Guaranteed" if equal else "Burstable"


def _check_change(new: Json, old: Json, complaints: Complaints) -> None:
    """Nearly all of a pod's spec is fixed."""
    for part in ("containers", "initContainers"):
        if len(new.get(part) or []) != len(old.get(part) or []):
            complaints.forbidden(f"spec.{part}", "pod updates may not add or remove containers")
            return
    kept = copy.deepcopy(new)
    for part in ("containers", "initContainers"):
        for container, was in zip(kept.get(part) or [], old.get(part) or [], strict=True):
            container["image"] = was["image"]
    for part in ("activeDeadlineSeconds", "schedulingGates"):
        kept.pop(part, None)
        if part in old:
            kept[part] = old[part]
    was = old.get("tolerations") or []
    if kept.get("tolerations") != was:
        if all(toleration in (kept.get("tolerations") or []) for toleration in was):
            kept["tolerations"] = was
            if not was:
                kept.pop("tolerations")
        else:
            complaints.forbidden(
                "spec.tolerations", "existing toleration can not be modified except its tolerationSeconds"
            )
            return
    if kept != old:
        complaints.forbidden("spec", f"pod updates may not change fields other than {UPDATABLE}\n")
