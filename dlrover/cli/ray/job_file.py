"""
`dlrover master --platform ray --job-spec FILE`: a job as the original's file describes it, on a Ray cluster.

The option starts a host and below it a master; the master process itself knows nothing of Ray. A job of parameter servers has replicas of type ps,
and chief and evaluator if it wants them; all of them run the same command. What they run stands in the file, or follows `--` on the command line.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from dlrover.cli.options.scaling_settings import OPTIMIZE_MODES, OPTION_FIELDS
from dlrover.cli.ray.plan import NodeSize, RayRun, build_parser, build_run
from dlrover.platforms.kubernetes.job.fleet import is_true_text
from dlrover.platforms.kubernetes.quantities import limits_of, resource_of
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy

_FORMER_CHIEF = "master"
"""As TensorFlow once called it."""
_LAUNCHERS = ("dlrover-run", "torchrun")
_SPEC_KEYS = (
    "replicaSpecs",
    "distributionStrategy",
    "optimizeMode",
    "resourceLimits",
    "enableElasticScheduling",
    "enableDynamicSharding",
)
_REPLICA_KEYS = (
    "replicas", "replica", "resources", "resource", "restartCount", "autoScale", "restartTimeout", "criticalNodes", "command", "args",
    "template", "priority", "image",
)  # fmt: skip


def read_job_file(
    path: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    job_name: str,
    pending_timeout: float | None = None,
    pending_strategy: int | None = None,
    relaunches_errors: bool = False,
    scaling: argparse.Namespace | None = None,
) -> RayRun:
    """Raises `ConfigError`. `scaling`: options of `add_scaling_options`, which count more than the file."""
    spec = _spec_of(_decode(path), path)
    replicas = spec.get("replicaSpecs")
    if not isinstance(replicas, dict) or not replicas:
        raise ConfigError(f"{path}: spec.replicaSpecs lists no nodes. Give spec.replicaSpecs.worker.replicas.")
    found = _training_types(replicas, path)
    strategy = _strategy(spec, found, path)
    kinds = {kind: _replica_spec(name, replica, path) for kind, (name, replica) in found.items()}
    workers = kinds[NodeType.WORKER]
    count = max(1, workers.count) if strategy is Strategy.PS else workers.count  # the chief may be all there is
    size = NodeSize(
        min_nodes=count,
        max_nodes=count,
        standby=0,
        max_relaunches=workers.max_relaunches,
        resource=workers.resource,
    )
    fleet = FleetSpec(
        replicas=kinds,
        strategy=strategy,
        limits=_limits(spec, path),
        relaunch_always=relaunches_errors or FleetSpec(replicas={}).relaunch_always,
        pending_timeout=900.0 if pending_timeout is None else pending_timeout,
        pending_strategy=FleetSpec(replicas={}).pending_strategy if pending_strategy is None else pending_strategy,
    )
    options = build_parser().parse_args([f"--job-name={job_name}"])
    if scaling is not None:
        vars(options).update({field: getattr(scaling, field) for field in OPTION_FIELDS})
    if options.auto_scale is None:
        options.auto_scale = OPTIMIZE_MODES[str(spec.get("optimizeMode", ""))].value
    scaled_types = tuple(
        kind
        for kind, (name, replica) in found.items()
        if _is_true(replica.get("autoScale", True), f"{path}: spec.replicaSpecs.{name}")
    )
    words = list(command) or _command_of(found, path)
    if strategy is Strategy.PS:
        words = ["--strategy=ps", *words]
    run = build_run(words, environ, size=size, options=options, fleet=fleet, scaled_types=scaled_types)
    unused = _unused_fields(spec, dict(found.values()))
    return msgspec.structs.replace(run, notes=(*run.notes, unused)) if unused else run


def run_job_file(
    path: str,
    command: Sequence[str],
    *,
    job_name: str,
    pending_timeout: float | None,
    pending_strategy: int | None,
    relaunches_errors: bool,
    scaling: argparse.Namespace,
) -> int:
    """Submit the job of the file and follow it to its end. Raises `ConfigError`."""
    from dlrover.cli.ray.command import run_job

    if not path:
        raise ConfigError(
            "--platform ray needs --job-spec FILE, which describes the job's nodes. For a script alone: dlrover ray run."
        )
    backend = os.environ.get("state_backend_type", "Memory")  # noqa: SIM112 (the original's name)
    if backend != "Memory":
        raise ConfigError(
            f"The variable state_backend_type={backend} is not supported. Leave it out, or set it to Memory."
        )
    return run_job(
        read_job_file(
            path,
            command,
            os.environ,
            job_name=job_name,
            pending_timeout=pending_timeout,
            pending_strategy=pending_strategy,
            relaunches_errors=relaunches_errors,
            scaling=scaling,
        )
    )


def _decode(path: str) -> object:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--job-spec {path}: {error.strerror}.") from error
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".json":
            return msgspec.json.decode(data)
        if suffix in (".yaml", ".yml"):
            return msgspec.yaml.decode(data)
    except ImportError as error:
        raise ConfigError(
            f"--job-spec {path}: YAML files need the package pyyaml. Install it with: pip install 'dlrover[ray]'"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--job-spec {path}: {error}.") from error
    raise ConfigError(f"--job-spec {path}: the name must end in .json, .yaml or .yml.")


def _spec_of(content: object, path: str) -> Mapping[str, object]:
    if not isinstance(content, dict) or not isinstance(content.get("spec"), dict):
        raise ConfigError(f"--job-spec {path}: the file has no `spec` with the job's nodes.")
    spec: dict[str, object] = content["spec"]
    _check_keys(spec, _SPEC_KEYS, f"{path}: spec")
    if spec.get("optimizeMode", "") not in OPTIMIZE_MODES:
        known = "manual, single-job, cluster"
        raise ConfigError(f"{path}: spec.optimizeMode {spec['optimizeMode']!r} must be one of {known}.")
    return spec


def _check_keys(found: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for name in found:
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown. Known are {', '.join(known)}.")


def _training_types(replicas: Mapping[str, object], path: str) -> dict[NodeType, tuple[str, Mapping[str, object]]]:
    """Each type with the name and the fields that the file gives it, the workers' first. The master's own template is none of them."""
    found: dict[NodeType, tuple[str, Mapping[str, object]]] = {}
    for name, replica in replicas.items():
        if name == "dlrover-master":
            continue
        where = f"{path}: spec.replicaSpecs.{name}"
        if name not in (*NodeType, _FORMER_CHIEF):
            raise ConfigError(f"{where} is not a type of node. The types are {', '.join((*NodeType, _FORMER_CHIEF))}.")
        kind = NodeType.CHIEF if name == _FORMER_CHIEF else NodeType(name)
        if kind in found:
            raise ConfigError(f"{where} and {found[kind][0]} name the same type. Give only one of them.")
        if not isinstance(replica, dict):
            raise ConfigError(f"{where} must be a map with replicas and resources.")
        _check_keys(replica, _REPLICA_KEYS, where)
        found[kind] = (name, replica)
    if NodeType.WORKER not in found:
        raise ConfigError(f"{path}: spec.replicaSpecs.worker is missing.")
    return {NodeType.WORKER: found.pop(NodeType.WORKER), **found}


def _replica_spec(name: str, replica: Mapping[str, object], path: str) -> ReplicaSpec:
    where = f"{path}: spec.replicaSpecs.{name}"
    return ReplicaSpec(
        count=_whole(replica.get("replicas", replica.get("replica", 1)), f"{where}.replicas"),
        resource=_resource(replica, where),
        max_relaunches=_whole(replica.get("restartCount", 3), f"{where}.restartCount"),
        critical=str(replica.get("criticalNodes", "")),
        priority=str(replica.get("priority", "")),
    )


def _resource(replica: Mapping[str, object], where: str) -> Resource:
    wanted = replica.get("resources", replica.get("resource", {})) or {}
    if isinstance(wanted, dict) and isinstance(wanted.get("requests", wanted.get("limits")), dict):
        wanted = wanted.get("requests") or wanted["limits"]
    if not isinstance(wanted, dict):
        raise ConfigError(f"{where}.resources must be a map, such as {{cpu: 4, memory: 8Gi}}.")
    # The name of the resource says what accelerator it is; Ray calls all of them GPU.
    return msgspec.structs.replace(resource_of(wanted), gpu_type="")


def _limits(spec: Mapping[str, object], path: str) -> Resource:
    given = spec.get("resourceLimits") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: spec.resourceLimits must be a map, such as {{cpu: 100, memory: 512Gi, gpu: 8}}.")
    try:
        return limits_of(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: spec.resourceLimits: {error}") from error


def _unused_fields(spec: Mapping[str, object], replicas: Mapping[str, Mapping[str, object]]) -> str:
    """A sentence about fields that are given and have no effect here; empty: there is none."""
    given = {
        "spec.enableElasticScheduling": not spec.get("enableElasticScheduling", True),
        "spec.enableDynamicSharding": not spec.get("enableDynamicSharding", True),
        **{
            f"spec.replicaSpecs.{name}.{field}": bool(replica.get(field))
            for name, replica in replicas.items()
            for field in ("restartTimeout", "image")
        },
    }
    names = [name for name, is_given in given.items() if is_given]
    return f"These fields have no effect on Ray: {', '.join(names)}." if names else ""


def _is_true(value: object, where: str) -> bool:
    if not isinstance(value, bool | str):
        raise ConfigError(f"{where}.autoScale must be true or false (got {value!r}).")
    return is_true_text(value)


def _strategy(spec: Mapping[str, object], kinds: Collection[NodeType], path: str) -> Strategy:
    """Absent: by the types."""
    has_servers = NodeType.PS in kinds
    text = spec.get("distributionStrategy", Strategy.PS.value if has_servers else Strategy.ALLREDUCE.value)
    if text == Strategy.PS.value and not has_servers:
        raise ConfigError(f"{path}: distributionStrategy {text} needs spec.replicaSpecs.ps.")
    if text in (Strategy.PS.value, Strategy.CUSTOM.value) and has_servers:
        return Strategy.PS
    others = [kind.value for kind in kinds if kind is not NodeType.WORKER]
    if others:
        raise ConfigError(
            f"{path}: replicas of type {', '.join(others)} belong to a job with parameter servers. Give {Strategy.PS.value} and replicas of type ps."
        )
    if text not in (Strategy.ALLREDUCE.value, Strategy.CUSTOM.value):
        raise ConfigError(f"{path}: distributionStrategy {text} does not run on Ray. Use {Strategy.ALLREDUCE.value}.")
    return Strategy.ALLREDUCE


def _command_of(found: Mapping[NodeType, tuple[str, Mapping[str, object]]], path: str) -> list[str]:
    """All nodes run the same. Raises `ConfigError` for types that say different things."""
    commands = {name: words for name, replica in found.values() if (words := _replica_command(replica))}
    if not commands:
        raise ConfigError(
            f"{path} does not say which command the workers run. Give spec.replicaSpecs.worker.command, or put "
            "the script after `--`."
        )
    first = next(iter(commands))
    other = next((name for name, words in commands.items() if words != commands[first]), "")
    if other:
        raise ConfigError(
            f"{path}: {first} and {other} have different commands. On Ray, all nodes of a job run the same "
            "command, and the type of a node tells it what to do."
        )
    return commands[first]


def _replica_command(replica: Mapping[str, object]) -> list[str]:
    """Empty: nothing says it."""
    found: object = replica.get("command")
    arguments: object = replica.get("args", [])
    template = replica.get("template")
    if found is None and isinstance(template, dict):
        containers = (template.get("spec") or {}).get("containers") or [{}]
        found, arguments = containers[0].get("command"), containers[0].get("args", [])
    words = [*_words(found), *_words(arguments)]
    if words[:2] in (["/bin/sh", "-c"], ["/bin/bash", "-c"], ["sh", "-c"], ["bash", "-c"]) and len(words) == 3:
        words = shlex.split(words[2])
    if (words and os.path.basename(words[0]) in _LAUNCHERS) or (
        words and os.path.basename(words[0]).startswith("python")
    ):
        words = words[1:]
    return words


def _words(value: object) -> list[str]:
    if value is None:
        return []
    return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]  # type: ignore[attr-defined]


def _whole(value: object, where: str) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where} must be a whole number of 0 or more (got {value!r}).")
    return value
