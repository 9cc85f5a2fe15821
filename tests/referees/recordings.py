"""
What must stay the same while the inside is rebuilt, written down: `python -m tests.referees` writes it anew.

* the traces of simulated jobs: every record of a seed's journal, folded into one number;
* a journal, and what `dlrover replay` says of it;
* the names that scripts import, with what they take;
* every `--help`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import itertools
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import typer
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.cli.options.help_page import describe_all, describe_common
from dlrover.cli.show.replay import replay
from dlrover.core.job import DECISION_VERSION
from dlrover.master.journal.journal import Journal
from dlrover.python.aliases import ALIASES
from dlrover.simulator.campaign import draw_plan
from dlrover.simulator.simulation import Simulation
from dlrover.trainer.older_names import older_names_of

FOLDER = Path(__file__).parent
TRACES = FOLDER / "traces.txt"
JOURNAL = FOLDER / "journal.sqlite"
TIMELINE = FOLDER / "timeline.jsonl"
JOURNAL_SEED = 22
NAMES = FOLDER / "names.txt"
HELP = FOLDER / "help.txt"
SEEDS = range(1, 201)
FLASH_CHECKPOINT = "dlrover.trainer.torch.flash_checkpoint"
PUBLIC = (
    "dlrover.trainer",
    "dlrover.trainer.sharding_client",
    "dlrover.trainer.sync",
    "dlrover.trainer.tensorflow",
    "dlrover.trainer.tensorflow.coordinator",
    "dlrover.trainer.tensorflow.reader",
    "dlrover.trainer.torch.data",
    *(
        f"dlrover.trainer.torch.{name}"
        for name in ("compatible_main", "elastic_dataset", "elastic_run", "elastic_sampler")
    ),
    *(f"dlrover.trainer.torch.{name}" for name in ("kv_store", "main", "run_network_check")),
    *(
        f"{FLASH_CHECKPOINT}.{name}"
        for name in ("checkpointer", "dcp", "ddp", "ddp_engine", "deepspeed", "deepspeed_engine")
    ),
    *(f"{FLASH_CHECKPOINT}.{name}" for name in ("engine", "fsdp", "fsdp_engine", "full_ckpt_engine", "hf_trainer")),
    *(
        f"{FLASH_CHECKPOINT}.{name}"
        for name in ("megatron", "megatron_dist_ckpt", "megatron_engine", "megatron_sharded", "replica")
    ),
    "dlrover.client.platform.ray.ray_job_submitter",
    "dlrover.unified",
)
PUBLIC_ROOMS = (
    "dlrover.trainer.data_sources",
    "dlrover.trainer.events",
    "dlrover.trainer.torch.elastic",
)


def trace_of(seed: int) -> str:
    return f"{seed} {Simulation(draw_plan(seed)).run().trace}"


def traces() -> str:
    """With the version of the decisions: another version may decide otherwise."""
    return "".join(f"{line}\n" for line in (f"decision version {DECISION_VERSION}", *map(trace_of, SEEDS)))


def names() -> str:
    """Each import path with the names in it, and each name with what it takes."""
    modules = [*PUBLIC, *(name for room in PUBLIC_ROOMS for name in _modules_of(room))]
    lines = [f"{name}:{line}" for name in modules for line in _names_of(importlib.import_module(name))]
    for path, held in sorted(ALIASES.items()):
        for name in sorted(held):
            if held[name].startswith("dlrover.trainer.tensorflow.hooks."):
                continue  # needs TensorFlow, and this must be the same everywhere
            found = getattr(importlib.import_module(path), name)
            lines += [f"{path}:{line}" for line in _described(name, found)]
    return "".join(f"{line}\n" for line in lines)


def _modules_of(room: str) -> Iterator[str]:
    package = importlib.import_module(room)
    yield room
    for found in pkgutil.iter_modules(package.__path__):
        yield f"{room}.{found.name}"


def _names_of(module: ModuleType) -> Iterator[str]:
    listed = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    for name in sorted(listed):
        if not name.startswith("_"):
            yield from _described(name, getattr(module, name))


def _described(name: str, value: object) -> Iterator[str]:
    yield f"{name}{_taken(value)}"
    if inspect.isclass(value) and value.__module__.startswith("dlrover"):
        for method, member in sorted(vars(value).items()):
            if not method.startswith("_") and callable(getattr(value, method)):
                yield f"{name}.{method}{_taken(getattr(value, method))}"
            elif not method.startswith("_") and isinstance(member, property):
                yield f"{name}.{method}"


def _taken(value: object) -> str:
    """Parameters with their defaults; not their annotations, which may name what is inside."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # made by C, or of no fixed form
        return "(…)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>", "<an object>", text)
    older = older_names_of(value.__init__ if inspect.isclass(value) else value)
    return text + "".join(f" [{name}: also {each}]" for each, name in sorted(older.items()))


def helps() -> str:
    """The help of every command, as in a terminal of 120 columns."""
    runner = CliRunner(env={"COLUMNS": "120", "TERMINAL_WIDTH": "120", "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"})
    texts = [("dlrover-run --help", describe_common()), ("dlrover-run --help-all", describe_all())] + [
        (" ".join(("dlrover", *words, "--help")), runner.invoke(app, [*words, "--help"], prog_name="dlrover").output)
        for words in _commands(typer.main.get_command(app))
    ]
    lines = [f"==== {name}\n{text.strip()}\n" for name, text in texts]
    return "".join(re.sub(r" +$", "", line, flags=re.MULTILINE) for line in lines)


def _commands(command: object, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    inner: Mapping[str, object] = getattr(command, "commands", {})  # a group has some
    for name in sorted(inner):
        yield from _commands(inner[name], (*words, name))


def timeline() -> str:
    """What `dlrover replay` says of the recorded journal; it compares each digest in it with the state of its own replay."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert replay(JOURNAL, as_json=True) == 0
    return told.getvalue()


def write_journal() -> None:
    """All records of one simulated job, in a file as a master writes it."""
    JOURNAL.unlink(missing_ok=True)
    simulation = Simulation(msgspec.structs.replace(draw_plan(JOURNAL_SEED), digest_every=1))
    simulation.run()
    journal = Journal(JOURNAL, job_name="referee", decision_version=DECISION_VERSION)
    journal.append(1, simulation.masters.journal.archive)
    journal.close()


def record() -> None:
    TRACES.write_text(traces())
    write_journal()
    TIMELINE.write_text(timeline())
    NAMES.write_text(names())
    HELP.write_text(helps())


def first_difference(recorded: str, now: str, name: str) -> str:
    """Empty if there is none."""
    lines = itertools.zip_longest(recorded.splitlines(), now.splitlines(), fillvalue="")
    for number, (was, became) in enumerate(lines, 1):
        if was != became:
            return f"{name}, line {number}: recorded {was!r}, now {became!r}"
    return ""
