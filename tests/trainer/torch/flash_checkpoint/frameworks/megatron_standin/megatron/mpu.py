"""Stand-in: who is who, for machines without megatron-core. Ranks are laid out as there: tensor, then data, then pipeline."""

from __future__ import annotations

import torch.distributed as dist

_SIZES = {"tensor": 1, "pipeline": 1}


def initialize_model_parallel(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1) -> None:
    _SIZES.update(tensor=tensor_model_parallel_size, pipeline=pipeline_model_parallel_size)


def destroy_model_parallel() -> None:
    _SIZES.update(tensor=1, pipeline=1)


def get_tensor_model_parallel_rank() -> int:
    return dist.get_rank() % _SIZES["tensor"]


def get_data_parallel_world_size() -> int:
    return dist.get_world_size() // _SIZES["tensor"] // _SIZES["pipeline"]


def get_data_parallel_rank() -> int:
    return dist.get_rank() // _SIZES["tensor"] % get_data_parallel_world_size()


def get_pipeline_model_parallel_world_size() -> int:
    return _SIZES["pipeline"]


def get_pipeline_model_parallel_rank() -> int:
    return dist.get_rank() // _SIZES["tensor"] // get_data_parallel_world_size()
