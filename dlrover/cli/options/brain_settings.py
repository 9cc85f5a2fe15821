"""
Which Brain a job speaks with, and as what: from the command line, else from the environment.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dlrover.agent.config import Entry, EntryKind
from dlrover.master.config import BrainTerms
from dlrover.protocol.addresses import TlsConfig, parse_address
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.brain import MAX_NAME, JobRecipe

if TYPE_CHECKING:
    import argparse  # the launcher does without it, for the sake of its start

DEFAULT_PORT = 50001
ADDRESS = "DLROVER_BRAIN_SERVICE_ADDR"
TOKEN_FILE = "DLROVER_BRAIN_TOKEN_FILE"
CA_FILE = "DLROVER_BRAIN_CA"
PROTOCOL = "DLROVER_BRAIN_PROTOCOL"
CLUSTER = "DLROVER_BRAIN_CLUSTER"
"""Name of the cluster, where one Brain serves several: the one that the cluster's monitor gives."""
MAX_SCRIPT = 16 * 1024 * 1024
"""Bytes of a script that its hash covers."""


def add_brain_options(add: Callable[..., object]) -> None:
    """`add`: as `argparse.ArgumentParser.add_argument`."""
    add("--brain", default="", metavar="HOST:PORT", help=f"report the job's measurements to this Brain ({ADDRESS})")
    add("--brain-token-file", default="", metavar="FILE", help=f"file that holds the token for Brain ({TOKEN_FILE})")
    add(
        "--brain-ca",
        default="",
        metavar="FILE",
        help=f"CA certificate (PEM) that Brain's certificate must come from; giving it switches TLS on ({CA_FILE})",
    )
    add("--recipe", default="", metavar="NAME", help="name that similar jobs share, so that Brain compares them")


def brain_of(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    *,
    user: str = "",
    entry: Entry | None = None,
    namespace: str = "",
    min_nodes: int = 1,
    node_unit: int = 1,
) -> tuple[BrainTerms | None, tuple[str, ...]]:
    """The terms, and notes for the console. None: the job has no Brain. Raises `ConfigError` for what the command line says; a variable may come from
    the manifest of another system, so a wrong one costs the job its Brain only."""
    address = options.brain or environ.get(ADDRESS, "").strip()
    recipe = options.recipe
    if not address:
        for option, value in (("--recipe", recipe), ("--brain-token-file", options.brain_token_file)):
            if value:
                raise ConfigError(
                    f"{option} {value} has no effect without Brain. Give --brain HOST:PORT, or set {ADDRESS}."
                )
        return None, ()
    if len(recipe) > MAX_NAME:
        raise ConfigError(f"--recipe: give a name of at most {MAX_NAME} characters.")
    shown = f"--brain {address}" if options.brain else f"The variable {ADDRESS}={address}"
    try:
        parsed = parse_address(address, default_port=DEFAULT_PORT, shown=shown)
    except ConfigError as error:
        if options.brain:
            raise
        return None, (f"The job runs without Brain: {error}",)
    token_file = options.brain_token_file or environ.get(TOKEN_FILE, "")
    if token_file and not os.access(token_file, os.R_OK):
        raise ConfigError(f"The token file {token_file} for Brain cannot be read. Give a file that this user may read.")
    ca = options.brain_ca or environ.get(CA_FILE, "")
    if ca and not os.access(ca, os.R_OK):
        raise ConfigError(f"The certificate file {ca} for Brain cannot be read. Give a file that this user may read.")
    protocol = environ.get(PROTOCOL, "").strip().lower()
    notes: tuple[str, ...] = ()
    if protocol not in ("", "grpc"):
        notes = (f"The variable {PROTOCOL}={protocol} has no effect: masters speak with Brain over gRPC.",)
    terms = BrainTerms(
        address=str(parsed),
        token_file=os.path.abspath(token_file) if token_file else "",
        tls=TlsConfig(ca=os.path.abspath(ca)) if ca else None,
        recipe=recipe_of(recipe, entry),
        user=(user or _account())[:MAX_NAME],
        cluster=environ.get(CLUSTER, "").strip()[:MAX_NAME],
        namespace=namespace[:MAX_NAME],
        min_nodes=min_nodes,
        node_unit=node_unit,
    )
    return terms, notes


def recipe_of(name: str, entry: Entry | None) -> JobRecipe:
    """No path and no code goes to Brain: the last part of the script's name, and a hash of what is in it."""
    if entry is None:
        return JobRecipe(name=name)
    script = os.path.basename(entry.name)
    is_file = entry.kind in (EntryKind.SCRIPT, EntryKind.RUN_PATH)
    return JobRecipe(name=name, script_name=script[:MAX_NAME], script_hash=_hash_of(entry.name) if is_file else "")


def _account() -> str:
    """Where the environment names no user, as in most containers. Jobs are alike by it, too."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _hash_of(path: str) -> str:
    """Empty: it cannot be read here; the job itself says so when it matters."""
    import hashlib  # late: the launcher reads these options and starts light

    try:
        with open(path, "rb") as script:
            return hashlib.sha256(script.read(MAX_SCRIPT)).hexdigest()
    except OSError:
        return ""
