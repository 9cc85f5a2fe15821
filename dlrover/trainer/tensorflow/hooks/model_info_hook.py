"""`ReportModelInfoHook`: how large the model is, told once by the chief to the master, which decides about the size of the job."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from dlrover.protocol.messages.scaling import JobFacts
from dlrover.trainer.facts import tell_facts

_UPDATE = "update_"
_READS = ("/read", "/Read/ReadVariableOp")


class ReportModelInfoHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Under this name and `ReportModelMetricHook` in scripts of the original. Reads the graph, runs nothing."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        tell_facts(model_facts(session.graph))


def model_facts(graph: Any) -> JobFacts:
    """Sizes are numbers of elements. A table that grows with its keys has none."""
    names = [operation.name for operation in graph.get_operations()]
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    sizes = [math.prod(each.shape.as_list()) for each in variables if each.shape.is_fully_defined()]
    return JobFacts(
        job_type="ParameterServerStrategy",
        variable_count=len(variables),
        total_variable_size=sum(sizes),
        max_variable_size=max(sizes, default=0),
        op_count=len(names),
        update_op_count=sum(_UPDATE in name for name in names),
        read_op_count=sum(name.endswith(_READS) for name in names),
    )
