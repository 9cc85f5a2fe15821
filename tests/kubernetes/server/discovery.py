"""What the server says about itself: health, version, groups and resources. Tools such as kubectl ask this first."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.server.answers import Json
from tests.kubernetes.server.custom.definitions import CustomRules
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.routes import Routes

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0+dlrover-test", "platform": "linux/amd64"}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def described(path: str, routes: Routes) -> Any:
    """The answer to a path that is about no object; None if the path is about objects."""
    path = path.rstrip("/") or "/"
    if path in ("/healthz", "/livez", "/readyz"):
        return "ok"
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = sorted({kind.group for kind in routes.every() if kind.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name, routes) for name in groups]}
    parts = path.strip("/").split("/")
    if parts[:2] == ["openapi", "v3"]:
        return _schemas("/".join(parts[2:]), routes)
    kinds = [kind for kind in routes.every() if kind.api_version == "/".join(parts[1:])]
    if parts[0] in ("api", "apis") and kinds and len(parts) == (2 if parts[0] == "api" else 3):
        resources = [part for kind in kinds for part in _resources(kind)]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": "/".join(parts[1:]),
            "resources": resources,
        }
    if parts[0] == "apis" and len(parts) == 2 and any(kind.group == parts[1] for kind in routes.every()):
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], routes)}
    return None


def _schemas(path: str, routes: Routes) -> Any:
    """As much of an OpenAPI document as kubectl needs to learn that the server validates fields itself."""
    of_path = {kind: f"apis/{kind.api_version}" if kind.group else "api/v1" for kind in routes.every()}
    if not path:
        known = sorted(set(of_path.values()))
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}?hash={len(of_path)}"} for name in known}}
    paths = {}
    for kind, where in of_path.items():
        if where != path:
            continue
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        }
        paths[f"/{path}/{'namespaces/{namespace}/' if kind.namespaced else ''}{kind.plural}/{{name}}"] = {
            "patch": patch
        }
    if not paths:
        return None
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]}, "paths": paths}


def _group(name: str, routes: Routes) -> Json:
    versions = sorted({kind.version for kind in routes.every() if kind.group == name})
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resources(kind: Kind) -> list[Json]:
    whole: Json = {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": _VERBS,
    }
    found = [{**whole, "shortNames": list(kind.short_names)} if kind.short_names else whole]
    if kind.rules.has_status:
        found.append(
            {**whole, "name": f"{kind.plural}/status", "singularName": "", "verbs": ["get", "patch", "update"]}
        )
    if kind.scale is not None:
        scale = {"name": f"{kind.plural}/scale", "kind": "Scale", "group": "autoscaling", "version": "v1"}
        found.append({**whole, **scale, "singularName": "", "verbs": ["get", "patch", "update"]})
    if (kind.group, kind.plural) == ("", "pods"):
        eviction = {"name": "pods/eviction", "kind": "Eviction", "group": "policy", "version": "v1"}
        found.append({**whole, **eviction, "singularName": "", "verbs": ["create"]})
    return found


def is_custom(kind: Kind) -> bool:
    return isinstance(kind.rules, CustomRules)
