"""Sub-resources beside status: a pod's binding and eviction, an account's token, a custom resource's scale, a namespace's end."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from tests.kubernetes.server import answers
from tests.kubernetes.server.access.tokens import Tokens
from tests.kubernetes.server.answers import Json
from tests.kubernetes.server.control.budgets import Budgets
from tests.kubernetes.server.patches import json_patch, merge
from tests.kubernetes.server.registry import Options, Registry, stamp
from tests.kubernetes.server.routes import Target
from tests.kubernetes.server.selectors import value_at

_SUCCESS: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


class Subresources:
    def __init__(self, registry: Registry, budgets: Budgets, tokens: Tokens) -> None:
        self._registry = registry
        self._budgets = budgets
        self._tokens = tokens

    def carry_out(self, verb: str, target: Target, body: Json, content_type: str, options: Options) -> tuple[int, Json]:
        place = (target.kind.resource, target.subresource)
        if place == (("", "pods"), "binding") and verb == "create":
            return self._bind(target, body, options)
        if place == (("", "pods"), "eviction") and verb == "create":
            return self._evict(target, body, options)
        if place == (("", "serviceaccounts"), "token") and verb == "create":
            self._registry.find(target.kind, target.namespace, target.name)
            return 201, self._tokens.issue(target.namespace, target.name, body)
        if place == (("", "namespaces"), "finalize") and verb == "update":
            if not (body.get("spec") or {}).get("finalizers"):
                self._registry.finish(target.kind, ("", target.name))
            return 200, body
        if target.subresource == "scale" and target.kind.scale is not None:
            return self._scale(verb, target, body, content_type, options)
        raise answers.no_such_path()

    def _bind(self, target: Target, body: Json, options: Options) -> tuple[int, Json]:
        meta, node = body.get("metadata") or {}, (body.get("target") or {}).get("name", "")
        if meta.get("name", "") != target.name:
            raise answers.bad_request("name in URL does not match name in Binding object")

        def make(pod: Json) -> Json:
            self._check_bindable(target, pod, meta)
            pod["spec"]["nodeName"] = node
            for part in ("annotations", "labels"):
                if meta.get(part):
                    pod["metadata"].setdefault(part, {}).update(meta[part])
            set_condition(pod, {"type": "PodScheduled", "status": "True"}, stamp(self._registry.clock()))
            return pod

        self._registry.rewrite(target.kind, (target.namespace, target.name), make, options)
        return 201, _SUCCESS

    def _check_bindable(self, target: Target, pod: Json, meta: Json) -> None:
        why = ""
        if meta.get("uid") and meta["uid"] != pod["metadata"]["uid"]:
            why = (
                f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {pod['metadata']['uid']}"
            )
        elif "deletionTimestamp" in pod["metadata"]:
            why = f"pod {target.name} is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("nodeName"):
            why = f'pod {target.name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        if why:
            raise answers.conflict("pods/binding", "", target.name, why)

    def _evict(self, target: Target, body: Json, options: Options) -> tuple[int, Json]:
        if (body.get("metadata") or {}).get("name", "") != target.name:
            raise answers.bad_request("name in URL does not match name in Eviction object")
        key = (target.namespace, target.name)
        said = body.get("deleteOptions") or {}
        before = said.get("preconditions") or {}
        wanted = Options(
            dry_run=bool(said.get("dryRun")) or options.dry_run,
            manager=options.manager,
            grace=said.get("gracePeriodSeconds"),
            uid=before.get("uid"),
            version=before.get("resourceVersion"),
            propagation=said.get("propagationPolicy"),
        )
        pod = self._registry.find(target.kind, *key)
        self._registry.check_preconditions(target.kind, pod.body["metadata"], wanted)
        self._budgets.check(pod)
        if not wanted.dry_run:
            condition = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
            }
            at = stamp(self._registry.clock())
            self._registry.rewrite(target.kind, key, lambda body: set_condition(body, condition, at), options)
            wanted = msgspec.structs.replace(wanted, version=None)
        self._registry.remove(target.kind, key, wanted)
        return 201, _SUCCESS

    def _scale(self, verb: str, target: Target, body: Any, content_type: str, options: Options) -> tuple[int, Json]:
        kind, key = target.kind, (target.namespace, target.name)
        assert kind.scale is not None, "the caller looked"
        record = self._registry.find(kind, *key)
        if verb == "get":
            return 200, _scale_of(kind.scale, record.body)
        if verb not in ("update", "patch"):
            raise answers.not_supported(kind.plural, kind.group)
        wanted = body
        if verb == "patch":
            how = json_patch if content_type == "application/json-patch+json" else merge
            wanted = how(_scale_of(kind.scale, record.body), body)
        replicas = (wanted.get("spec") or {}).get("replicas", 0)
        version = (wanted.get("metadata") or {}).get("resourceVersion") if verb == "update" else None
        path = kind.scale["specReplicasPath"]

        def make(old: Json) -> Json:
            new = copy.deepcopy(old)
            if version:
                new["metadata"]["resourceVersion"] = version
            *steps, last = path.strip(".").split(".")
            at = new
            for step in steps:
                at = at.setdefault(step, {})
            at[last] = replicas
            return new

        changed = self._registry.change(kind, key, make, msgspec.structs.replace(options, subresource="scale"))
        return 200, _scale_of(kind.scale, changed)


def _scale_of(paths: Json, body: Json) -> Json:
    meta = body["metadata"]
    status: Json = {"replicas": value_at(body, paths["statusReplicasPath"]) or 0}
    if "labelSelectorPath" in paths and (selector := value_at(body, paths["labelSelectorPath"])):
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {
            key: meta[key]
            for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
            if key in meta
        },
        "spec": {"replicas": value_at(body, paths["specReplicasPath"]) or 0},
        "status": status,
    }


def set_condition(pod: Json, condition: Json, at: str) -> Json:
    """Adds or replaces a condition; its transition time changes only with its status."""
    status = pod.setdefault("status", {})
    conditions = status.get("conditions") or []
    old = next((one for one in conditions if one["type"] == condition["type"]), None)
    kept_at = old["lastTransitionTime"] if old is not None and old["status"] == condition["status"] else at
    fresh = {"lastProbeTime": None, **condition, "lastTransitionTime": kept_at}
    status["conditions"] = [one for one in conditions if one["type"] != condition["type"]] + [fresh]
    return pod
