"""
Environment of a container: what its image, its pod and the cluster give it, `$(NAME)` references expanded.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.kubernetes.kubelet.client import ApiError, Body, Cluster

_REFERENCE = re.compile(r"\$\$|\$\(([^)\s]+)\)")


class ConfigMissing(Exception):
    """A ConfigMap, a Secret or a key of one that the container needs is not there (CreateContainerConfigError)."""


class Values:
    """ConfigMaps and Secrets of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    async def of(self, kind: str, name: str, *, is_optional: bool = False) -> dict[str, bytes]:
        """Raises `ConfigMissing`."""
        plural = {"configmap": "configmaps", "secret": "secrets"}[kind]
        try:
            found = await self._cluster.get(f"/api/v1/namespaces/{self._namespace}/{plural}/{name}")
        except ApiError as error:
            if error.code == 404:
                if is_optional:
                    return {}
                raise ConfigMissing(f'{kind} "{name}" not found') from error
            raise
        if kind == "secret":
            return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        texts = {key: str(value).encode() for key, value in (found.get("data") or {}).items()}
        return texts | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


async def environment(container: Body, pod: Body, values: Values, cluster: Mapping[str, str]) -> dict[str, str]:
    """Raises `ConfigMissing`."""
    environ = {**_image_environ(), "HOSTNAME": hostname(pod), **cluster}
    for source in container.get("envFrom") or ():
        kind = "configmap" if "configMapRef" in source else "secret"
        reference = source.get("configMapRef") or source["secretRef"]
        found = await values.of(kind, reference["name"], is_optional=bool(reference.get("optional")))
        environ |= {source.get("prefix", "") + key: value.decode() for key, value in found.items()}
    for entry in container.get("env") or ():
        if "valueFrom" in entry:
            value = await _value_from(entry["valueFrom"], container, pod, values)
            if value is not None:
                environ[entry["name"]] = value
        else:
            environ[entry["name"]] = expand(str(entry.get("value") or ""), environ)
    return environ


def expand(text: str, environ: Mapping[str, str]) -> str:
    """`$(NAME)` is replaced where NAME is known, `$$` is a dollar."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def hostname(pod: Body) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def field_of(pod: Body, path: str) -> str:
    """A field of the pod as the downward API names it."""
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if match:
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    found: object = pod
    for part in path.split("."):
        found = found.get(part, "") if isinstance(found, dict) else ""
    return str(found)


async def _value_from(source: Body, container: Body, pod: Body, values: Values) -> str | None:
    """None: optional and not there."""
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        reference = source["resourceFieldRef"]
        section, _, key = str(reference["resource"]).partition(".")
        amount = parse_quantity(((container.get("resources") or {}).get(section) or {}).get(key, "0"))
        divisor = parse_quantity(reference.get("divisor") or "1") or 1.0
        return str(-(-amount // divisor)).removesuffix(".0")
    kind, reference = next((k, source[f"{n}KeyRef"]) for k, n in _KEY_KINDS if f"{n}KeyRef" in source)
    is_optional = bool(reference.get("optional"))
    found = await values.of(kind, reference["name"], is_optional=is_optional)
    if reference["key"] in found:
        return found[reference["key"]].decode()
    if is_optional:
        return None
    raise ConfigMissing(f"couldn't find key {reference['key']} in {kind} {reference['name']}")


_KEY_KINDS = (("configmap", "configMap"), ("secret", "secret"))
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)
}


def parse_quantity(text: object) -> float:
    """`500m`, `2Gi`, `1.5`."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-zA-Z]*)", str(text))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _UNITS[match[2]]


def _image_environ() -> dict[str, str]:
    """What every image here has: this project's programs first on the path."""
    programs = str(Path(sys.executable).parent)
    return {"PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
