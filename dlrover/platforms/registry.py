"""
From the name of a platform to the platform.

Modules are imported when they are asked for, so that no job needs the libraries of a platform that is not used.
Others add theirs under the entry point group `dlrover.platforms`, or name a class as `module::Class`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Protocol

from dlrover.platforms.base import Platform
from dlrover.protocol.errors import ConfigError

ENTRY_POINTS = "dlrover.platforms"
_BUILT_IN = {
    "fake": "dlrover.platforms.fake::FakePlatform",
    "local": "dlrover.platforms.hosted.client::LocalPlatform",
    "kubernetes": "dlrover.platforms.kubernetes.platform::PodPlatform",
    "k8s": "dlrover.platforms.kubernetes.orders.writer::PlanPlatform",
    "pyk8s": "dlrover.platforms.kubernetes.platform::PodPlatform",
}


class PlatformClass(Protocol):
    """What the registry finds by name."""

    @classmethod
    def from_options(cls, job_uid: str, options: Mapping[str, object]) -> Platform:
        """Raises `ConfigError` for options that it does not know."""
        ...


def build_platform(name: str, *, job_uid: str, options: Mapping[str, object]) -> Platform:
    """Raises `ConfigError` for an unknown name and for options that the platform does not."""
    found = find_platform(name)
    try:
        return found.from_options(job_uid, options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # it may be the user's, and raise anything
        raise ConfigError(f"The platform {name} cannot be built: {type(error).__name__}: {error}.") from error


def find_platform(name: str) -> type[PlatformClass]:
    if "::" in name:
        return _load(name, name)
    if name in _BUILT_IN:
        return _load(name, _BUILT_IN[name])
    others = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name in others:
        return _load(name, others[name].value.replace(":", "::", 1))
    known = ", ".join(sorted({*_BUILT_IN, *others}))
    raise ConfigError(f"There is no platform {name!r}. Known are {known}. Give a class of your own as module::Class.")


def _load(name: str, target: str) -> type[PlatformClass]:
    module_name, _, class_name = target.partition("::")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"The platform {name} cannot be loaded: {error}. Check that its package is installed."
        ) from error
    except (Exception, SystemExit) as error:  # it may be the user's, and raise anything
        raise ConfigError(f"The platform {name} cannot be loaded: {type(error).__name__}: {error}.") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"The platform {name}: the module {module_name} has no class {class_name!r}.")
    if not callable(getattr(found, "from_options", None)):
        raise ConfigError(f"The platform {name} cannot be built by name, because {class_name} has no `from_options`.")
    return found  # type: ignore[no-any-return]
