"""What the name of a Ray actor tells about its node."""

from __future__ import annotations

from dlrover.compat.names.constants import NodeType


def parse_type(name: str) -> str:
    """Empty for a name that tells no type."""
    kinds = (NodeType.PS, NodeType.EVALUATOR, NodeType.WORKER)
    return next((kind for kind in kinds if kind in name.lower()), "")


def parse_index(name: str) -> int:
    """`PsActor_1` is 1, `TFSinkFunction-4|20` is 4; an evaluator is always 1."""
    match parse_type(name):
        case NodeType.PS:
            return int(name.rpartition("_")[2])
        case NodeType.EVALUATOR:
            return 1
        case NodeType.WORKER:
            return int(name.partition("|")[0].rpartition("-")[2])
        case _:
            return 0


def parse_type_id_from_actor_name(name: str) -> tuple[str, int]:
    return parse_type(name), parse_index(name)
