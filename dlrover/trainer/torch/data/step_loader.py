"""
`StepLoader`: batches for workers that step together, with the same records in every step whatever happens in between.

    loader = StepLoader(CsvSource("clicks.csv"), batch_size=96, num_epochs=2, shuffle=True, num_workers=2)
    for batch in loader:
        (loss_of(model, batch.data) * batch.weight).backward()
        optimizer.step()
        step += 1
        loader.used(batch, step)
        checkpointer.save_checkpoint(step, state)

`batch_size` is that of the step, on all ranks together. Rank 0 takes shards of the job and tells the others, in one small broadcast per shard; all cut the
same batches and each reads its part. So every rank takes equally many steps, no rank waits for records that another holds, and the
records of step 1000 are those of an undisturbed run, also after crashes and with more or fewer ranks. Rank 0 alone reports what was used.

A batch with fewer records than ranks gives some ranks none: they get one that does not count, with weight 0, so that their collectives
still match.

The broadcasts happen in the thread that iterates, in program order, as any collective of the script. All ranks give the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from dlrover.protocol.messages.data import DatasetSpec, LeasedShard
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data.shard_reader import (
    ShardPiece,
    ShardReader,
    SourceRecords,
    batches_of,
    check_same_data,
    cut,
    size_of,
    spec_of,
)
from dlrover.trainer.data_sources.source import Source
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.data.batch import Batch, Collate

_LOOK = 1.0
"""Seconds that half a batch of a stream waits for the rest."""
_SIGN_OF_LIFE = 60.0
"""Seconds after which ranks that wait for new data hear that there are none yet: a collective has a deadline."""
VERSION = 1


class Word(Struct, frozen=True):
    """What rank 0 says."""

    shard: LeasedShard | None = None
    is_end: bool = False
    trouble: str = ""


_WORD_DECODER = msgspec.msgpack.Decoder(Word)


class StepPart(Struct, frozen=True):
    """What one rank reads of a step."""

    all: tuple[ShardPiece, ...]
    own: tuple[ShardPiece, ...]
    size: int
    weight: float


class StepLoader:
    def __init__(
        self,
        source: Source,
        *,
        name: str = "",
        batch_size: int,
        num_epochs: int = 1,
        shuffle: bool | str = False,
        seed: int = 0,
        batches_per_shard: int = 0,
        must_finish: bool | None = None,
        collate_fn: Collate | None = None,
        loader: type[DataLoader[Any]] = DataLoader,
        link: Link | None = None,
        **options: Any,
    ) -> None:
        """
        The first arguments are those of `ShardDataset`. `loader`: DataLoader, or one like it; `options` are its own: `num_workers`,
        `pin_memory`...
        """
        is_grouped = dist.is_available() and dist.is_initialized()
        self._rank = int(dist.get_rank()) if is_grouped else 0
        self._world_size = int(dist.get_world_size()) if is_grouped else 1
        self._spec = spec_of(
            source,
            name=name,
            batch_size=batch_size,
            num_epochs=num_epochs,
            shuffle=shuffle,
            seed=seed,
            batches_per_shard=batches_per_shard,
            is_required=must_finish,
        )
        # All register, so that a rank whose files differ is found; only the first takes shards.
        self._reader = ShardReader(source, self._spec, link=link)
        self._batches = StepBatches(self._reader, self._rank, self._world_size)
        self._loader = loader(
            _Parts(source, self._spec),
            batch_sampler=self._batches,
            collate_fn=_BatchMaker(collate_fn or default_collate),
            **options,
        )

    def __iter__(self) -> Iterator[Batch]:
        """One pass through what is unread, all epochs."""
        if self._rank == 0:
            self._reader.give_back()
        return iter(self._loader)

    def used(self, batch: Batch, step: int) -> None:
        """The model of this step contains the batch. All ranks say it, in the order of the batches, before the step is saved."""
        if self._rank == 0:
            self._reader.used(batch.pieces, step)

    def stop_early(self, reason: str = "training stopped early") -> None:
        """The rest is left unread on purpose: the job completes without it."""
        if self._rank == 0:
            self._reader.stop_early(reason)

    def state_dict(self) -> dict[str, Any]:
        """What is unread, for another job; the running one keeps its own books. Only rank 0 has it."""
        text = self._reader.checkpoint() if self._rank == 0 else None
        spec = self._spec
        return {"version": VERSION, "name": spec.name, "fingerprint": spec.fingerprint, "shards": text}

    @older_names(state="state_dict")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there if this job has not used anything yet; otherwise its own books are right. All ranks call it."""
        check_same_data(state_dict, self._spec)
        if self._rank == 0 and state_dict["shards"] is not None and not self._reader.state().num_consumed:
            self._reader.restore(state_dict["shards"])
        if self._world_size > 1:
            dist.barrier()

    def close(self) -> None:
        self._reader.close()


class StepBatches(Sampler[StepPart]):  # type: ignore[misc]  # torch is not followed
    """Runs in the process that trains, also when worker processes read the records."""

    def __init__(self, reader: ShardReader, rank: int, world_size: int) -> None:
        self._reader, self._rank, self._world_size = reader, rank, world_size

    def __iter__(self) -> Iterator[StepPart]:
        for pieces in batches_of(self._shards(), self._reader.spec.batch_size):
            yield part_of(pieces, self._rank, self._world_size)

    def state_dict(self) -> dict[str, Any]:
        """Asked by a StatefulDataLoader. The job knows where the data stand: nothing is to be skipped."""
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass

    def _shards(self) -> Iterator[LeasedShard | None]:
        is_idle = True
        while True:
            word = self._heard(is_idle)
            if word.trouble:
                raise RuntimeError(f"Rank 0 could not get data: {word.trouble}")
            if word.is_end:
                return
            is_idle = word.shard is None
            yield word.shard

    def _heard(self, is_idle: bool) -> Word:
        if self._rank:
            return _WORD_DECODER.decode(_broadcast(b""))
        try:
            shard = self._reader.take(_SIGN_OF_LIFE if is_idle else _LOOK)
            word = Word(shard=shard, is_end=shard is None)
        except TimeoutError:
            word = Word()
        except Exception as error:
            self._tell(Word(trouble=f"{type(error).__name__}: {error}"))
            raise
        self._tell(word)
        return word

    def _tell(self, word: Word) -> None:
        if self._world_size > 1:
            _broadcast(msgspec.msgpack.encode(word))


def part_of(pieces: list[ShardPiece], rank: int, world_size: int) -> StepPart:
    """Runs of nearly equal length, one for each rank."""
    total = size_of(pieces)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    own = cut(pieces, first, last) or cut(pieces, 0, 1)
    return StepPart(tuple(pieces), tuple(own), last - first, (last - first) * world_size / total)


def _broadcast(data: bytes) -> bytes:
    """From rank 0 to all."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if data:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(content, src=0)
    return bytes(content.cpu().tolist())


class _Parts(Dataset[Any]):  # type: ignore[misc]  # torch is not followed
    """Reads the records of a part, where the DataLoader wants it."""

    def __init__(self, source: Source, spec: DatasetSpec) -> None:
        self._records = SourceRecords(source, spec)

    def __len__(self) -> int:
        return max(0, self._records.spec.size)

    def __getitem__(self, place: int) -> Any:
        return self._records.source.read([place])[0]

    def __getitems__(self, part: StepPart) -> tuple[StepPart, list[Any]]:
        return part, self._records.read(part.own)


class _BatchMaker:
    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, read: tuple[StepPart, list[Any]]) -> Batch:
        part, records = read
        return Batch(self._collate(records), part.all, size=part.size, total=size_of(part.all), weight=part.weight)
