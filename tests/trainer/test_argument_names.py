"""One thing has one name in all public classes: the table, and what it says about the names that were there before."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import dlrover
from dlrover.trainer.older_names import older_names, older_names_of
from tools.reference import MODULES

NAMES = {
    "checkpoint_dir": ("directory", "dir", "save_dir", "load_dir", "ckpt_dir", "output_dir", "checkpoint_path"),
    "path": ("resume_path", "ckpt_path", "file", "filename"),
    "working_dir": ("cwd", "workdir", "work_dir"),
    "model": ("engine", "net", "network", "module"),
    "optimizer": ("optim", "opt"),
    "step": ("global_step", "iteration", "iter", "steps", "at_step"),
    "extra": ("extra_sd", "client_state", "extra_state"),
    "state_dict": ("state", "states", "sd"),
    "storage": ("store", "backend"),
    "storage_type": ("place", "where"),
    "replica_count": ("replicas", "num_replicas"),
    "num_slots": ("slots", "slot_count"),
    "checkpoint_interval": ("interval", "every", "save_interval"),
    "metric": ("score",),
    "rank": ("global_rank", "worker_rank", "dp_rank"),
    "max_workers": ("world_size", "num_workers", "full_world_size"),
    "nnodes": ("nodes", "num_nodes", "node_count"),
    "nproc_per_node": ("nproc", "num_procs", "workers_per_node"),
    "batch_size": ("micro_batch_size", "mini_batch_size", "bs"),
    "num_epochs": ("epochs", "num_epoch"),
    "seed": ("random_seed",),
    "timeout": ("deadline", "max_wait", "wait_timeout", "timeout_secs"),
    "env": ("envs", "environ", "environment"),
    "address": ("addr", "endpoint"),
}
"""A concept's name, and how it could be called as well. The others are not used for it, but are accepted where they were there before."""

STAYS = {
    "AsyncCheckpointAgent": "DeepSpeed calls it, with DeepSpeed's names",
    "AsyncSaveEngine": "another name of AsyncCheckpointAgent",
    "FlashCallback": "transformers calls it, with transformers' names",
    "TrainerProcess": "its arguments are the keys of the event's content, as in the original",
    "RayJob": "its fields are the options of `dlrover ray submit`",
    "Role": "`nproc` is the number of processes of the role on all nodes",
    "Weights": "what `publish` takes is any object, and no state dict in particular",
}


def public() -> Iterator[tuple[str, Any]]:
    for name in dlrover.__all__:
        yield name, getattr(dlrover, name)
    for path, _ in MODULES:
        module = pytest.importorskip(path)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == path]
        for name in getattr(module, "__all__", None) or own:
            if name[0] != "_" and callable(getattr(module, name)):
                yield name, getattr(module, name)


def calls_of(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The function, or the construction of the class and its methods."""
    if not inspect.isclass(value):
        yield "", value
        return
    if issubclass(value, BaseException | enum.Enum):
        return
    yield "__init__", value
    for owner in value.__mro__:
        if owner.__module__.startswith("dlrover"):
            for name, member in vars(owner).items():
                if name[0] != "_" and inspect.isfunction(member):
                    yield name, member


def all_calls() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    for name, value in public():
        for method, call in calls_of(value):
            yield name, method, call


def parameters(call: Callable[..., Any]) -> list[str]:
    return [each.name for each in inspect.signature(call).parameters.values()]


@pytest.mark.filterwarnings("ignore")  # of frameworks that are imported here
def test_one_thing_has_one_name_in_all_public_classes() -> None:
    others = {other: name for name, each in NAMES.items() for other in each}
    wrong = [
        f"{owner}.{method}: {parameter} is called {others[parameter]} elsewhere"
        for owner, method, call in all_calls()
        if owner not in STAYS
        for parameter in parameters(call)
        if parameter in others
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.filterwarnings("ignore")
def test_every_name_of_the_table_is_used_and_every_exception_is_needed() -> None:
    used = {parameter for _, _, call in all_calls() for parameter in parameters(call)}
    assert NAMES.keys() <= used, sorted(NAMES.keys() - used)
    others = {other for each in NAMES.values() for other in each}
    needed = {owner for owner, _, call in all_calls() if others & set(parameters(call))}
    assert STAYS.keys() <= needed, sorted(STAYS.keys() - needed)


@pytest.mark.filterwarnings("ignore")
def test_an_older_name_leads_to_an_argument_that_is_there() -> None:
    accepted = set()
    for owner, method, call in all_calls():
        made = call.__init__ if inspect.isclass(call) else call  # type: ignore[misc]
        for older, name in older_names_of(made).items():
            assert name in parameters(call), f"{owner}.{method}: {older}"
            assert older not in parameters(call), f"{owner}.{method}: {older}"
            assert older in NAMES[name], f"{owner}.{method}: {older}"
            accepted.add(older)
    assert accepted == {
        "client_state",
        "engine",
        "extra_sd",
        "iteration",
        "load_dir",
        "micro_batch_size",
        "resume_path",
        "save_dir",
        "state",
    }


def test_an_older_name_is_taken_by_name_and_refused_beside_the_new_one() -> None:
    @older_names(engine="model")
    def make(model: object, directory: str = "") -> tuple[object, str]:
        return model, directory

    assert make(engine=3, directory="a") == make(3, "a") == make(model=3, directory="a") == (3, "a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"engine is the older name of model\. Give only one of them"):
        make(model=3, engine=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'motor'"):
        make(motor=3)  # type: ignore[call-arg]
