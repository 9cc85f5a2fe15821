"""
`RayDataLoaderIter`: batches of a torch DataLoader, fetched and collated in actors, in the order of its sampler.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

DEFAULT_PREFETCH = 2


class _Fetcher:
    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate

    def fetch(self, places: Any) -> Any:
        if isinstance(places, int):
            return self._collate(self._dataset[places])
        return self._collate([self._dataset[place] for place in places])


class RayDataLoaderIter:
    def __init__(self, loader: Any, num_actors: int = 1) -> None:
        import ray

        if num_actors < 1:
            raise ValueError(f"num_actors must be at least 1 (got {num_actors}).")
        ahead = loader.prefetch_factor
        if ahead == 0:
            warnings.warn(
                "prefetch_factor is 0, so the loop waits for each batch. Give 1 or more to load ahead.", stacklevel=2
            )
        self._ray = ray
        self._ahead = num_actors * (DEFAULT_PREFETCH if ahead is None else ahead)
        self._is_pinned = bool(loader.pin_memory)
        fetcher = ray.remote(_Fetcher).options(num_cpus=0)
        dataset = ray.put(loader.dataset)
        self._actors = deque(fetcher.remote(dataset, loader.collate_fn) for _ in range(num_actors))
        self._places: Iterator[Any] = iter(loader._index_sampler)
        self._pending: deque[Any] = deque()
        for _ in range(self._ahead):
            self._ask()

    def __iter__(self) -> RayDataLoaderIter:
        return self

    def __next__(self) -> Any:
        if not self._pending:
            self._ask()
        if not self._pending:
            self.close()
            raise StopIteration
        batch = self._ray.get(self._pending.popleft())
        if self._ahead:
            self._ask()
        return _pin(batch) if self._is_pinned else batch

    def close(self) -> None:
        while self._actors:
            self._ray.kill(self._actors.popleft())

    def _ask(self) -> None:
        places = next(self._places, None)
        if places is not None:
            self._pending.append(self._actors[0].fetch.remote(places))
            self._actors.rotate(-1)


def patch_dataloader_ray() -> None:
    """From now on each torch DataLoader over a dataset with places is read by `RayDataLoaderIter`. In this process only."""
    from torch.utils.data import DataLoader, IterableDataset

    former = DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        return former(loader) if isinstance(loader.dataset, IterableDataset) else RayDataLoaderIter(loader)

    DataLoader.__iter__ = iterate


def _pin(batch: Any) -> Any:
    import torch
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch) if torch.cuda.is_available() else batch
