"""
`FileReader`: the lines of a text file, found by an index of their offsets.

The index is built when the first record is wanted, in the processes that read; a server that imports the same conf class never opens the file.
"""

from __future__ import annotations

import array
from collections.abc import Iterator

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader

_CHUNK_BYTES = 1 << 20
_SCHEME = "file://"


class FileReader(ElasticReader):
    def __init__(self, path: str, skip_header: bool = True) -> None:
        super().__init__(path)
        self._skip_header = skip_header
        self._offsets: array.array[int] | None = None
        """Where each record begins, and behind the last one the end of the file."""

    def count_data(self) -> None:
        self._data_nums = len(self._index()) - 1

    def read_data_by_index_range(self, start_index: int, end_index: int) -> Iterator[str]:
        """Lines without their ends and the blanks around them."""
        offsets = self._index()
        with open(self._place, "rb") as file:
            file.seek(offsets[start_index])
            data = file.read(offsets[end_index] - offsets[start_index])  # at once: records of a shard lie side by side
        for line in data.splitlines():
            yield line.decode("utf-8").strip()

    @property
    def _place(self) -> str:
        assert self._path is not None, "given to the constructor"
        return self._path.removeprefix(_SCHEME)

    def _index(self) -> array.array[int]:
        if self._offsets is None:
            try:
                self._offsets = _index_lines(self._place, skip_header=self._skip_header)
            except OSError as error:
                raise ConfigError(
                    f"The data file {self._place} cannot be read: {error.strerror}. Check the path."
                ) from error
        return self._offsets


def _index_lines(path: str, *, skip_header: bool) -> array.array[int]:
    offsets = array.array("q", [0])
    place = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found = chunk.find(b"\n")
            while found >= 0:
                offsets.append(place + found + 1)
                found = chunk.find(b"\n", found + 1)
            place += len(chunk)
    if offsets[-1] != place:
        offsets.append(place)  # a last line without an end
    return offsets[1:] if skip_header and len(offsets) > 1 else offsets
