"""The reader of step traces, with the text that a `Timeline` of TensorFlow prints."""

from __future__ import annotations

import json
from typing import Any

from dlrover.compat.tensorflow.profile_extractor import OperationStats, ProfileExtracter, TensorStats

CHIEF, SERVER = "/job:chief/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:0/device:CPU:0"


class Trace:
    """What a timeline of TensorFlow prints of a step: a batch on the chief, a variable that comes from a server."""

    def generate_chrome_trace_format(self, show_dataflow: bool = True, show_memory: bool = False) -> str:
        assert show_memory, "else it prints no tensors"
        devices = {1: f"{CHIEF} Compute", 2: f"{CHIEF} Tensors", 3: f"{SERVER} Compute", 4: f"{SERVER} Tensors"}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in devices.items()
        ]
        for pid, name, duration in (
            (1, "IteratorGetNext", 120), (1, "RecvTensor", 30), (1, "RecvTensor", 31), (3, "RecvTensor", 7), (1, "Sum", 2),
        ):  # fmt: skip
            events.append({"ph": "X", "cat": "Op", "name": name, "pid": pid, "tid": 0, "ts": 5, "dur": duration})
        for pid, id_, size in ((2, 0, 80), (2, 0, 80), (2, 1, 4), (4, 2, 400)):
            text = (
                f"dtype: DT_FLOAT\nallocation_description {{\n  requested_bytes: {size}\n  allocated_bytes: 512\n}}\n"
            )
            snapshot = {"snapshot": {"tensor_description": text}}
            events.append(
                {"ph": "O", "cat": "Tensor", "name": f"t{id_}", "pid": pid, "id": id_, "ts": 5, "args": snapshot}
            )
        return json.dumps({"traceEvents": events})


class Variable:
    def __init__(self, *shape: int) -> None:
        self._shape = list(shape)

    def get_shape(self) -> Variable:
        return self

    def as_list(self) -> list[int]:
        return self._shape


class Table(Variable):
    """Grows with its keys."""

    key_dtype = "int64"


def test_a_trace_tells_what_the_chief_receives_and_waits_for() -> None:
    found = ProfileExtracter(Trace())
    assert found.get_chief_recv_op_count() == 2
    assert found.get_input_fetch_dur() == 120


def test_a_trace_tells_how_large_tensors_are_on_each_device() -> None:
    assert ProfileExtracter(Trace()).get_tensor_alloc_bytes() == {f"{CHIEF} Tensors": 84, f"{SERVER} Tensors": 400}


def test_tables_that_grow_have_a_dimension_and_no_size() -> None:
    stats = TensorStats()
    stats.update_varible_stats([Variable(100, 16), Variable(16), Variable(), Table(0, 8)])
    assert (stats.variable_count, stats.total_variable_size, stats.max_variable_size) == (4, 1617, 1600)
    assert stats.kv_embedding_dims == [8]
    assert TensorStats().kv_embedding_dims == []


def test_statistics_of_operations_are_json() -> None:
    assert json.loads(OperationStats(op_count=3).to_json())["op_count"] == 3
