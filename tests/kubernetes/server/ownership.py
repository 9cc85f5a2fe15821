"""
Who owns which field (`metadata.managedFields`), and server-side apply.

Every write is recorded: a client that applies owns what it sends, a client that updates owns what it changes. An apply that would
change a field of another owner is a conflict, unless it is forced. Maps are owned field by field, lists with keys item by item,
other lists as a whole.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec

from tests.kubernetes.server.answers import Json, Refused
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.patches import MERGE_KEYS, SET_LISTS

Path = tuple[str, ...]
_ITEM = object()
_UNOWNED = {("f:apiVersion",), ("f:kind",)} | {
    ("f:metadata", f"f:{name}")
    for name in (
        "name",
        "namespace",
        "creationTimestamp",
        "selfLink",
        "uid",
        "generation",
        "managedFields",
        "resourceVersion",
    )
}
_NEVER_OWNED = {("f:metadata", "f:deletionTimestamp"), ("f:metadata", "f:deletionGracePeriodSeconds")}
_KEYS = {**MERGE_KEYS, "ports": ("containerPort", "protocol"), "addresses": ("type",)}


class Layout(msgspec.Struct, frozen=True):
    """How one field is owned: lists with keys, sets, or as a whole. Custom resources say it in their schema."""

    name: str
    schema: Json | None = None

    def below(self, name: str) -> Layout:
        if self.schema is None:
            return Layout(name)
        more = self.schema.get("additionalProperties")
        found = (self.schema.get("properties") or {}).get(name) or (more if isinstance(more, dict) else {})
        return Layout(name, None if self.name == "" and name == "metadata" else found)

    def item(self) -> Layout:
        return Layout("", self.schema.get("items", {}) if self.schema is not None else None)

    @property
    def keys(self) -> tuple[str, ...]:
        if self.schema is None:
            return _KEYS.get(self.name, ())
        return tuple(self.schema.get("x-kubernetes-list-map-keys") or ())

    @property
    def is_set(self) -> bool:
        if self.schema is None:
            return self.name in SET_LISTS
        return self.schema.get("x-kubernetes-list-type") == "set"


class Entry(msgspec.Struct, kw_only=True):
    """One owner's record."""

    manager: str
    operation: str
    api_version: str
    time: str
    subresource: str
    paths: set[Path]

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.manager, self.operation, self.subresource)

    @property
    def title(self) -> str:
        title = f'"{self.manager}"'
        if self.subresource:
            title += f' with subresource "{self.subresource}"'
        return f"{title} using {self.api_version} at {self.time}" if self.operation == "Update" else title


def layout_of(kind: Kind) -> Layout:
    return Layout("", kind.rules.open_schema)


def flat(value: Json, layout: Layout) -> dict[Path, Any]:
    """Every owned part of an object with its value."""
    found: dict[Path, Any] = {}
    _flatten(value, layout, (), found)
    return {path: part for path, part in found.items() if path not in _UNOWNED and path not in _NEVER_OWNED}


def record_update(kind: Kind, new: Json, old: Json | None, *, manager: str, subresource: str, at: str) -> None:
    """Notes the changed fields as the manager's. `new` carries the records afterwards."""
    layout = layout_of(kind)
    now, was = flat(new, layout), flat(old, layout) if old is not None else {}
    entries = read(old) if old is not None else []
    changed = {path for path, value in now.items() if path not in was or was[path] != value}
    if kind.rules.has_status and subresource != "status":
        changed = {path for path in changed if path[0] != "f:status"}
    for entry in entries:
        entry.paths = {path for path in entry.paths if path in now and path not in changed}
    mine = _entry(
        entries,
        Entry(
            manager=manager,
            operation="Update",
            api_version=kind.api_version,
            time=at,
            subresource=subresource,
            paths=set(),
        ),
    )
    if changed:
        mine.time = at
    mine.paths |= changed
    _write(new, entries)


def apply(kind: Kind, live: Json | None, config: Json, *, manager: str, subresource: str, force: bool, at: str) -> Json:
    """What the object becomes when a manager applies its part of it."""
    layout = layout_of(kind)
    entries = read(live) if live is not None else []
    mine = _entry(
        entries,
        Entry(
            manager=manager,
            operation="Apply",
            api_version=kind.api_version,
            time=at,
            subresource=subresource,
            paths=set(),
        ),
    )
    wanted = {path: value for path, value in flat(config, layout).items() if _is_writable(path, subresource, kind)}
    now = flat(live, layout) if live is not None else {}
    _settle_conflicts([entry for entry in entries if entry is not mine], wanted, now, force=force)
    result = copy.deepcopy(live) if live is not None else {}
    dropped = mine.paths - set(wanted)
    held = {path for entry in entries if entry is not mine for path in entry.paths}
    for path in sorted(dropped, key=len):  # an item of a list before its fields: its keys say which one it is
        if path not in held and not any(other[: len(path)] == path for other in held):
            _remove(result, path)
    result = _merged(result, config, layout)
    if mine.paths != set(wanted) or any(now.get(path, _ITEM) != value for path, value in wanted.items()):
        mine.time = at
    mine.paths = set(wanted)
    _write(result, entries)
    return result


def read(body: Json) -> list[Entry]:
    found = []
    for said in body["metadata"].get("managedFields") or []:
        paths: set[Path] = set()
        _read_paths(said.get("fieldsV1") or {}, (), paths)
        entry = Entry(
            manager=said.get("manager", ""),
            operation=said["operation"],
            api_version=said.get("apiVersion", ""),
            time=said.get("time", ""),
            subresource=said.get("subresource", ""),
            paths=paths,
        )
        found.append(entry)
    return found


def _entry(entries: list[Entry], wanted: Entry) -> Entry:
    for entry in entries:
        if entry.key == wanted.key:
            return entry
    entries.append(wanted)
    return wanted


def _is_writable(path: Path, subresource: str, kind: Kind) -> bool:
    """The main path does not write status, the status path writes nothing else."""
    if not kind.rules.has_status:
        return True
    return (path[0] == "f:status") == (subresource == "status")


def _settle_conflicts(others: list[Entry], wanted: dict[Path, Any], now: dict[Path, Any], *, force: bool) -> None:
    conflicts = []
    for entry in others:
        for path in sorted(entry.paths & set(wanted)):
            if path in now and now[path] == wanted[path]:
                continue
            if force:
                entry.paths.discard(path)
            else:
                conflicts.append((entry, path))
    if conflicts:
        raise _conflict(conflicts)


def _conflict(conflicts: list[tuple[Entry, Path]]) -> Refused:
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {entry.title}", "field": _shown(path)}
        for entry, path in conflicts
    ]
    if len(conflicts) == 1:
        entry, path = conflicts[0]
        message = f"Apply failed with 1 conflict: conflict with {entry.title}: {_shown(path)}"
    else:
        by_title: dict[str, list[str]] = {}
        for entry, path in conflicts:
            by_title.setdefault(entry.title, []).append(_shown(path))
        lines = []
        for title in sorted(by_title):
            lines += [f"conflicts with {title}:", *(f"- {path}" for path in by_title[title])]
        message = f"Apply failed with {len(conflicts)} conflicts: " + "\n".join(lines)
    return Refused(409, "Conflict", message, details={"causes": causes})


def _shown(path: Path) -> str:
    text = ""
    for step in path:
        kind, said = step.split(":", 1)
        if kind == "f":
            text += f".{said}"
        elif kind == "k":
            keys = ",".join(f"{name}={json.dumps(value)}" for name, value in json.loads(said).items())
            text += f"[{keys}]"
        else:
            text += f"[={said}]"
    return text


def _flatten(value: Any, layout: Layout, path: Path, found: dict[Path, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            _flatten(part, layout.below(name), (*path, f"f:{name}"), found)
    elif isinstance(value, list) and layout.keys and all(isinstance(item, dict) for item in value):
        for item in value:
            at = (*path, _item_step(item, layout.keys))
            found[at] = _ITEM
            _flatten(item, layout.item(), at, found)
    elif isinstance(value, list) and layout.is_set:
        for item in value:
            found[(*path, f"v:{json.dumps(item)}")] = _ITEM
    else:
        found[path] = value


def _item_step(item: Json, keys: tuple[str, ...]) -> str:
    said = {key: item.get(key, "TCP") for key in keys if key in item or key == "protocol"}
    return "k:" + json.dumps(said, separators=(",", ":"), sort_keys=True)


def _merged(live: Any, config: Any, layout: Layout) -> Any:
    if isinstance(config, dict) and isinstance(live, dict):
        result = dict(live)
        for name, part in config.items():
            if name != "managedFields":
                result[name] = _merged(live.get(name), part, layout.below(name))
        return result
    if isinstance(config, list) and isinstance(live, list) and layout.keys:
        items = {_item_step(item, layout.keys): item for item in live}
        for item in config:
            step = _item_step(item, layout.keys)
            items[step] = _merged(items.get(step), item, layout.item())
        return list(items.values())
    if isinstance(config, list) and isinstance(live, list) and layout.is_set:
        return live + [item for item in config if item not in live]
    return copy.deepcopy(config)


def _remove(body: Any, path: Path) -> None:
    for step in path[:-1]:
        body = _step(body, step)
        if body is None:
            return
    kind, said = path[-1].split(":", 1)
    if kind == "f" and isinstance(body, dict):
        body.pop(said, None)
    elif kind == "k" and isinstance(body, list):
        body[:] = [item for item in body if not _is_item(item, json.loads(said))]
    elif kind == "v" and isinstance(body, list) and json.loads(said) in body:
        body.remove(json.loads(said))


def _step(body: Any, step: str) -> Any:
    kind, said = step.split(":", 1)
    if kind == "f":
        return body.get(said) if isinstance(body, dict) else None
    return next((item for item in body or [] if _is_item(item, json.loads(said))), None)


def _is_item(item: Any, keys: Json) -> bool:
    return isinstance(item, dict) and all(
        item.get(name, "TCP" if name == "protocol" else None) == value for name, value in keys.items()
    )


def _read_paths(fields: Json, path: Path, found: set[Path]) -> None:
    for name, inner in fields.items():
        if name == ".":
            found.add(path)
        elif inner:
            _read_paths(inner, (*path, name), found)
        else:
            found.add((*path, name))


def _write(body: Json, entries: list[Entry]) -> None:
    said = []
    for entry in sorted(entries, key=lambda one: (one.operation, one.time, one.manager, one.subresource)):
        if not entry.paths:
            continue
        fields: Json = {}
        for path in sorted(entry.paths):
            at = fields
            for step in path:
                at = at.setdefault(step, {})
            if path[-1].startswith("k:"):
                at["."] = {}
        record = {
            "manager": entry.manager,
            "operation": entry.operation,
            "apiVersion": entry.api_version,
            "time": entry.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        }
        if entry.subresource:
            record["subresource"] = entry.subresource
        said.append(record)
    body["metadata"]["managedFields"] = said
