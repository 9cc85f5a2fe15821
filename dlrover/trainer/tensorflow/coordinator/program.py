"""`Program`: what the `build` function of a conf class gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Program:
    """A model and how one batch trains it. `build(conf)` makes it inside the scope of the strategy."""

    train_step: Callable[[dict[str, Any], Any], Any]
    """Of the features by name and the label of one batch; gives the loss. It becomes part of a `tf.function` and runs on a worker."""
    objects: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint holds by name: models, optimizers, variables."""
