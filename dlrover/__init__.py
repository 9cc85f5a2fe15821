"""Unattended distributed training. `dlrover.resilient` and `dlrover.steps` are for scripts; all else has a module of its own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.trainer.torch.resilience.guard import resilient, steps

__all__ = ["resilient", "steps"]


def __getattr__(name: str) -> Any:
    """Late: most processes that import this package have no torch, and need none."""
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("dlrover.trainer.torch.resilience.guard"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
