"""
What the Kubernetes API can be asked about, and what it can answer.

The server's own `Status` decides what an answer means, by its `reason`. A 404 or 403 without one comes from a proxy or
a load balancer that stands in between, and means nothing about the object: nothing is taken for deleted because of it.
"""

from __future__ import annotations

import enum
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes.objects import ErrorStatus, StatusDetails, decode
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable


class ApiResource(Struct, frozen=True):
    """A kind of object as the paths of the API name it."""

    group: str
    """Empty for the core group (pods, nodes, config maps, ...)."""
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of an object: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str = "") -> str:
        """
        Without a name: of the collection; without a namespace, in all namespaces.

        Raises `Rejected` for a name that would lead to another path.
        """
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.is_namespaced and namespace is not None:
            parts += ["namespaces", _checked(namespace)]
        parts.append(self.plural)
        if name is not None:
            assert namespace is not None or not self.is_namespaced, f"{self.kind} {name}: an object has a namespace"
            parts.append(_checked(name))
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(parts)


PODS = ApiResource("", "v1", "pods", "Pod")
NODES = ApiResource("", "v1", "nodes", "Node", is_namespaced=False)
CONFIG_MAPS = ApiResource("", "v1", "configmaps", "ConfigMap")
SERVICES = ApiResource("", "v1", "services", "Service")
SECRETS = ApiResource("", "v1", "secrets", "Secret")
EVENTS = ApiResource("", "v1", "events", "Event")
RESOURCE_QUOTAS = ApiResource("", "v1", "resourcequotas", "ResourceQuota")
SERVICE_ACCOUNTS = ApiResource("", "v1", "serviceaccounts", "ServiceAccount")
CLAIMS = ApiResource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
LEASES = ApiResource("coordination.k8s.io", "v1", "leases", "Lease")
ROLE_BINDINGS = ApiResource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
NETWORK_POLICIES = ApiResource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
DISRUPTION_BUDGETS = ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
ELASTIC_JOBS = ApiResource("elastic.iml.github.io", "v1alpha1", "elasticjobs", "ElasticJob")
SCALE_PLANS = ApiResource("elastic.iml.github.io", "v1alpha1", "scaleplans", "ScalePlan")


class FoundObject(Struct, frozen=True):
    """The verb did what it says; `body` is the object as the server holds it now (read it with `objects.decode`)."""

    body: bytes
    version: str
    """`metadata.resourceVersion`; empty where the answer is no object (a delete answers with a Status)."""


class NotFound(Struct, frozen=True):
    """No object of that name, or no such namespace. A *kind* that the cluster does not know raises `Unavailable`."""

    message: str


class ConflictReason(enum.Enum):
    ALREADY_EXISTS = "AlreadyExists"
    """A create, and the name is taken."""
    OLD_VERSION = "Conflict"
    """
    The `resourceVersion` or the uid that the request carries is not the object's, or another manager owns a field of
    an apply. Also for a create: two creates met in the books of one ResourceQuota; the same create may be sent again.
    """


class Conflict(Struct, frozen=True):
    reason: ConflictReason
    message: str


class Forbidden(Struct, frozen=True):
    """403. A quota that is used up, an admission rule, or a right that is missing."""

    message: str
    is_quota: bool = False
    """`exceeded quota` (a ResourceQuota); else a right is missing or an admission rule refused."""
    is_terminating: bool = False
    """The namespace is being deleted: nothing can be created in it any more."""


class Invalid(Struct, frozen=True):
    """400, 422 and kin: the request itself is wrong. The message is the server's sentence, made for people."""

    message: str


class Gone(Struct, frozen=True):
    """410: the version or the page token is older than the server's history, or a watch is garbled. List again."""

    message: str


ApiRefusal = NotFound | Conflict | Forbidden | Invalid | Gone
ObjectAnswer = FoundObject | NotFound | Conflict | Forbidden | Invalid | Gone


class Page(Struct, frozen=True):
    """One page of a list, or a whole list (`token` is empty)."""

    items: tuple[msgspec.Raw, ...]
    """Each still undecoded, so that one odd object does not spoil the list. Do not keep them: they hold the page."""
    version: str
    """To watch from."""
    token: str = ""
    """For the next page; empty on the last one."""


class EventKind(enum.Enum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """No change, only a version to go on from."""


class WatchEvent(Struct, frozen=True):
    kind: EventKind
    object: msgspec.Raw


class PatchKind(enum.Enum):
    JSON = "application/json-patch+json"
    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    """Not for custom resources."""
    APPLY = "application/apply-patch+yaml"
    """Server-side apply: needs `field_manager`; creates the object if there is none."""


class Throttled(Unavailable):
    """429: the server asks to come back after `retry_after` seconds."""


def refusal_of(code: int, body: bytes | msgspec.Raw, *, asked: str, retry_after: float | None = None) -> ApiRefusal:
    """
    What a status of 300 or more means. Raises `Unavailable` for everything that says nothing definite.

    `asked` is the request in words, for the message.
    """
    status = _status_of(body)
    if status is None:
        raise Unavailable(
            f"{asked} was answered with {code}, but without the Status of an API server: {_shown(body)}", retry_after
        )
    details = status.details or StatusDetails()
    message = status.message or status.reason or f"code {code}"
    after = retry_after if retry_after is not None else (details.retry_after_seconds or None)
    match code:
        case 400 | 405 | 406 | 411 | 413 | 414 | 415 | 422:
            return Invalid(message)
        case 403:
            causes = {cause.reason for cause in details.causes}
            return Forbidden(
                message, is_quota="exceeded quota" in message, is_terminating="NamespaceTerminating" in causes
            )
        case 404 if details.name:
            return NotFound(message)
        case 404:
            raise Unavailable(
                f"{asked}: {message}. Check that the CRD is installed.", after, code=ErrorCode.UNKNOWN_RESOURCE
            )
        case 409:
            is_taken = status.reason == ConflictReason.ALREADY_EXISTS.value
            return Conflict(ConflictReason.ALREADY_EXISTS if is_taken else ConflictReason.OLD_VERSION, message)
        case 410:
            return Gone(message)
        case 429:
            raise Throttled(f"{asked} was throttled: {message}", after, code=ErrorCode.THROTTLED)
    raise Unavailable(f"{asked} failed with {code}: {message}", after)


def error_of(refusal: ApiRefusal) -> DLRoverError:
    """As an exception, where a caller has no better use for it. Only a missing right may come to be by itself."""
    if isinstance(refusal, Forbidden):
        return Unavailable(refusal.message, code=ErrorCode.FORBIDDEN)
    return Rejected(refusal.message, code=type(refusal).__name__.lower())


def _checked(name: str) -> str:
    if name in ("", ".", ".."):
        raise Rejected(
            f"{name!r} is not a valid name of a Kubernetes object, so no request was sent.", code=ErrorCode.BAD_NAME
        )
    return quote(name, safe="")


class _Header(Struct):
    kind: str = ""


def _status_of(body: bytes | msgspec.Raw) -> ErrorStatus | None:
    try:
        return decode(ErrorStatus, body) if decode(_Header, body).kind == "Status" else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _shown(body: bytes | msgspec.Raw) -> str:
    text = " ".join(bytes(body)[:2000].decode("utf-8", "replace").split())
    return f"{text[:120]!r}" if text else "an empty body"
