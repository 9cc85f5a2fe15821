"""Complaints about a pod's spec, in the words and the order of a real server."""

from __future__ import annotations

from tests.kubernetes.server.answers import Complaints, Json, shown
from tests.kubernetes.server.metadata import label_faults, label_value_faults, qualified_faults, subdomain_faults
from tests.kubernetes.server.quantities import quantity, shown_quantity

_CONTAINER_RESOURCES = {"cpu", "memory", "ephemeral-storage"}
_STANDARD = _CONTAINER_RESOURCES | {
    "pods",
    "services",
    "storage",
    "limits.cpu",
    "requests.cpu",
    "limits.memory",
    "requests.memory",
}


def check_pod(spec: Json, complaints: Complaints) -> None:
    volumes = _check_volumes(spec.get("volumes") or [], complaints)
    containers = spec.get("containers") or []
    if not containers:
        complaints.required("spec.containers")
    _check_containers(containers, "spec.containers", volumes, complaints)
    _check_containers(spec.get("initContainers") or [], "spec.initContainers", volumes, complaints)
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        complaints.unsupported("spec.restartPolicy", spec["restartPolicy"], ["Always", "OnFailure", "Never"])
    if spec["dnsPolicy"] not in ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"):
        complaints.unsupported(
            "spec.dnsPolicy", spec["dnsPolicy"], ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]
        )
    for key, value in (spec.get("nodeSelector") or {}).items():
        for fault in qualified_faults(key):
            complaints.invalid("spec.nodeSelector", key, fault)
        for fault in label_value_faults(value):
            complaints.invalid("spec.nodeSelector", value, fault)
    _check_affinity(spec.get("affinity") or {}, complaints)
    for field, faults in (
        ("serviceAccountName", subdomain_faults),
        ("nodeName", subdomain_faults),
        ("hostname", label_faults),
        ("subdomain", label_faults),
        ("priorityClassName", subdomain_faults),
    ):
        if value := spec.get(field):
            for fault in faults(value):
                complaints.invalid(f"spec.{field}", value, fault)
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= 2147483647:
        complaints.invalid("spec.activeDeadlineSeconds", deadline, "must be between 1 and 2147483647, inclusive")
    _check_tolerations(spec.get("tolerations") or [], complaints)


def _check_volumes(volumes: list[Json], complaints: Complaints) -> set[str]:
    names: set[str] = set()
    for index, volume in enumerate(volumes):
        field = f"spec.volumes[{index}].name"
        name = volume.get("name", "")
        if not name:
            complaints.required(field)
        elif faults := label_faults(name):
            for fault in faults:
                complaints.invalid(field, name, fault)
        elif name in names:
            complaints.duplicate(field, name)
        names.add(name)
    return names


def _check_containers(containers: list[Json], path: str, volumes: set[str], complaints: Complaints) -> None:
    names: set[str] = set()
    for index, container in enumerate(containers):
        at = f"{path}[{index}]"
        name = container.get("name", "")
        if not name:
            complaints.required(f"{at}.name")
        for fault in label_faults(name) if name else []:
            complaints.invalid(f"{at}.name", name, fault)
        if not container.get("image"):
            complaints.required(f"{at}.image")
        _check_ports(container.get("ports") or [], f"{at}.ports", complaints)
        _check_env(container.get("env") or [], f"{at}.env", complaints)
        _check_mounts(container.get("volumeMounts") or [], f"{at}.volumeMounts", volumes, complaints)
        policy = container["imagePullPolicy"]
        if policy not in ("Always", "IfNotPresent", "Never"):
            complaints.unsupported(f"{at}.imagePullPolicy", policy, ["Always", "IfNotPresent", "Never"])
        _check_resources(container["resources"], f"{at}.resources", complaints)
        if name in names:
            complaints.duplicate(f"{at}.name", name)
        names.add(name)


def _check_ports(ports: list[Json], path: str, complaints: Complaints) -> None:
    for index, port in enumerate(ports):
        number = port.get("containerPort", 0)
        if number == 0:
            complaints.required(f"{path}[{index}].containerPort")
        elif not 1 <= number <= 65535:
            complaints.invalid(f"{path}[{index}].containerPort", number, "must be between 1 and 65535, inclusive")


def _check_env(env: list[Json], path: str, complaints: Complaints) -> None:
    for index, variable in enumerate(env):
        if not variable.get("name"):
            complaints.required(f"{path}[{index}].name")
        elif "=" in variable["name"] or not variable["name"].isascii() or not variable["name"].isprintable():
            words = "a valid environment variable name must consist only of printable ASCII characters other than '='"
            complaints.invalid(f"{path}[{index}].name", variable["name"], words)
        if variable.get("value") and variable.get("valueFrom"):
            complaints.invalid(f"{path}[{index}].valueFrom", "", "may not be specified when `value` is not empty")


def _check_mounts(mounts: list[Json], path: str, volumes: set[str], complaints: Complaints) -> None:
    paths: set[str] = set()
    for index, mount in enumerate(mounts):
        name = mount.get("name", "")
        if not name:
            complaints.required(f"{path}[{index}].name")
        if name not in volumes:
            complaints.add("FieldValueNotFound", f"{path}[{index}].name", f"Not found: {shown(name)}")
        at = mount.get("mountPath", "")
        if not at:
            complaints.required(f"{path}[{index}].mountPath")
        if at in paths:
            complaints.invalid(f"{path}[{index}].mountPath", at, "must be unique")
        paths.add(at)


def _check_resources(resources: Json, path: str, complaints: Complaints) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for part, values in (("limits", limits), ("requests", requests)):
        for name, text in values.items():
            # Sentences of a real server show the list's path and the name in brackets.
            field = f"{path}.{part}[{name}]"
            _check_resource_name(name, field, complaints)
            value = quantity(text)
            if value < 0:
                complaints.invalid(field, shown_quantity(value), "must be greater than or equal to 0")
            if "/" in name and value.denominator != 1:
                complaints.invalid(field, shown_quantity(value), "must be an integer")
    for name, text in requests.items():
        if name in limits:
            asked, most = quantity(text), quantity(limits[name])
            if "/" in name and asked != most:
                complaints.invalid(f"{path}.requests", str(text), f"must be equal to {name} limit of {limits[name]}")
            elif asked > most:
                complaints.invalid(
                    f"{path}.requests", str(text), f"must be less than or equal to {name} limit of {limits[name]}"
                )
        elif "/" in name:
            complaints.required(f"{path}.limits", "Limit must be set for non overcommitable resources")


def _check_resource_name(name: str, field: str, complaints: Complaints) -> None:
    faults = qualified_faults(name)
    for fault in faults:
        complaints.invalid(field, name, fault)
    if faults or "/" in name or name.startswith("hugepages-"):
        return
    if name not in _STANDARD:
        complaints.invalid(field, name, "must be a standard resource type or fully qualified")
    if name not in _CONTAINER_RESOURCES:
        complaints.invalid(field, name, "must be a standard resource for containers")


def _check_affinity(affinity: Json, complaints: Complaints) -> None:
    path = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return
    if not required.get("nodeSelectorTerms"):
        complaints.required(f"{path}.nodeSelectorTerms", "must have at least one node selector term")
    for term_index, term in enumerate(required.get("nodeSelectorTerms") or []):
        at = f"{path}.nodeSelectorTerms[{term_index}]"
        for index, requirement in enumerate(term.get("matchExpressions") or []):
            _check_expression(requirement, f"{at}.matchExpressions[{index}]", complaints)
        for index, requirement in enumerate(term.get("matchFields") or []):
            _check_field(requirement, f"{at}.matchFields[{index}]", complaints)


def _check_expression(requirement: Json, path: str, complaints: Complaints) -> None:
    operator, values = requirement.get("operator", ""), requirement.get("values") or []
    if operator in ("In", "NotIn"):
        if not values:
            complaints.required(f"{path}.values", "must be specified when `operator` is 'In' or 'NotIn'")
    elif operator in ("Exists", "DoesNotExist"):
        if values:
            complaints.forbidden(f"{path}.values", "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")
    elif operator in ("Gt", "Lt"):
        if len(values) != 1:
            complaints.required(f"{path}.values", "must be specified single value when `operator` is 'Lt' or 'Gt'")
    else:
        complaints.invalid(f"{path}.operator", operator, "not a valid selector operator")
    for fault in qualified_faults(requirement.get("key", "")):
        complaints.invalid(f"{path}.key", requirement.get("key", ""), fault)


def _check_field(requirement: Json, path: str, complaints: Complaints) -> None:
    operator, values = requirement.get("operator", ""), requirement.get("values") or []
    if operator not in ("In", "NotIn"):
        complaints.invalid(f"{path}.operator", operator, "not a valid selector operator")
    elif len(values) != 1:
        complaints.required(
            f"{path}.values", "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
        )
    if requirement.get("key") != "metadata.name":
        complaints.invalid(f"{path}.key", requirement.get("key", ""), "not a valid field selector key")
        return
    for index, value in enumerate(values):
        for fault in subdomain_faults(value):
            complaints.invalid(f"{path}.values[{index}]", value, fault)


def _check_tolerations(tolerations: list[Json], complaints: Complaints) -> None:
    for index, toleration in enumerate(tolerations):
        at = f"spec.tolerations[{index}]"
        operator = toleration.get("operator") or "Equal"
        if not toleration.get("key") and operator != "Exists":
            complaints.invalid(
                f"{at}.operator",
                toleration.get("operator", ""),
                'operator must be Exists when `key` is empty, which means "match all values and all keys"',
            )
        if operator not in ("Equal", "Exists", "Lt", "Gt"):
            complaints.unsupported(f"{at}.operator", operator, ["Equal", "Exists"])
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            complaints.invalid(
                f"{at}.effect",
                toleration.get("effect", ""),
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            )
        if toleration.get("effect", "") not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            complaints.unsupported(
                f"{at}.effect", toleration["effect"], ["NoSchedule", "PreferNoSchedule", "NoExecute"]
            )
