"""
`dlrover doctor`: what a job of this user would find here, a sentence for each finding.

It looks at the machine, the installed packages by extra, the platforms, the variables, and what dead jobs left behind. It connects to nothing and
imports no framework: the versions come from the packages' metadata.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata

from msgspec import Struct

from dlrover.cli.launch.check_env import EnvFinding, look
from dlrover.protocol.errors import ConfigError

PURPOSES = {
    "torch": "training with PyTorch, Flash Checkpoint",
    "tensorflow": "jobs that use the newest TensorFlow",
    "tensorflow-estimator": "TensorFlow 2.15 with its Estimator (Python 3.11)",
    "k8s": "jobs on Kubernetes",
    "ray": "jobs on a Ray cluster",
    "brain": "sizes for new jobs, from the history of earlier jobs",
    "dashboard": "the live page and /metrics on its port",
    "storage": "checkpoints behind URLs such as s3:// and gs://",
    "otel": "events to OpenTelemetry",
    "data": "Parquet files as data sources",
    "frameworks": "DeepSpeed, transformers, Megatron-Core, torchdata",
    "nv": "memory and health of NVIDIA devices",
    "stacks": "native stacks of workers that hang",
    "docs": "building the documentation",
    "dev": "changing this project",
}
"""What each extra is for."""
_REMEDIES = {
    "python": "Install Python 3.11 or newer.",
    "linux kernel": "Use Linux with a kernel of version 5.4 or newer.",
    "pidfd": "Nothing: the agent then notices ended workers by SIGCHLD.",
    "/dev/shm": "Set DLROVER_SNAPSHOT_DIR to a directory in memory. Snapshots on a disk are slower.",
    "streaming copy": "Saves to memory take up to twice as long. Install a C compiler, then install dlrover again.",
    "cgroup": "Reports cannot tell a worker that was killed for lack of memory from another killed worker.",
    "accelerators": "Workers train on the CPU.",
    "py-spy": "Stacks of hanging workers show Python frames only. Install the extra `stacks`.",
}
_OPTIONAL = ("aiohttp", "PyYAML", "ray")
"""Packages of extras, which are looked at by extra."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*;.*extra\s*==\s*['\"]([\w-]+)['\"]")


class FindingState(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Something is missing that only some jobs need."""
    PROBLEM = "problem"


class DoctorFinding(Struct, frozen=True, kw_only=True):
    area: str
    name: str
    state: FindingState
    sentence: str


def examine(environ: Mapping[str, str], needed: Sequence[str] = ()) -> list[DoctorFinding]:
    """All findings. `needed`: extras that must be complete. Raises `ConfigError` for an extra that does not exist."""
    extras = packages_by_extra()
    for name in needed:
        if name not in extras:
            raise ConfigError(f"There is no extra {name}. Give one of {', '.join(sorted(extras))}.")
    machine = sorted(_machine(), key=lambda finding: finding.area)  # a stable order within each
    return [*machine, *_extras(extras, needed), *_platforms(environ), *_variables(environ)]


def packages_by_extra() -> dict[str, list[tuple[str, str]]]:
    """Name and version bounds of the packages of each extra, as the installed package declares them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in metadata.requires("dlrover") or ():
        match = _REQUIREMENT.match(line)
        if match is not None:
            found.setdefault(match[3], []).append((match[1], match[2].strip("() ")))
    return found


def _machine() -> Iterator[DoctorFinding]:
    for each in look():
        if each.name in _OPTIONAL:
            continue
        area = "packages" if each.name in ("msgspec", "grpcio", "torch", "psutil", "numpy") else "machine"
        yield DoctorFinding(area=area, name=each.name, state=_state_of(each), sentence=_sentence(each))


def _state_of(finding: EnvFinding) -> FindingState:
    if finding.is_there:
        return FindingState.OK
    return FindingState.PROBLEM if finding.is_essential else FindingState.NOTE


def _sentence(finding: EnvFinding) -> str:
    if finding.is_there:
        return f"{finding.value}."
    found = f"Found {finding.value}. " if finding.value not in ("", "no", "none") else "Not found. "
    remedy = _REMEDIES.get(finding.name) or f"Needed for: {finding.needed_for}. Run `pip install {finding.name}`."
    return found + remedy


def _extras(extras: Mapping[str, Sequence[tuple[str, str]]], needed: Sequence[str]) -> Iterator[DoctorFinding]:
    for extra, packages in sorted(extras.items()):
        wrong = [text for name, bounds in packages if (text := _wrong_with(name, bounds))]
        purpose = PURPOSES.get(extra, "")
        if not wrong:
            yield DoctorFinding(area="extras", name=extra, state=FindingState.OK, sentence=f"Complete ({purpose}).")
            continue
        state = FindingState.PROBLEM if extra in needed else FindingState.NOTE
        sentence = f"Not complete: {', '.join(wrong)}. For {purpose}: pip install 'dlrover[{extra}]'."
        yield DoctorFinding(area="extras", name=extra, state=state, sentence=sentence)


def _wrong_with(package: str, bounds: str) -> str:
    """Empty if the package is here in a version within the bounds."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is missing"
    return "" if is_within(version, bounds) else f"{package} is {version}, {bounds} is needed"


def is_within(version: str, bounds: str) -> bool:
    """By the numbers of the version alone: what comes after them is not compared."""
    have = _numbers(version)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|<|>|~=)\s*([\w.*+]+)", bound)
        if match is None:
            continue
        want = _numbers(match[2])
        order = (have > want) - (have < want)
        allowed = {">=": (0, 1), "<=": (0, -1), "==": (0,), "!=": (1, -1), "<": (-1,), ">": (1,), "~=": (0, 1)}
        if order not in allowed[match[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.match(r"[\d.]*", version.partition("+")[0])[0].split(".") if part]  # type: ignore[index]  # it always matches
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _platforms(environ: Mapping[str, str]) -> Iterator[DoctorFinding]:
    from dlrover.platforms.local.namespaces import available

    reason = available()
    local = "Each node of `dlrover local` gets an address of its own."
    if reason:
        local = f"Nodes of `dlrover local` share the loopback address: {reason}."
    yield _platform("local", not reason, local)
    try:
        from dlrover.platforms.kubernetes.access import find_access

        find_access(environ)
        yield _platform("kubernetes", True, "A cluster is configured. `dlrover doctor` sent no request to it.")
    except ImportError as error:
        yield _platform("kubernetes", False, f"Install the extra `k8s` ({error}).")
    except ConfigError as error:
        yield _platform("kubernetes", False, str(error))
    ray = _wrong_with("ray", ">=2.40")
    address = environ.get("RAY_ADDRESS", "")
    where = (
        f"RAY_ADDRESS is {address}."
        if address
        else "RAY_ADDRESS is not set: commands look for a cluster on this machine."
    )
    yield _platform("ray", not ray, f"{ray}. Install the extra `ray`." if ray else where)


def _platform(name: str, is_usable: bool, sentence: str) -> DoctorFinding:
    state = FindingState.OK if is_usable else FindingState.NOTE
    return DoctorFinding(area="platforms", name=name, state=state, sentence=sentence)


def _variables(environ: Mapping[str, str]) -> Iterator[DoctorFinding]:
    from dlrover.cli.launch.runtime_dir import list_nodes, user_root
    from dlrover.cli.options.environment import read_environment
    from dlrover.cli.options.parser import parse

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            environment = read_environment(environ)
            parse(["script.py"], environ)
        except ConfigError as error:
            yield _variable(FindingState.PROBLEM, str(error))
            return
    notes = [str(each.message) for each in told]
    notes += [f"{each} has no effect in this version." for each in environment.unused]
    for note in notes:
        yield _variable(FindingState.NOTE, note)
    if not notes:
        yield _variable(FindingState.OK, "All environment variables that dlrover-run reads have valid values.")
    try:
        living, dead = list_nodes(user_root(environment))
    except (ConfigError, OSError) as error:
        yield DoctorFinding(area="jobs", name="directory", state=FindingState.PROBLEM, sentence=str(error))
        return
    yield DoctorFinding(
        area="jobs", name="running", state=FindingState.OK, sentence=f"Your running launchers: {len(living)}."
    )
    if dead:
        sentence = (
            f"Directories left over from launchers that have ended: {len(dead)}. Run `dlrover clean` to remove them."
        )
        yield DoctorFinding(area="jobs", name="left behind", state=FindingState.NOTE, sentence=sentence)


def _variable(state: FindingState, sentence: str) -> DoctorFinding:
    return DoctorFinding(area="environment", name="variables", state=state, sentence=sentence)


def lines_of(findings: Sequence[DoctorFinding]) -> Iterator[str]:
    """For a terminal: findings by area, then the verdict."""
    area = ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.area != area:
            area = finding.area
            yield f"{area}:"
        yield f"  {finding.state.value:<8}{finding.name:<{width}}  {finding.sentence}"
    problems = [finding.name for finding in findings if finding.state is FindingState.PROBLEM]
    yield (
        f"\nProblems: {', '.join(problems)}."
        if problems
        else "\nNo problem was found. A note matters only to jobs that need the part it names."
    )
