"""
Everything about a state but the bytes of its tensors: the layout, the files that it becomes and their pickles, as the sections of a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch

from dlrover.snapshot.memory.contents import Contents, FileEntry, encode_contents
from dlrover.snapshot.memory.layout import Layout, LayoutPlan
from dlrover.snapshot.memory.segment import SlotInWriting
from dlrover.trainer.torch.flash_checkpoint.encoding.frozen import Frozen
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import skeleton_of
from dlrover.trainer.torch.flash_checkpoint.encoding.pickle_template import Template, make_template
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton

_MAX_PICKLED = 5


class Header(NamedTuple):
    """What the caller says of a save."""

    step: int
    round: int
    paths: Mapping[str, str]
    extra: Mapping[str, bytes]


class Description(NamedTuple):
    layout: Layout
    sections: dict[str, bytes]
    layout_hash: bytes
    unnamed: list[tuple[int, torch.UntypedStorage]]
    """Storages that only the pickles refer to."""

    @property
    def meta_bytes(self) -> int:
        return sum(map(len, self.sections.values())) + 64 * len(self.sections) + 1024

    def fits(self, slot: SlotInWriting) -> bool:
        return self.layout.data_length <= slot.capacity_bytes and self.meta_bytes <= slot.meta_capacity_bytes


class Describer:
    """Describes states of one plan. The second that is held still gets a template, and later ones are described with it."""

    def __init__(self, plan: LayoutPlan) -> None:
        self._plan = plan
        self._template: Template | None = None
        self._files: tuple[FileEntry, ...] = ()
        """Those of the template, where they are."""
        self._num_pickled = 0
        """States that had to be pickled since a template last did."""

    def describe(self, parts: Mapping[str, object], frozen: Frozen | None, header: Header) -> Description:
        """`frozen`: the same parts held still, if they are."""
        pickles = None if self._template is None or frozen is None else self._template.fill(frozen)
        if pickles is not None:
            self._num_pickled = 0
            files = [msgspec.structs.replace(file, path=header.paths.get(file.name, "")) for file in self._files]
            return _encoded(Contents(self._plan.layout, tuple(files), pickles, dict(header.extra)), [])
        skeletons = {name: skeleton_of(part) for name, part in parts.items()}
        layout, named, unnamed = _with_unnamed(self._plan, skeletons, header.paths)
        self._num_pickled += 1
        # Most states are saved again or never, and one that changes in other ways each time is not worth a template.
        if frozen is not None and not unnamed and 2 <= self._num_pickled <= _MAX_PICKLED:
            self._template, self._files = make_template(frozen, skeletons), named
        pickles = {name: part.content for name, part in skeletons.items()}
        return _encoded(Contents(layout, named, pickles, dict(header.extra)), unnamed)


def _encoded(contents: Contents, unnamed: list[tuple[int, torch.UntypedStorage]]) -> Description:
    sections, layout_hash = encode_contents(contents)
    return Description(contents.layout, sections, layout_hash, unnamed)


def _with_unnamed(
    plan: LayoutPlan, skeletons: Mapping[str, Skeleton], paths: Mapping[str, str]
) -> tuple[Layout, tuple[FileEntry, ...], list[tuple[int, torch.UntypedStorage]]]:
    """Add the storages that only the pickles refer to."""
    numbers = dict(plan.numbers)
    unnamed: list[tuple[int, torch.UntypedStorage]] = []
    files = []
    for name, skeleton in skeletons.items():
        own = []
        for storage in skeleton.storages:
            number = numbers.setdefault(storage._cdata, len(numbers))
            if number == len(plan.numbers) + len(unnamed):
                unnamed.append((number, storage))
            own.append(number)
        files.append(FileEntry(name, tuple(own), paths.get(name, ""), skeleton.kind))
    layout = plan.layout.extended(storage.nbytes() for _, storage in unnamed)
    return layout, tuple(files), unnamed
