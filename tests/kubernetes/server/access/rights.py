"""RBAC: what the roles that are bound to a user allow."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.answers import Json, forbidden
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.routes import Target
from tests.kubernetes.server.store import Store

GROUP = "rbac.authorization.k8s.io"


class Rights:
    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, user: User, verb: str, target: Target, name: str) -> None:
        """Refuses what no role allows. `name` may come from a field selector: a watch of one object by its name."""
        kind = target.kind
        plural = f"{kind.plural}/{target.subresource}" if target.subresource else kind.plural
        if self.allows(user, verb, kind.group, plural, name, target.namespace):
            return
        where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
        why = f'User "{user.name}" cannot {verb} resource "{plural}" in API group "{kind.group}" {where}'
        raise forbidden(kind.plural, kind.group, name, why)

    def allows(self, user: User, verb: str, group: str, plural: str, name: str, namespace: str) -> bool:
        if user.is_admin:
            return True
        return any(_rule_allows(rule, verb, group, plural, name) for rule in self._rules_of(user, namespace))

    def check_binding(self, user: User, kind: Kind, body: Json, namespace: str) -> None:
        """A user binds only roles that it may `bind`, or whose rights it has."""
        if kind.group != GROUP or not kind.plural.endswith("bindings") or user.is_admin:
            return
        reference = body.get("roleRef") or {}
        plural = "clusterroles" if reference.get("kind") == "ClusterRole" else "roles"
        if self.allows(user, "bind", GROUP, plural, reference.get("name", ""), namespace):
            return
        missing = [rule for rule in self._rules_in(reference, namespace) if not self._has(user, rule, namespace)]
        if missing or self._role(reference, namespace) is None:
            groups = ", ".join(f'"{one}"' for one in user.groups)
            listed = "\n".join(str(rule) for rule in missing)
            why = f'user "{user.name}" (groups=[{groups}]) is attempting to grant RBAC permissions not currently held:\n{listed}'
            raise forbidden(kind.plural, kind.group, (body.get("metadata") or {}).get("name", ""), why)

    def _has(self, user: User, rule: Json, namespace: str) -> bool:
        return all(
            self.allows(user, verb, group, plural, name, namespace)
            for verb in rule.get("verbs") or []
            for group in rule.get("apiGroups") or []
            for plural in rule.get("resources") or []
            for name in rule.get("resourceNames") or [""]
        )

    def _rules_of(self, user: User, namespace: str) -> Iterator[Json]:
        bindings = self._store.every((GROUP, "clusterrolebindings"))
        if namespace:
            bindings = bindings + self._store.every((GROUP, "rolebindings"), namespace)
        for record in bindings:
            if any(_is_subject(user, subject, record.key[0]) for subject in record.body.get("subjects") or []):
                yield from self._rules_in(record.body["roleRef"], record.key[0])

    def _rules_in(self, reference: Json, namespace: str) -> list[Json]:
        role = self._role(reference, namespace)
        return [] if role is None else role.get("rules") or []

    def _role(self, reference: Json, namespace: str) -> Json | None:
        is_wide = reference.get("kind") == "ClusterRole"
        plural, key = ("clusterroles", "") if is_wide else ("roles", namespace)
        record = self._store.get((GROUP, plural), (key, reference.get("name", "")))
        return None if record is None else record.body


def _is_subject(user: User, subject: Json, namespace: str) -> bool:
    kind, name = subject.get("kind"), subject.get("name", "")
    if kind == "ServiceAccount":
        return user.name == f"system:serviceaccount:{subject.get('namespace') or namespace}:{name}"
    return name == user.name if kind == "User" else name in user.groups


def _rule_allows(rule: Json, verb: str, group: str, plural: str, name: str) -> bool:
    verbs, groups, plurals = rule.get("verbs") or [], rule.get("apiGroups") or [], rule.get("resources") or []
    names = rule.get("resourceNames") or []
    sub = plural.partition("/")[2]
    return (
        ("*" in verbs or verb in verbs)
        and ("*" in groups or group in groups)
        and ("*" in plurals or plural in plurals or (bool(sub) and f"*/{sub}" in plurals))
        and (not names or name in names)
    )
