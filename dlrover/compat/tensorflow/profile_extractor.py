"""
Reading the trace of a step, under the names of the original: where tensors lie, what the chief receives, how long it waits for a batch.

It needs a `Timeline` of TensorFlow and takes from it only what it prints for a browser, so the layout of its inside does not matter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

from msgspec import Struct, to_builtins

_CHIEF = "/job:chief"
_REQUESTED = re.compile(r"requested_bytes: (\d+)")


class Timeline(Protocol):
    """`tensorflow.python.client.timeline.Timeline`."""

    def generate_chrome_trace_format(self, show_dataflow: bool = True, show_memory: bool = False) -> str: ...


class OperationStats(Struct):
    op_count: int = 0
    recv_op_count: int = 0
    update_op_count: int = 0
    read_op_count: int = 0
    input_fetch_dur: float = 0
    """Microseconds."""
    flops: float = 0
    runtime_flops: float = 0

    def to_json(self) -> str:
        return json.dumps(to_builtins(self))


class TensorStats(Struct):
    tensor_alloc_bytes: dict[str, int] = {}
    """By device."""
    variable_count: int = 0
    total_variable_size: int = 0
    """Sizes are numbers of elements."""
    max_variable_size: int = 0
    kv_embedding_dims: list[int] = []

    def update_varible_stats(self, variables: Iterable[Any]) -> None:  # the original's spelling
        """Tables that grow with their keys have a dimension and no size."""
        for each in variables:
            self.variable_count += 1
            shape = [int(length) for length in each.get_shape().as_list()]
            if hasattr(each, "key_dtype"):
                self.kv_embedding_dims.append(shape[-1])
                continue
            size = math.prod(shape)
            self.total_variable_size += size
            self.max_variable_size = max(self.max_variable_size, size)


class ProfileExtracter:
    def __init__(self, trace: Timeline) -> None:
        text = trace.generate_chrome_trace_format(show_dataflow=True, show_memory=True)
        self._events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
        self.pid_devices = self.get_pid_process()

    def get_pid_process(self) -> dict[int, str]:
        """Names of devices by the process ids of the trace."""
        return {
            each["pid"]: each["args"]["name"]
            for each in self._events
            if (each["ph"], each["name"]) == ("M", "process_name")
        }

    def get_tensor_alloc_bytes(self) -> dict[str, int]:
        """Bytes that the tensors of the step asked for, by device."""
        found: dict[str, int] = {}
        tensors = {(each["pid"], each["id"]): each for each in self._events if each["ph"] == "O"}
        for (pid, _), each in tensors.items():
            requested = _REQUESTED.search(str(each["args"]))
            device = self.pid_devices[pid]
            found[device] = found.get(device, 0) + (int(requested[1]) if requested is not None else 0)
        return found

    def get_chief_recv_op_count(self) -> int:
        return sum("RecvTensor" in each["name"] for each in self._chief_operations())

    def get_input_fetch_dur(self) -> float:
        """Microseconds that the chief waited for a batch; 0: the step read none by an iterator."""
        return next((each["dur"] for each in self._chief_operations() if "IteratorGetNext" in each["name"]), 0)

    def _chief_operations(self) -> list[dict[str, Any]]:
        return [each for each in self._events if "dur" in each and _CHIEF in self.pid_devices.get(each["pid"], "")]
