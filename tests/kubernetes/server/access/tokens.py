"""
Bearer tokens: fixed ones for people, and tokens of service accounts that are bound to a pod.

A real server remembers for some seconds that a token was good. So a token outlives its pod's object by that time, and our masters
must cope with it; `cache` says how long it is here.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable

import msgspec

from tests.kubernetes.server.answers import Json, Refused
from tests.kubernetes.server.store import Store


class User(msgspec.Struct, frozen=True):
    name: str
    groups: tuple[str, ...] = ()

    @property
    def is_admin(self) -> bool:
        return "system:masters" in self.groups


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a token of a service account stands for."""

    namespace: str
    account: str
    account_uid: str
    pod: str
    pod_uid: str
    expires_at: float


class Tokens:
    def __init__(self, store: Store, *, cache: float, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock
        self._fixed: dict[str, User] = {}
        self._grants: dict[str, Grant] = {}
        self._good_until: dict[str, float] = {}

    def add(self, token: str, user: User) -> None:
        self._fixed[token] = user

    def issue(self, namespace: str, account: str, request: Json) -> Json:
        """Answers a TokenRequest."""
        spec = request.get("spec") or {}
        record = self._store.get(("", "serviceaccounts"), (namespace, account))
        assert record is not None, "the caller found the account"
        bound = spec.get("boundObjectRef") or {}
        pod_name, pod_uid = "", ""
        if bound:
            pod = self._store.get(("", "pods"), (namespace, bound.get("name", "")))
            if pod is None:
                raise Refused(404, "NotFound", f'pods "{bound.get("name", "")}" not found')
            pod_name, pod_uid = bound["name"], pod.body["metadata"]["uid"]
            if bound.get("uid") not in (None, "", pod_uid):
                why = f"the UID in the bound object reference ({bound['uid']}) does not match the UID in record. The object might have been deleted and then recreated"
                raise Refused(409, "Conflict", f'Operation cannot be fulfilled on pods "{pod_name}": {why}')
        lifetime = spec.get("expirationSeconds") or 3600
        expires_at = self._clock() + lifetime
        grant = Grant(
            namespace=namespace,
            account=account,
            account_uid=record.body["metadata"]["uid"],
            pod=pod_name,
            pod_uid=pod_uid,
            expires_at=expires_at,
        )
        claims = {
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "exp": int(expires_at),
            "jti": secrets.token_hex(16),
        }
        parts: list[Json] = [{"alg": "none"}, claims]
        token = ".".join([_text(part) for part in parts] + [secrets.token_urlsafe(32)])
        self._grants[token] = grant
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": account, "namespace": namespace, "creationTimestamp": None},
            "spec": {
                "audiences": spec.get("audiences") or [],
                "expirationSeconds": lifetime,
                "boundObjectRef": bound or None,
            },
            "status": {"token": token, "expirationTimestamp": stamp},
        }

    def user_of(self, header: str | None) -> User:
        """Who asks. A token that is not good (any more) is a 401; no token is an anonymous user."""
        if not header:
            return ANONYMOUS
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise unauthorized()
        token = token.strip()
        if token in self._fixed:
            return self._fixed[token]
        grant = self._grants.get(token)
        if grant is None:
            raise unauthorized()
        if self._good_until.get(token, 0.0) <= self._clock():
            if not self._is_good(grant):
                raise unauthorized()
            self._good_until[token] = self._clock() + self._cache
        name = f"system:serviceaccount:{grant.namespace}:{grant.account}"
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{grant.namespace}", "system:authenticated")
        return User(name, groups)

    def _is_good(self, grant: Grant) -> bool:
        if grant.expires_at <= self._clock():
            return False
        account = self._store.get(("", "serviceaccounts"), (grant.namespace, grant.account))
        if account is None or account.body["metadata"]["uid"] != grant.account_uid:
            return False
        if not grant.pod:
            return True
        pod = self._store.get(("", "pods"), (grant.namespace, grant.pod))
        return pod is not None and pod.body["metadata"]["uid"] == grant.pod_uid


def _text(part: Json) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(part)).decode().rstrip("=")


def unauthorized() -> Refused:
    return Refused(401, "Unauthorized", "Unauthorized")
