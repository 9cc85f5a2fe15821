"""
What the metadata of a slot says: which files its bytes become, and where each file's pickle is.

A state may become several files (a model file and an optimizer file). Each has its own pickle with its own numbering of storages, because that is how
the file will be read; storages that several files refer to lie in the slot once.

Files are of several kinds. What the trainer prepares for one stands in the place of the pickle, whatever it is: bytes of a JSON
file, or the table of a DCP file.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.snapshot.memory.layout import Layout, decode_layout, encode_layout, layout_hash
from dlrover.snapshot.memory.segment_format import SegmentInvalid

_LAYOUT = "layout"
_FILES = "files"
_PICKLE = "pickle:"
_EXTRA = "extra:"

TORCH = "torch"
"""A file that `torch.load` reads."""
RAW = "raw"
"""The bytes as they are."""
DISTCP = "distcp"
"""A file of torch's distributed checkpoint: many small archives one after the other."""
SAFETENSORS = "safetensors"
"""A file that the safetensors package reads."""


class FileEntry(Struct, frozen=True):
    """One file that the state becomes."""

    name: str
    """The caller's name of this part, such as `model_states`."""
    storages: tuple[int, ...] = ()
    """Number in the layout of the file's storage 0, 1, ..."""
    path: str = ""
    """Where it goes, relative to the checkpoint; empty when the state is only kept in memory."""
    kind: str = TORCH
    """How its bytes are put together: `dlrover.snapshot.storage.file_kinds` knows them."""


class Contents(Struct, frozen=True):
    layout: Layout
    files: tuple[FileEntry, ...]
    pickles: dict[str, bytes]
    """
    By the file's name: what the trainer prepared. For a torch file the object with numbers in place of its storages, which is
    never unpickled outside a trainer.
    """
    extra: dict[str, bytes] = {}
    """Whatever the trainer wants to keep with it: topology, data state."""

    def file(self, name: str) -> FileEntry:
        for entry in self.files:
            if entry.name == name:
                return entry
        raise SegmentInvalid(f"The snapshot has no part named {name!r}; it has {[entry.name for entry in self.files]}.")


_DECODER = msgspec.msgpack.Decoder(tuple[FileEntry, ...])


def encode_contents(contents: Contents) -> tuple[dict[str, bytes], bytes]:
    """The sections, and the hash of the layout for the slot's record."""
    layout = encode_layout(contents.layout)
    sections = {_LAYOUT: layout, _FILES: msgspec.msgpack.encode(contents.files)}
    sections.update({_PICKLE + name: content for name, content in contents.pickles.items()})
    sections.update({_EXTRA + name: content for name, content in contents.extra.items()})
    return sections, layout_hash(layout)


def decode_extra(sections: dict[str, bytes]) -> dict[str, bytes]:
    """What the trainer keeps with a state, without a look at the state."""
    return {name.removeprefix(_EXTRA): part for name, part in sections.items() if name.startswith(_EXTRA)}


def decode_contents(sections: dict[str, bytes]) -> Contents:
    try:
        files = _DECODER.decode(sections[_FILES])
        return Contents(
            layout=decode_layout(sections[_LAYOUT]),
            files=files,
            pickles={entry.name: sections[_PICKLE + entry.name] for entry in files},
            extra=decode_extra(sections),
        )
    except (KeyError, msgspec.MsgspecError) as error:
        raise SegmentInvalid(f"The snapshot is damaged: its metadata cannot be read: {error}") from error
