"""
From live tensors into a slot, and from a slot into live tensors.

The blocking part of a save is the copy itself: while threads copy without the interpreter lock, the training thread makes the
pickles, so their cost hides behind the bytes.

Nothing that a restore returns shares memory with the segment: the next save would change it. It fills the storages of tensors that the
caller has already, when their shapes fit, and fresh ones otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover.snapshot.copy.copying import PIECE_BYTES, Blocks, Copier, CopyInProgress, CopySpan, address_of
from dlrover.snapshot.memory.contents import FileEntry, decode_contents
from dlrover.snapshot.memory.layout import Layout, LayoutPlan, plan_state
from dlrover.snapshot.memory.segment import PinnedSlot, SegmentWriter, SlotInWriting, SlotName
from dlrover.trainer.torch.flash_checkpoint.encoding.describing import Describer, Description, Header
from dlrover.trainer.torch.flash_checkpoint.encoding.device_copies import DeviceCopies, DevicePair
from dlrover.trainer.torch.flash_checkpoint.encoding.frozen import Frozen, Looks, freeze, freeze_again
from dlrover.trainer.torch.flash_checkpoint.encoding.lazy import LAZY_FROM_BYTES, Changed, Guard, Memory, MovingStorage
from dlrover.trainer.torch.flash_checkpoint.encoding.live import fresh_storage, live_storages
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import restore_part
from dlrover.trainer.torch.flash_checkpoint.encoding.staleness import sample_digest
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import TorchTensors

META_GUESS_PER_TENSOR = 512
META_GUESS_BASE = 64 * 1024
_MAX_ROUTES = 8


def room_for_names(num_tensors: int) -> int:
    """Bytes of metadata for a state of so many tensors, at a guess; the code that prepares room and the code that saves must guess the same."""
    return META_GUESS_BASE + META_GUESS_PER_TENSOR * num_tensors


class StateWriter:
    """Saves states of one rank. It remembers how much room the last one took, so that the next fits at the first try."""

    def __init__(self, segments: SegmentWriter, copier: Copier) -> None:
        self.segments, self.copier = segments, copier
        self._meta_bytes = 0
        self._unnamed_bytes = 0
        self._turn = 0
        self._last: _Known | None = None
        """How the last state looked and was laid out."""

    def reserve(self, parts: Mapping[str, object]) -> memoryview:
        """Room for a state like this; the returned memory is worth pre-faulting."""
        plan = plan_state(parts, TorchTensors())
        return self.segments.reserve(plan.layout.data_length, self._guess_meta(plan))

    def save(
        self,
        parts: Mapping[str, object],
        *,
        step: int,
        round_: int = 0,
        paths: Mapping[str, str] | None = None,
        extra: Mapping[str, bytes] | None = None,
    ) -> SlotName | None:
        """
        Copy a state, given as named parts (each becomes a file), into a free slot. None: all slots are busy.

        The tensors may change again as soon as this returns.
        """
        pending = self.begin(parts, step=step, round_=round_, paths=paths, extra=extra)
        return None if pending is None else pending.finish()

    def begin(
        self,
        parts: Mapping[str, object],
        *,
        step: int,
        round_: int = 0,
        paths: Mapping[str, str] | None = None,
        extra: Mapping[str, bytes] | None = None,
        lazy_memory: Collection[Memory] = (),
    ) -> PendingSave | None:
        """
        The same, but for the end: `PendingSave.finish` makes it count. Storages that are `lazy_memory` as a whole may still be on their way until
        then and must not change; all others may.
        """
        with torch.no_grad():
            state = self._look_at(parts)
            for _ in range(3):  # a first guess of the room may be too small; then it is known
                plan = state.plan
                slot = self.segments.begin(state.data_length + self._unnamed_bytes, self._guess_meta(plan))
                if slot is None:
                    return None
                header = Header(step, round_, paths or {}, extra or {})
                try:
                    pending = self._fill(slot, state, header, lazy_memory)
                except BaseException:
                    slot.abandon()
                    raise
                if pending is not None:
                    return pending
                slot.abandon()
        raise AssertionError("the state changed its size while it was saved, because another thread changes it")

    def _look_at(self, parts: Mapping[str, object]) -> _State:
        last = self._last
        if last is not None and (again := freeze_again(parts, last.looks)) is not None:
            return _State(again.parts, last.plan, last.storages_of(again.tensors), last.sources, again, last)
        frozen = freeze(parts)
        adapter = TorchTensors()
        plan = plan_state(parts, adapter)
        sources = [_source(number, adapter.storages[identity]) for identity, number in plan.numbers.items()]  # type: ignore[index]
        if frozen is None:
            return _State(parts, plan, adapter.storages, sources)
        is_on_cpu = all(source.is_on_cpu for source in sources)
        self._last = _Known(frozen.looks, plan, sources) if is_on_cpu else None
        return _State(frozen.parts, plan, adapter.storages, sources, frozen, self._last)

    def _fill(
        self, slot: SlotInWriting, state: _State, header: Header, lazy_memory: Collection[Memory]
    ) -> PendingSave | None:
        """None: the slot is too small for what only the pickles know."""
        routes = self._routes_into(slot, state, lazy_memory)
        is_described_later = bool(routes.guarded) and state.frozen is not None and self._meta_bytes > 0
        with _Transfer(self.copier, routes.eager, state.storages):
            description = None if is_described_later else state.describe(header)
        if description is not None:
            self._learn(description, state.plan)
            if not description.fits(slot):
                return None
            if description.unnamed:
                unnamed = [_source(number, storage) for number, storage in description.unnamed]
                alive = {storage._cdata: storage for _, storage in description.unnamed}
                with _Transfer(self.copier, _route(self.copier, slot.data, description.layout, unnamed, alive), alive):
                    pass
        self._turn += 1
        guard = Guard(routes.guarded, self._turn)
        transfer = _Transfer(self.copier, routes.lazy, state.storages, num_helpers=0)

        def describe() -> Description:
            return description if description is not None else self._describe_later(state, header)

        return PendingSave(slot, transfer, guard, state, header, describe)

    def _routes_into(self, slot: SlotInWriting, state: _State, lazy_memory: Collection[Memory]) -> _Routes:
        known = None if state.known is None else state.known.routes.get(slot.address)
        if known is not None and known.lazy_memory == lazy_memory:
            return known
        lazy: list[_LayoutSource] = []
        eager: list[_LayoutSource] = []
        for source in state.sources:
            memory = (source.address, source.num_bytes)
            is_lazy = source.num_bytes >= LAZY_FROM_BYTES and source.is_on_cpu and memory in lazy_memory
            (lazy if is_lazy else eager).append(source)
        data, layout = slot.data, state.plan.layout
        found = _Routes(
            lazy_memory,
            _route(self.copier, data, layout, eager, state.storages),
            _route(self.copier, data, layout, lazy, state.storages),
            _blocks(data, layout, lazy),
        )
        if state.known is not None:
            if len(state.known.routes) >= _MAX_ROUTES:  # of files that were outgrown
                state.known.routes.clear()
            state.known.routes[slot.address] = found
        return found

    def _describe_later(self, state: _State, header: Header) -> Description:
        description = state.describe(header)
        if description.unnamed:
            raise Changed("A tensor moved to other memory while its state was saved.")
        self._learn(description, state.plan)
        return description

    def _learn(self, description: Description, plan: LayoutPlan) -> None:
        self._unnamed_bytes = max(self._unnamed_bytes, description.layout.data_length - plan.layout.data_length)
        self._meta_bytes = max(self._meta_bytes, description.meta_bytes)

    def _guess_meta(self, plan: LayoutPlan) -> int:
        return max(self._meta_bytes, room_for_names(len(plan.layout.tensors)))


class _LayoutSource(NamedTuple):
    """A storage of the state: its number in the layout, and where its bytes are. Asked of torch once, since each question takes its time."""

    identity: int
    number: int
    address: int
    num_bytes: int
    is_on_cpu: bool


def _source(number: int, storage: torch.UntypedStorage) -> _LayoutSource:
    is_on_cpu = storage.device.type == "cpu"
    return _LayoutSource(storage._cdata, number, storage.data_ptr(), storage.nbytes(), is_on_cpu)


class _Known:
    """All that is known of a state when it is saved again, without anything that keeps its memory. Only for memory of the host."""

    def __init__(self, looks: Looks, plan: LayoutPlan, sources: list[_LayoutSource]) -> None:
        self.looks, self.plan, self.sources = looks, plan, sources
        self.data_length = plan.layout.data_length
        self.routes: dict[int, _Routes] = {}
        """By address of the slot."""
        self.describer = Describer(plan)
        self._large = {facts[3]: index for index, facts in enumerate(looks.facts) if facts[4] >= LAZY_FROM_BYTES}

    def storages_of(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """What may be copied later and has to stay alive, by identity."""
        return {identity: tensors[index].untyped_storage() for identity, index in self._large.items()}


class _State(NamedTuple):
    parts: Mapping[str, object]
    plan: LayoutPlan
    storages: Mapping[int, torch.UntypedStorage]
    """By identity; alive until everything is copied."""
    sources: list[_LayoutSource]
    frozen: Frozen | None = None
    """No other code can change its containers, if it is."""
    known: _Known | None = None
    """What the next save of it may use again, or this one does."""

    @property
    def data_length(self) -> int:
        return self.plan.layout.data_length if self.known is None else self.known.data_length

    def describe(self, header: Header) -> Description:
        describer = Describer(self.plan) if self.known is None else self.known.describer
        return describer.describe(self.parts, self.frozen, header)


class PendingSave:
    """A save whose large blocks may still be on their way. It counts when `finish` has returned."""

    def __init__(
        self,
        slot: SlotInWriting,
        transfer: _Transfer,
        guard: Guard,
        state: _State,
        header: Header,
        describe: Callable[[], Description],
    ) -> None:
        self._slot, self._transfer, self._guard, self._header = slot, transfer, guard, header
        self.layout = state.plan.layout
        """Of the named tensors."""
        self.storages: Collection[int] = state.plan.numbers.keys()  # type: ignore[assignment]
        """Of the state, by identity."""
        self.digest = b""
        """Of some of its bytes; known when it is finished, unless it is lazy: it is not asked for then."""
        self._describe = describe
        self._description: Description | None = None
        self._describing = threading.Lock()
        """One thread pickles, a second one waits for it instead of doing the same."""
        self.is_lazy = transfer.num_bytes > 0

    def prepare(self) -> Description:
        """Do what is left to do beside the copy."""
        with self._describing:
            if self._description is None:
                self._description = self._describe()
            return self._description

    def begin(self) -> None:
        """What a thread does first: pickle, while another begins to copy. Half of the processors is for the training."""
        self._transfer.add_helpers(max(1, self._transfer.copier.num_threads // 2))
        self.prepare()

    def help(self) -> None:
        """Copy what is not copied yet. Any number of threads may do so at a time."""
        self._transfer.finish()

    def finish(self) -> SlotName:
        """Publish the slot. Raises Changed, and gives the slot up, if another process wrote to a block meanwhile."""
        try:
            self._transfer.finish()
            number = self._guard.check()
            if number is not None:
                raise Changed(f"{self._name_of(number)} changed while it was copied.")
            description = self.prepare()
            if not self.is_lazy:
                self.digest = sample_digest(self._slot.address, self.layout)
            return self._slot.complete(
                step=self._header.step,
                round_=self._header.round,
                data_length=description.layout.data_length,
                layout_hash=description.layout_hash,
                sections=description.sections,
            )
        except BaseException:
            self._slot.abandon()
            raise

    def _name_of(self, number: int) -> str:
        names = [tensor.name for tensor in self.layout.tensors if tensor.storage == number]
        return names[0] if names else f"Storage {number}"


def load_state(
    pinned: PinnedSlot,
    copier: Copier,
    *,
    names: Sequence[str] | None = None,
    into: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """
    The parts of a snapshot, on the CPU or in the storages of `into` (parts like those that were saved).

    The segment must be mapped privately (`Segment(path, private=True)`).
    """
    contents = decode_contents(pinned.sections())
    wanted = [entry for entry in contents.files if names is None or entry.name in names]
    numbers = sorted({number for entry in wanted for number in entry.storages})
    with torch.no_grad():
        storages = live_storages(contents.layout, into)
        for number in numbers:
            if number not in storages:
                storages[number] = fresh_storage(contents.layout.storages[number].num_bytes)
        data = pinned.data
        targets = [_source(number, storages[number]) for number in numbers]
        alive = {storage._cdata: storage for storage in storages.values()}
        with _Transfer(copier, _route(copier, data, contents.layout, targets, alive, out_of_slot=True), (alive, data)):
            parts = {
                entry.name: restore_part(entry.kind, contents.pickles[entry.name], _chooser(entry, storages))
                for entry in wanted
            }
    return parts


def _chooser(
    entry: FileEntry, storages: Mapping[int, torch.UntypedStorage]
) -> Callable[[int, int, str], torch.UntypedStorage]:
    return lambda number, num_bytes, location: storages[entry.storages[number]]


def _blocks(data: memoryview, layout: Layout, sources: Sequence[_LayoutSource]) -> list[MovingStorage]:
    start = address_of(data) if data.nbytes else 0
    places = layout.storages
    return [
        MovingStorage(source.address, start + places[source.number].offset, source.num_bytes, source.number)
        for source in sources
    ]


class _Route(NamedTuple):
    """Storages and their places in a slot, ready to be copied."""

    blocks: Blocks
    devices: list[DevicePair]
    num_bytes: int
    out_of_slot: bool


class _Routes(NamedTuple):
    """Of a state into a slot."""

    lazy_memory: Collection[Memory]
    eager: _Route
    lazy: _Route
    guarded: list[MovingStorage]
    """The same as the lazy ones."""


def _route(
    copier: Copier,
    data: memoryview,
    layout: Layout,
    sources: Sequence[_LayoutSource],
    storages: Mapping[int, torch.UntypedStorage],
    *,
    out_of_slot: bool = False,
) -> _Route:
    start = address_of(data) if data.nbytes else 0
    places = layout.storages
    spans = []
    devices = []
    total = 0
    for identity, number, address, num_bytes, is_on_cpu in sources:
        total += num_bytes
        if not num_bytes:
            continue
        offset = places[number].offset
        if not is_on_cpu:
            devices.append(DevicePair(data[offset : offset + num_bytes], storages[identity]))
        elif out_of_slot:
            spans.append(CopySpan(address, start + offset, num_bytes))
        else:
            spans.append(CopySpan(start + offset, address, num_bytes))
    return _Route(copier.blocks(spans), devices, total, out_of_slot)


class _Transfer(contextlib.AbstractContextManager["_Transfer"]):
    """Storages on their way into the slot or out of it, while the body of the `with` runs."""

    def __init__(self, copier: Copier, route: _Route, alive: object, *, num_helpers: int | None = None) -> None:
        """`alive` keeps the memory until the copy has ended."""
        self.copier, self._alive = copier, alive
        self.num_bytes = route.num_bytes
        self._copy: CopyInProgress | None = None
        if num_helpers is None and route.num_bytes < PIECE_BYTES:  # to wake another thread would take longer
            copier.copy_now(route.blocks)
        else:
            self._copy = copier.start(route.blocks, num_helpers)
        self._device_copies = DeviceCopies(route.devices, out_of_slot=route.out_of_slot) if route.devices else None

    def add_helpers(self, num_helpers: int) -> None:
        if self._copy is not None:
            self._copy.add_helpers(num_helpers)

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Help with what is left and wait for the rest; may be called by several threads, and again."""
        if self._copy is not None:
            self._copy.finish()
        if self._device_copies is not None:
            self._device_copies.finish()
