"""
Texts that select objects of a cluster by their labels (`app=dlrover,elasticjob.dlrover/name=points`), and back.
"""

from __future__ import annotations

from collections.abc import Mapping


def gen_k8s_label_selector_from_dict(labels: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def gen_dict_from_k8s_label_selector(selector: str) -> dict[str, str]:
    """Raises `ValueError` for a part that is not `key=value`: other operators select what no map can say."""
    labels = {}
    for part in filter(None, (each.strip() for each in selector.split(","))):
        key, sign, value = part.partition("=")
        if not sign or key.endswith("!") or not key.strip():
            raise ValueError(f"{part!r} in the selector {selector!r} must have the form key=value.")
        labels[key.strip()] = value.removeprefix("=").strip()
    return labels
