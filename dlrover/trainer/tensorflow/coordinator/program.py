"""`Program`: what the `build` function of a conf class gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlrover.protocol.errors import ConfigError


@dataclass(frozen=True)
class Program:
    """A model and how one batch trains it. `build(conf)` makes it inside the scope of the strategy."""

    train_step: Callable[[dict[str, Any], Any], Any] | None = None
    """Of the features by name and the label of one batch; gives the loss. It becomes part of a `tf.function` and runs on a worker."""
    objects: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint holds by name: models, optimizers, variables."""
    model: Any = None
    """In place of `train_step`: a compiled model of `tf_keras`, which is trained by its `fit`."""
    inputs: Callable[[dict[str, Any]], Any] | None = None
    """Of the features by name; gives what the model takes. None: it takes the features by name."""
    fit_options: Mapping[str, Any] = field(default_factory=dict)
    """For `fit`: callbacks, epochs, steps_per_epoch and others. Without any, one epoch is all data."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if (self.train_step is None) == (self.model is None):
            raise ConfigError("Give a Program either a train_step, or a compiled tf_keras model to fit.")
        if self.model is None:
            return
        if not any(base.__module__.startswith("tf_keras.") for base in type(self.model).__mro__):
            raise ConfigError(
                f"{type(self.model).__module__}.{type(self.model).__name__} cannot be fitted with parameter "
                "servers. Use a tf_keras model, or give a train_step. (Keras 3 has a training loop of its own.)"
            )
        self.objects.setdefault("model", self.model)
