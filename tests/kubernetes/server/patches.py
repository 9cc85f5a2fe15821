"""JSON patch (RFC 6902), merge patch (RFC 7386) and the strategic merge that kubectl and kubelets send for built-in resources."""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.server.answers import Json, Refused, bad_request

# Lists that a strategic merge joins by a key of their items. The path is the field's name: these names mean the same everywhere.
MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "conditions": ("type",),
    "addresses": ("type",),
    "ownerReferences": ("uid",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "podIPs": ("ip",),
    "hostIPs": ("ip",),
    "readinessGates": ("conditionType",),
    "taints": ("key", "effect"),
    "secrets": ("name",),
}
SET_LISTS = {"finalizers"}


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic(target: Any, patch: Any) -> Any:
    """A merge that joins some lists by key, with the directives `$patch` and `$setElementOrder` for those lists."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return copy.deepcopy({key: value for key, value in patch.items() if key != "$patch"})
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith(("$setElementOrder/", "$retainKeys", "$patch")):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            result[name] = [item for item in result.get(name) or [] if item not in value]
        elif value is None:
            result.pop(key, None)
        elif key in MERGE_KEYS and isinstance(value, list):
            result[key] = _join(result.get(key) or [], value, MERGE_KEYS[key])
        elif key in SET_LISTS and isinstance(value, list):
            old = list(result.get(key) or [])
            result[key] = old + [item for item in value if item not in old]
        else:
            result[key] = strategic(result.get(key), value)
    return result


def _join(old: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    result = list(old)
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [copy.deepcopy(item) for item in patch if item.get("$patch") != "replace"]
    for item in patch:
        at = next((i for i, one in enumerate(result) if all(one.get(key) == item.get(key) for key in keys)), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(copy.deepcopy(item))
        else:
            result[at] = strategic(result[at], item)
    return result


def json_patch(target: Json, operations: Any) -> Json:
    """RFC 6902. A failed `test` or a missing path refuses the whole patch."""
    if not isinstance(operations, list):
        raise bad_request(
            "error decoding patch: json: cannot unmarshal object into Go value of type []handlers.jsonPatchOp"
        )
    result: Any = copy.deepcopy(target)
    for operation in operations:
        try:
            result = _operate(result, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = "the server rejected our request due to an error in our request"
            raise Refused(422, "Invalid", message, details={}) from error
    return result


def _operate(document: Any, operation: Json) -> Any:
    op, path = operation["op"], _steps(operation["path"])
    if op in ("move", "copy"):
        source = _steps(operation["from"])
        value = copy.deepcopy(_find(document, source))
        if op == "move":
            document = _change(document, source, "remove", None)
        return _change(document, path, "add", value)
    if op == "test":
        if _find(document, path) != operation["value"]:
            raise ValueError("testing value failed")
        return document
    if op not in ("add", "remove", "replace"):
        raise ValueError(f"unexpected kind: {op}")
    return _change(document, path, op, copy.deepcopy(operation["value"]) if op != "remove" else None)


def _steps(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise ValueError("a path begins with /")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _find(document: Any, steps: list[str]) -> Any:
    for step in steps:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


def _change(document: Any, steps: list[str], op: str, value: Any) -> Any:
    if not steps:
        return value
    holder, last = _find(document, steps[:-1]), steps[-1]
    if isinstance(holder, list):
        if op == "add":
            holder.insert(len(holder) if last == "-" else _place(last, len(holder)), value)
        elif op == "remove":
            del holder[_place(last, len(holder) - 1)]
        else:
            holder[_place(last, len(holder) - 1)] = value
    else:
        if op != "add" and last not in holder:
            raise KeyError(last)
        if op == "remove":
            del holder[last]
        else:
            holder[last] = value
    return document


def _place(step: str, most: int) -> int:
    index = int(step)
    if not 0 <= index <= most:
        raise IndexError(f"invalid index {step}")
    return index
