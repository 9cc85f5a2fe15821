"""
Which module checks which kind of device.

A value of `--accelerator` leads to the name of a module that is run as a program. Packages add kinds of their own with
an entry point in the group `dlrover.node_check`, named like the accelerator: no file of ours has to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from dlrover.protocol.errors import ConfigError

ENTRY_POINTS = "dlrover.node_check"

BUILT_IN = {
    "nvidia.com/gpu": "dlrover.trainer.torch.node_check.nvidia_gpu",
    "metax-tech.com/gpu": "dlrover.trainer.torch.node_check.nvidia_gpu",
    "ascend-npu": "dlrover.trainer.torch.node_check.ascend_npu",
    "mthreads.com/gpu": "dlrover.trainer.torch.node_check.mthreads_gpu",
    "cpu": "dlrover.trainer.torch.node_check.cpu",
}


def module_of(accelerator: str, plugins: Iterable[EntryPoint] | None = None) -> str | None:
    """None: there is no check for such a device, and the check counts as passed, with a warning."""
    found = entry_points(group=ENTRY_POINTS) if plugins is None else plugins
    modules = list(dict.fromkeys(plugin.module for plugin in found if plugin.name == accelerator))
    if accelerator in BUILT_IN:
        modules.insert(0, BUILT_IN[accelerator])
    if len(modules) > 1:
        raise ConfigError(
            f"Several modules offer the node check of {accelerator}: {', '.join(modules)}. Uninstall the package of all "
            "but one, or give its accelerator another name."
        )
    return modules[0] if modules else None
