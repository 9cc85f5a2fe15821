"""Checks of `metadata`: names, labels, annotations, owners, in the words of a real server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.kubernetes.server.answers import Complaints, Json

if TYPE_CHECKING:
    from tests.kubernetes.server.kinds import Kind

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_QUALIFIED = re.compile(r"^([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$")
_LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")

SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with "
    "an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_WORDS = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an "
    "alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
LABEL_VALUE_WORDS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
QUALIFIED_WORDS = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character "
    "(e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
TOO_MANY_PARTS = (
    "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character "
    "(e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an "
    "optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
)
_ANNOTATIONS_LIMIT = 256 * 1024
_OWNER_PARTS = {
    "apiVersion": "version must not be empty",
    "kind": "must not be empty",
    "name": "must not be empty",
    "uid": "must not be empty",
}


def subdomain_faults(value: str) -> list[str]:
    faults = ["must be no more than 253 characters"] if len(value) > 253 else []
    return faults + ([] if _SUBDOMAIN.match(value) else [SUBDOMAIN_WORDS])


def label_faults(value: str) -> list[str]:
    faults = ["must be no more than 63 characters"] if len(value) > 63 else []
    return faults + ([] if _LABEL.match(value) else [LABEL_WORDS])


def label_value_faults(value: str) -> list[str]:
    faults = ["must be no more than 63 bytes"] if len(value) > 63 else []
    return faults + ([] if _LABEL_VALUE.match(value) else [LABEL_VALUE_WORDS])


def qualified_faults(value: str) -> list[str]:
    prefix, _, name = value.rpartition("/")
    if "/" in prefix:
        return [TOO_MANY_PARTS]
    faults = []
    if "/" in value:
        if not prefix:
            faults.append("prefix part must be non-empty")
        else:
            faults += [f"prefix part {fault}" for fault in subdomain_faults(prefix)]
    if not name:
        faults.append("name part must be non-empty")
    elif len(name) > 63:
        faults.append("name part must be no more than 63 bytes")
    if not _QUALIFIED.match(name):
        faults.append(QUALIFIED_WORDS)
    return faults


def check_metadata(kind: Kind, meta: Json, complaints: Complaints) -> None:
    name = meta.get("name") or ""
    if not name:
        complaints.required("metadata.name", "name or generateName is required")
    else:
        for fault in name_faults(kind, name):
            complaints.invalid("metadata.name", name, fault)
    _check_maps(meta, complaints)
    _check_owners(meta, complaints)


def name_faults(kind: Kind, name: str) -> list[str]:
    if kind.resource in (("", "namespaces"), ("", "services")):
        return label_faults(name)
    if kind.group == "rbac.authorization.k8s.io":
        return [f"may not contain '{sign}'" for sign in "/%" if sign in name]
    return subdomain_faults(name)


def check_metadata_change(kind: Kind, meta: Json, was: Json, complaints: Complaints) -> None:
    _check_maps(meta, complaints)
    _check_owners(meta, complaints)
    if "deletionTimestamp" in was:
        added = sorted(set(meta.get("finalizers") or []) - set(was.get("finalizers") or []))
        if added:
            listed = ", ".join(f'"{name}"' for name in added)
            message = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{listed}}}"
            complaints.forbidden("metadata.finalizers", message)


def _check_maps(meta: Json, complaints: Complaints) -> None:
    for key, value in (meta.get("labels") or {}).items():
        for fault in qualified_faults(key):
            complaints.invalid("metadata.labels", key, fault)
        for fault in label_value_faults(value):
            complaints.invalid("metadata.labels", value, fault)
    annotations = meta.get("annotations") or {}
    for key in annotations:
        for fault in qualified_faults(key.lower()):
            complaints.invalid("metadata.annotations", key, fault)
    if sum(len(key) + len(value) for key, value in annotations.items()) > _ANNOTATIONS_LIMIT:
        complaints.too_long("metadata.annotations", _ANNOTATIONS_LIMIT)


def _check_owners(meta: Json, complaints: Complaints) -> None:
    controllers = []
    for owner in meta.get("ownerReferences") or []:
        for part, detail in _OWNER_PARTS.items():
            if not owner.get(part):
                complaints.invalid(f"metadata.ownerReferences.{part}", owner.get(part, ""), detail)
        if owner.get("controller"):
            controllers.append(owner)
    if len(controllers) > 1:
        names = f"{controllers[0]['name']} and {controllers[1]['name']}"
        message = f'Only one reference can have Controller set to true. Found "true" in references for {names}'
        complaints.invalid("metadata.ownerReferences", meta["ownerReferences"], message)
