"""
What `dlrover job submit` sends: the documents of a file, or a job that is made of a command line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from dlrover.protocol.errors import ConfigError

JsonObject = dict[str, Any]

API_VERSION = "elastic.iml.github.io/v1alpha1"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class CommandJob(Struct, frozen=True, kw_only=True):
    """The options of `dlrover job submit … -- COMMAND`."""

    name: str
    image: str
    command: Sequence[str]
    nodes: str = "1"
    """N, or MIN:MAX."""
    cpu: str = ""
    memory: str = ""
    gpus: int = 0
    is_suspended: bool = False


def read_documents(path: str) -> list[JsonObject]:
    """YAML or JSON; `-` is standard input. Raises `ConfigError` with the line that is wrong."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"Job files need PyYAML: pip install 'dlrover[k8s]' ({error})") from error
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}.") from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
            raise ConfigError(f"{path}: each document must be an object with apiVersion, kind and metadata.")
    num_jobs = sum(1 for document in documents if document.get("kind") == "ElasticJob")
    if num_jobs != 1:
        raise ConfigError(f"{path} holds {num_jobs} ElasticJobs. Give a file with exactly one.")
    return documents


def job_of_command(wish: CommandJob) -> JsonObject:
    """Raises `ConfigError`."""
    from dlrover.cli.options.settings import parse_nnodes
    from dlrover.platforms.kubernetes.names import MAX_JOB_NAME

    if len(wish.name) > MAX_JOB_NAME or not _NAME.fullmatch(wish.name):
        raise ConfigError(
            f"--name {wish.name}: a job's name has at most {MAX_JOB_NAME} characters: small letters, digits and dashes, "
            "a letter first."
        )
    if not wish.image:
        raise ConfigError("Give --image IMAGE: the container that runs the command.")
    try:
        least, most = parse_nnodes(wish.nodes)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--nnodes", "--nodes")) from error
    amounts = {"cpu": wish.cpu, "memory": wish.memory, "nvidia.com/gpu": str(wish.gpus) if wish.gpus else ""}
    wanted = {name: amount for name, amount in amounts.items() if amount}
    limits = {name: amount for name, amount in wanted.items() if name != "cpu"}
    container: JsonObject = {"name": "main", "image": wish.image, "command": list(wish.command)}
    if wanted:
        container["resources"] = {"requests": wanted, **({"limits": limits} if limits else {})}
    worker: JsonObject = {"replicas": most, "template": {"spec": {"containers": [container]}}}
    if least != most:
        worker |= {"minReplicas": least, "maxReplicas": most}
    spec: JsonObject = {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}}
    if wish.is_suspended:
        spec["suspend"] = True
    return {"apiVersion": API_VERSION, "kind": "ElasticJob", "metadata": {"name": wish.name}, "spec": spec}
