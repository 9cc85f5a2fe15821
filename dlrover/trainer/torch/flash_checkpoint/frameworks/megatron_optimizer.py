"""
This rank's share of Megatron's distributed optimizer, without gathering it anywhere.

The state is told as buffer → parameter group → place in the group → tensors, which is how the original DLRover wrote it. It fits only the same
world size and order of parameters: a script that changes these saves a distributed checkpoint of Megatron-Core instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dlrover.snapshot.storage.manifest import ManifestInvalid

ParameterState = dict[int, dict[int, dict[int, dict[str, torch.Tensor]]]]


def members_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (mixtures of experts have one), or the one."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else list(chained)


def parameter_state(optimizer: Any) -> Any:
    """Of a chain a list; None for members without parameters of their own on this rank."""
    states = [_state_of(each) for each in members_of(optimizer)]
    return states if getattr(optimizer, "chained_optimizers", None) is not None else states[0]


def load_parameter_state(optimizer: Any, state: Any) -> None:
    """Raises ManifestInvalid when the state is not this optimizer's."""
    members = members_of(optimizer)
    states = state if isinstance(state, list) else [state]
    if len(states) != len(members):
        raise ManifestInvalid(
            f"The checkpoint has a chain of {len(states)} optimizers, but this job has {len(members)}."
        )
    for member, each in zip(members, states, strict=True):
        if each is not None:
            _load(member, each)


def _state_of(optimizer: Any) -> ParameterState | None:
    if not _is_distributed(optimizer):
        return None
    found: ParameterState = {}
    for buffer, group, order, param in _places(optimizer):
        found.setdefault(buffer, {}).setdefault(group, {})[order] = _tensors_of(optimizer, param, group, order)
    return found


def _load(optimizer: Any, state: ParameterState) -> None:
    with torch.no_grad():
        for buffer, group, order, param in _places(optimizer):
            try:
                saved = state[buffer][group][order]
            except KeyError:
                raise ManifestInvalid(
                    f"The optimizer file has no state for parameter {order} of group {group} in buffer "
                    f"{buffer}. It was written with another world size or another order of parameters."
                ) from None
            _fill(optimizer, param, group, order, saved)


def _places(optimizer: Any) -> Iterator[tuple[int, int, int, Any]]:
    """Every model parameter that has a piece here: buffer, group, order, parameter."""
    for buffer, ranges in enumerate(optimizer.gbuf_ranges):
        for of_dtype in ranges.values():
            for bucket in of_dtype if isinstance(of_dtype, list) else [of_dtype]:  # before 2024 a buffer was one bucket
                for param in bucket["param_map"]:
                    group, order = optimizer.model_param_group_index_map[param]
                    yield buffer, group, order, param


def _tensors_of(optimizer: Any, param: Any, group: int, order: int) -> dict[str, torch.Tensor]:
    ask = getattr(optimizer, "_get_main_param_and_optimizer_states", None)
    if ask is not None:
        return dict(ask(param))
    main = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": main, **optimizer.optimizer.state[main]}


def _fill(optimizer: Any, param: Any, group: int, order: int, saved: dict[str, torch.Tensor]) -> None:
    tell = getattr(optimizer, "_set_main_param_and_optimizer_states", None)
    if tell is not None:
        tell(param, saved)
        return
    for name, tensor in _tensors_of(optimizer, param, group, order).items():
        if torch.is_tensor(tensor):
            tensor.copy_(saved[name])
        else:
            optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]][name] = saved[name]


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "gbuf_ranges") and not getattr(optimizer, "is_stub_optimizer", False)
