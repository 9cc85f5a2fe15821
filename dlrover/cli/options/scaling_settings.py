"""
How a job may change its own size: from the command line, from the historical settings (`DLROVER_<KEY>`), else the defaults.

The keys of the original that steered its scaling are fields of `ScaleTerms` here, as far as they still mean something. `SETTINGS` is the table; the page
about scaling has it too, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import ModelCard, Optimizer, ScaleFor, ScaleMode, ScaleTerms, Tuner

if TYPE_CHECKING:
    import argparse  # the launcher does without it, for the sake of its start

T = TypeVar("T", ScaleMode, ScaleFor, Tuner)

OPTIMIZERS = {
    **{each.value: each for each in Optimizer},
    "nnls": Optimizer.FITTED,
    "brain": Optimizer.FITTED,
    "local": Optimizer.RULES,
}
"""With the historical names. The plans of a Brain are offers: whichever optimiser runs, they are judged like its own."""
OPTIMIZE_MODES = {
    "": ScaleMode.OFF,
    "manual": ScaleMode.OFF,
    "manunal": ScaleMode.OFF,
    "mannual": ScaleMode.OFF,
    "single-job": ScaleMode.ON,
    "cluster": ScaleMode.ON,
}
"""`optimizeMode` of a job file, with the published misspellings."""


OPTION_FIELDS = ("auto_scale", "scale_for", "nodes_start", "optimizer", "ignore_room", "tuner")
"""Of the namespace that `add_scaling_options` fills."""


class Setting(NamedTuple):
    """A key of the original."""

    field: str
    """Of `ScaleTerms`; empty: the setting has no effect."""
    default: float
    """Of the original: who gives it asks for nothing else."""
    says: str
    """What it moves, or why it has no effect."""


SETTINGS = {
    "seconds_for_stable_worker_count": Setting(
        "stable_for",
        60,
        "seconds for which a new size is measured before the next decision (brake 4); also the trial time "
        "after a change",
    ),
    "global_step_count_to_auto_worker": Setting(
        "stable_steps", 5, "steps for which a new size is measured before the next decision (brake 4)"
    ),
    "seconds_interval_to_optimize": Setting(
        "worker_pause", 300, "shortest time between two changes of workers, in seconds (brake 5)"
    ),
    "seconds_to_change_ps": Setting(
        "server_pause", 3600, "shortest time between two changes of servers, in seconds (brake 5)"
    ),
    "seconds_huge_training_threshold": Setting(
        "slow_start", 1800, "the number of servers stays as it is if training takes more seconds than this to begin"
    ),
    "train_speed_record_num": Setting("", 50, "a run is summed up as a median, however many reports it has"),
    "seconds_to_start_autoscale_worker": Setting(
        "", 90, "jobs without steps are measured by their shards from the start"
    ),
    "step_to_adjust_worker": Setting("", 200, "the original reserves it, and so do we"),
    "optimize_worker_cpu_threshold": Setting("", 20, "the original reserves it, and so do we"),
    "factor_to_cut_pending_cpu": Setting("", 2, "a node that waits too long asks for half"),
    "factor_to_cut_pending_mem": Setting("", 2, "a node that waits too long asks for half"),
    "seconds_to_wait_pending_pod": Setting("", 900, "give --pending-timeout"),
    "seconds_to_wait_failed_ps": Setting("", 600, "a version of the cluster waits 600 s for its servers"),
    "hang_cpu_usage_rate": Setting("", 0.05, "a hang is found by what workers do, not by their CPU"),
    "max_hang_downtime": Setting("", 120, "give --max-hang-downtime"),
}
FORMER_KEYS = {
    "sample_count_to_adjust_worker": "global_step_count_to_auto_worker",
    "seconds_to_autoscale_worker": "seconds_to_start_autoscale_worker",
    "seconds_interval_to_change_ps": "seconds_to_change_ps",
}
"""Attributes of the original's global context that stand for these keys."""


class ScalingOptions(NamedTuple):
    terms: ScaleTerms
    notes: tuple[str, ...] = ()
    """Settings that were given and have no effect, for the console."""


def add_scaling_options(add: Callable[..., object]) -> None:
    """`add`: as `argparse.ArgumentParser.add_argument`."""
    modes = "|".join(each.value for each in ScaleMode)
    add(
        "--auto-scale",
        default=None,
        metavar=modes,
        help="switch automatic scaling between MIN and MAX: on, off, or dry-run (off)",
    )
    add("--scale-for", default=None, metavar="|".join(ScaleFor), help="goal of automatic scaling (balanced)")
    add(
        "--nodes-start",
        type=int,
        default=0,
        metavar="N",
        help="number of nodes at the start, with --auto-scale on (MIN)",
    )
    add("--optimizer", default=None, metavar="|".join(Optimizer), help="method that plans the size (fitted)")
    add("--ignore-room", action="store_true", help="the job keeps its nodes when the platform has room for fewer")
    for which, default in (("smallest", "cpu=4,memory=6Gi"), ("largest", "cpu=32,memory=64Gi")):
        add(
            f"--{which}-node",
            default=None,
            metavar="cpu=C,memory=M",
            help=f"no plan gives a node {'less' if which == 'smallest' else 'more'} ({default})",
        )
    add(
        "--model-card",
        default=None,
        metavar="BLOCK,LAYERS,HEADS,EMBEDDING",
        help="the transformer's sizes, for --tuner historical (128,20,20,1280)",
    )
    add(
        "--tuner",
        default=None,
        metavar="|".join(Tuner),
        help="tune the micro-batch size of the workers while they train; dlrover-run's --auto-tuning tunes for "
        "memory (off)",
    )


def scaling_of(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    *,
    default: ScaleMode = ScaleMode.OFF,
    types: tuple[NodeType, ...] | None = None,
    tuner: Tuner = Tuner.OFF,
    bounds: tuple[int, int] | None = None,
    gives_sizes: bool = False,
) -> ScalingOptions:
    """
    Raises `ConfigError`. `default`: the mode where no option gives one. `types`: that may be changed; None: all that can. `bounds`: least and
    most nodes of the job, where the command knows them; the job begins with the least.
    """
    terms, notes = from_environment(environ)
    start = options.nodes_start
    if bounds is not None and start and not bounds[0] <= start <= bounds[1]:
        raise ConfigError(f"--nodes-start {start}: give a number from {bounds[0]} to {bounds[1]}, as --nodes says.")
    given: dict[str, object] = {
        "mode": default if options.auto_scale is None else _one_of(ScaleMode, options.auto_scale, "--auto-scale"),
        "nodes_start": start or (0 if bounds is None else bounds[0]),
        "ignore_room": options.ignore_room,
        "gives_sizes": gives_sizes,
        "tuner": tuner if options.tuner is None else read_tuner(options.tuner),
    }
    if options.scale_for is not None:
        given["scale_for"] = _one_of(ScaleFor, options.scale_for, "--scale-for")
    if options.optimizer is not None:
        given["optimizer"] = read_optimizer(options.optimizer)
    if options.smallest_node is not None:
        given["smallest"] = _node_size("--smallest-node", options.smallest_node, terms.smallest)
    if options.largest_node is not None:
        given["largest"] = _node_size("--largest-node", options.largest_node, terms.largest)
    if options.model_card is not None:
        given["model_card"] = _model_card(options.model_card)
    if types is not None:
        given["types"] = types
    try:
        return ScalingOptions(replace(terms, **given), notes)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def from_environment(environ: Mapping[str, str]) -> ScalingOptions:
    """The defaults, with what the historical variables say. Raises `ConfigError`."""
    fields: dict[str, float] = {}
    notes = []
    for key, setting in SETTINGS.items():
        variable = f"DLROVER_{key.upper()}"
        text = environ.get(variable, "").strip()
        if not text:
            continue
        number = _number(variable, text)
        if setting.field:
            fields[setting.field] = int(number) if setting.field == "stable_steps" else number
        elif number != setting.default:
            notes.append(f"The variable {variable}={text} has no effect: {setting.says}.")
    try:
        return ScalingOptions(replace(ScaleTerms(), **fields), tuple(notes))
    except ValueError as error:
        raise ConfigError(f"A DLROVER_ setting of scaling: {error}.") from error


def read_optimizer(text: str) -> Optimizer:
    if text.lower() not in OPTIMIZERS:
        raise ConfigError(f"--optimizer {text}: give one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[text.lower()]


def read_tuner(text: str) -> Tuner:
    return _one_of(Tuner, text, "--tuner")


def _node_size(option: str, text: str, default: Resource) -> Resource:
    """`cpu=8,memory=16Gi`, as in Kubernetes; what is left out stays."""
    from dlrover.platforms.kubernetes.quantities import cpu_of, memory_mb_of  # late: few give it

    readers: dict[str, Callable[[object], float]] = {"cpu": cpu_of, "memory": memory_mb_of}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in readers or not value or name in found:
            raise ConfigError(f"{option} {text}: give cpu=C, memory=M or both, such as cpu=8,memory=16Gi.")
        found[name] = readers[name](value)
    return Resource(cpu=found.get("cpu", default.cpu), memory_mb=int(found.get("memory", default.memory_mb)))


def _model_card(text: str) -> ModelCard:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(ModelCard.__struct_fields__):
        raise ConfigError(
            f"--model-card {text}: give BLOCK,LAYERS,HEADS,EMBEDDING, four whole numbers such as 128,20,20,1280."
        )
    return ModelCard(**dict(zip(ModelCard.__struct_fields__, numbers, strict=True)))


def _one_of(kind: type[T], text: str, option: str) -> T:
    try:
        return kind(text.lower())
    except ValueError as error:
        raise ConfigError(f"{option} {text}: give one of {', '.join(each.value for each in kind)}.") from error


def _number(variable: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigError(f"The variable {variable}={text} must be a number.") from error
    if not 0 <= number < 1e9:
        raise ConfigError(f"The variable {variable}={text} must be from 0 to 1000000000.")
    return number
