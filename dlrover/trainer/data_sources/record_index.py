"""
Where the records of a text file begin: every n-th of them, so that the index stays small however long the file is.

The index is built while a caller reads or counts, block by block, never the whole file at once. When it would get too large every second entry
is dropped and n doubles: a file of a billion lines costs a megabyte of memory per 130,000 entries, and a reading begins at most n records too early.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Iterator

BLOCK_BYTES = 1 << 20
MOST_ENTRIES = 1 << 20
FIRST_STRIDE = 16


class QuotedLines:
    """
    Which line ends end a record, if a field may be quoted.

    As csv.reader has it: a quote means something only where a field begins, and then a doubled one is text. Elsewhere it is text, too (`5" pipe`):
    to count it there would make one record of all that follow, up to the next stray quote.
    """

    def __init__(self, quote: bytes, delimiter: bytes) -> None:
        self._quote = quote
        q, d = re.escape(quote), re.escape(delimiter)
        text = rb"[^%s\n]*+" % d if len(delimiter) == 1 else rb"(?:(?!%s)[^\n])*+" % d
        inside = rb"[^%s]*+(?:%s%s[^%s]*+)*+" % (q, q, q, q)
        # Behind a closing quote comes no text; the parser will say so, and here the field goes on.
        more = rb"(?:%s(?:%s%s%s%s|(?!%s)%s))*\n" % (d, q, inside, q, text, q, text)
        self._record = re.compile(rb"(?:%s%s%s%s|(?!%s)%s)%s" % (q, inside, q, text, q, text, more))
        self._rest = re.compile(rb"%s%s%s%s" % (inside, q, text, more))
        """Of a record whose quoted field began in an earlier block."""
        self.is_open = False
        """The last block ended within quotes."""

    def has_quotes(self, block: bytes) -> bool:
        return self.is_open or self._quote in block

    def ends(self, block: bytes) -> Iterator[int]:
        """Behind each record that ends there. A block begins and ends at a line, but for the end of the file."""
        at, pattern = 0, self._rest if self.is_open else self._record
        while found := pattern.match(block, at):
            at, pattern = found.end(), self._record
            yield at
        self.is_open = at < len(block)


class RecordIndex:
    """
    Of a file of which bytes can be read. `quote`: a newline in a field between two of them does not end a record; `delimiter`: of the fields.
    `skips_blank`: empty lines are none.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        *,
        begin: int = 0,
        quote: bytes = b"",
        delimiter: bytes = b",",
        skips_blank: bool = False,
        most_entries: int = MOST_ENTRIES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._read = read
        self._block_bytes = block_bytes
        self._quoted = QuotedLines(quote, delimiter) if quote else None
        self._skips_blank = skips_blank
        self._most = most_entries
        self.stride = FIRST_STRIDE
        self._starts = array("Q", [begin])
        """Of records 0, n, 2n..."""
        self.num_records = 0
        """That have ended, as far as was looked."""
        self.looked_to = begin
        self._record_at = begin
        """Where the record begins that has not ended."""
        self._last_byte = b""

    @property
    def open_at(self) -> int:
        """Where the record begins that has not ended yet."""
        return self._record_at

    def look(self, size: int, until_record: int | None = None) -> None:
        """Go on to the end of the file, which has this size, or until so many records have ended."""
        while self.looked_to < size and (until_record is None or self.num_records < until_record):
            block = self._next_block(size)
            if not block:
                return
            self._look_at(block)

    def span(self, first: int, last: int) -> tuple[int, int, int]:
        """Bytes from, bytes to, and how many records there come before `first`; all records before `last` have ended there."""
        entry = first // self.stride
        after = -(-last // self.stride)
        end = self._starts[after] if after < len(self._starts) else self._record_at
        return self._starts[entry], end, first - entry * self.stride

    def num_spanned(self, first: int, last: int) -> int:
        """How many records have ended in that span."""
        entry = first // self.stride
        after = -(-last // self.stride)
        return (after * self.stride if after < len(self._starts) else self.num_records) - entry * self.stride

    def _next_block(self, size: int) -> bytes:
        """Where there are quotes: whole lines, so that only whether the end is quoted has to be remembered."""
        length = self._block_bytes
        while True:
            end = min(self.looked_to + length, size)
            block = self._read(self.looked_to, end)
            if self._quoted is None or end == size or not block:
                return block
            if lines := block.rfind(b"\n") + 1:
                return block[:lines]
            length *= 2

    def _look_at(self, block: bytes) -> None:
        at = self.looked_to
        quoted = self._quoted if self._quoted is not None and self._quoted.has_quotes(block) else None
        if quoted is None and not (self._skips_blank and _may_have_blank_lines(block)):
            self._look_at_plain(block, at)
        else:
            for end in _line_ends(block) if quoted is None else quoted.ends(block):
                self._end_record(at + end, block, end)
        self.looked_to = at + len(block)
        self._last_byte = block[-1:]

    def _look_at_plain(self, block: bytes, at: int) -> None:
        """Every newline ends a record: go from entry to entry, ten times faster than from record to record."""
        pos = 0
        while found := _lines(len(self._starts) * self.stride - self.num_records).match(block, pos):
            self.num_records = len(self._starts) * self.stride
            pos = found.end()
            self._add_entry(at + pos)
        self.num_records += block.count(b"\n", pos)
        if end := block.rfind(b"\n") + 1:
            self._record_at = at + end

    def _end_record(self, at: int, block: bytes, end: int) -> None:
        length = at - self._record_at
        before = block[end - 2 : end - 1] if end >= 2 else self._last_byte
        is_blank = length == 1 or (length == 2 and before == b"\r")
        self._record_at = at
        if is_blank and self._skips_blank:
            if self.num_records == (len(self._starts) - 1) * self.stride:
                self._starts[-1] = at  # the record of this entry begins after it
            return
        self.num_records += 1
        if self.num_records % self.stride == 0:
            self._add_entry(at)

    def _add_entry(self, at: int) -> None:
        self._starts.append(at)
        if len(self._starts) > self._most:
            self._starts = self._starts[::2]
            self.stride *= 2


@functools.lru_cache(maxsize=64)
def _lines(count: int) -> re.Pattern[bytes]:
    """So many lines with their ends. Possessive: lines that are not all there fail at once."""
    return re.compile(rb"(?:[^\n]*+\n){%d}" % count)


def _may_have_blank_lines(block: bytes) -> bool:
    return block.startswith((b"\n", b"\r\n")) or b"\n\n" in block or b"\n\r\n" in block


def _line_ends(block: bytes) -> Iterator[int]:
    at = 0
    while at := block.find(b"\n", at) + 1:
        yield at
