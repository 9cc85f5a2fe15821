"""Sources of records: what is read is what is there, in any cut, and bad or changed data are named."""

from __future__ import annotations

import csv
import io
import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.data_sources import (
    CsvSource,
    HuggingFaceSource,
    LineSource,
    ParquetSource,
    Source,
    SourceChanged,
    SourceError,
)
from dlrover.trainer.data_sources.record_index import RecordIndex


def check_every_cut(source: Source, records: list[Any]) -> None:
    """Ranges, single records and any order give the same records."""
    assert len(source) == len(records)
    chance = random.Random(1)
    for _ in range(20):
        start = chance.randrange(len(records))
        end = chance.randint(start, min(len(records), start + 50))
        assert source.read(range(start, end)) == records[start:end]
        places = [chance.randrange(len(records)) for _ in range(7)]
        assert source.read(places) == [records[place] for place in places]
    with pytest.raises(SourceError, match="no record"):
        source.read(range(len(records) - 1, len(records) + 1))


# Lines.


def test_lines_of_several_files_are_read_in_any_cut(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * (number % 90) for number in range(700)]
    for number, part in enumerate([lines[:300], lines[300:301], lines[301:]]):
        end = "" if number == 1 else "\n"  # the last line of a file may have none
        (tmp_path / f"part-{number}.txt").write_text("\n".join(part) + end)
    check_every_cut(LineSource(tmp_path / "part-*.txt"), lines)
    copy = pickle.loads(pickle.dumps(LineSource(sorted(tmp_path.iterdir()))))
    assert copy.read(range(299, 303)) == lines[299:303], "as a spawned worker process gets it"


def test_lines_are_counted_only_as_far_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.write_bytes(b"0123456789abcde\n" * 200_000)
    source = LineSource(path)
    assert source.read(range(3)) == ["0123456789abcde"] * 3
    [part] = source._row.parts
    assert part.index.looked_to < path.stat().st_size  # type: ignore[attr-defined]
    assert len(source) == 200_000


def test_blank_lines_and_other_line_ends_are_lines(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\r\n\n\r\nb")
    assert LineSource(tmp_path / "f").read(range(4)) == ["a", "", "", "b"]


@given(
    st.lists(st.text(st.sampled_from('a\n\r",é'), max_size=6), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(2, 9),
)
def test_an_index_of_any_size_finds_every_record(values: list[str], block: int, most_entries: int) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([[value] for value in values])
    data = text.getvalue().encode()
    index = RecordIndex(
        lambda start, end: data[start:end], quote=b'"', skips_blank=True, most_entries=most_entries, block_bytes=block
    )
    index.look(len(data))
    assert index.num_records == len(values)
    assert len(index._starts) <= most_entries
    for place, value in enumerate(values):
        start, end, skip = index.span(place, place + 1)
        rows = list(csv.reader(io.StringIO(data[start:end].decode(), newline=""), strict=True))
        assert rows[skip] == [value]


FIELDS = [
    "",
    "1",
    '5" pipe',
    'a"',
    'a""b"',
    '"quoted"',
    '"a ""word"""',
    '"two\nlines"',
    '"\n\n"',
    '""',
    '"a,b;c§d"',
    "é",
]


@given(
    st.lists(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4), min_size=1, max_size=60),
    st.sampled_from([",", ";", "§", "|", "^"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_an_index_and_the_parser_agree_what_a_quote_means(
    rows: list[list[str]], delimiter: str, line_end: str, has_last_end: bool, block: int
) -> None:
    data = (line_end.join(delimiter.join(row) for row in rows) + line_end * has_last_end).encode()
    parsed = [
        row for row in csv.reader(io.StringIO(data.decode(), newline="\n"), delimiter=delimiter, strict=True) if row
    ]
    index = RecordIndex(
        lambda start, end: data[start:end],
        quote=b'"',
        delimiter=delimiter.encode(),
        skips_blank=True,
        block_bytes=block,
    )
    index.look(len(data))
    assert index.num_records + (index.open_at < len(data)) == len(parsed)
    for place in range(index.num_records):
        start, end, skip = index.span(place, place + 1)
        found = csv.reader(io.StringIO(data[start:end].decode(), newline="\n"), delimiter=delimiter, strict=True)
        rows_there = [row for row in found if row]
        assert rows_there[skip] == parsed[place]
        assert len(rows_there) == index.num_spanned(place, place + 1)


@given(
    st.lists(st.sampled_from(["", "\r", "a", "bc", "d" * 9]), min_size=1, max_size=80),
    st.integers(1, 40),
    st.integers(2, 9),
    st.booleans(),
)
def test_an_index_of_plain_lines_finds_every_one(
    lines: list[str], block: int, most_entries: int, skips_blank: bool
) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    index = RecordIndex(
        lambda start, end: data[start:end], skips_blank=skips_blank, most_entries=most_entries, block_bytes=block
    )
    index.look(len(data))
    wanted = [line for line in lines if line.strip() or not skips_blank]
    assert index.num_records == len(wanted)
    for place, line in enumerate(wanted):
        start, end, skip = index.span(place, place + 1)
        found = [each for each in data[start:end].decode().split("\n") if each.strip() or not skips_blank]
        assert found[skip] == line


# CSV.


def write_csv(path: Path, rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_rows_with_quoted_newlines_are_read_with_their_types(tmp_path: Path) -> None:
    rows = [[n, n / 4, f'say "{n}",\nthen go' if n % 3 else "plain", "" if n == 5 else n] for n in range(500)]
    path = write_csv(tmp_path / "t.csv", [["id", "share", "text", "some"], *rows])
    names = ["id", "share", "text"]
    source = CsvSource(path, columns=names)
    check_every_cut(source, [dict(zip(names, row[:3], strict=True)) for row in rows])
    assert (source.types["id"], source.types["text"]) == (int, str)
    some = CsvSource(path, columns=["some"])
    assert math.isnan(some.read([5])[0]["some"])
    assert some.read([6]) == [{"some": 6.0}]


@pytest.mark.parametrize("strays", [[10], [10, 20]])
def test_a_quote_within_a_value_hides_no_rows(tmp_path: Path, strays: list[int]) -> None:
    values = ['5" pipe' if n in strays else "plain" for n in range(1000)]
    path = tmp_path / "t.csv"
    path.write_text("id,text\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))
    check_every_cut(CsvSource(path), [{"id": n, "text": value} for n, value in enumerate(values)])


def test_rows_that_are_counted_and_parsed_in_two_ways_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,b\n" + b"1,2\n" * 20 + b"\r\r\n" + b"3,4\n")
    source = CsvSource(tmp_path / "t.csv")
    assert source.read([3]) == [{"a": 1, "b": 2}]
    with pytest.raises(SourceError, match=r"t.csv has 5 rows where 6 were counted, from record 16 on"):
        source.read([17])


def test_a_mark_of_the_encoding_does_not_hide_a_quote(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"a\nb",c\n1,2\n', encoding="utf-8-sig")
    assert CsvSource(tmp_path / "t.csv", encoding="utf-8-sig").read(range(1)) == [{"a\nb": 1, "c": 2}]
    (tmp_path / "u.csv").write_text('"a\nb",c\n1,2\n', encoding="utf-8-sig")
    rows = CsvSource(tmp_path / "u.csv", encoding="utf-8-sig", header=["x", "y"])
    assert [row["x"] for row in rows.read(range(2))] == ["a\nb", "1"]


def test_a_delimiter_that_the_encoding_does_not_have_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [["a"], [1]])
    with pytest.raises(ConfigError, match="'§' does not exist in the encoding ascii"):
        CsvSource(tmp_path / "t.csv", delimiter="§", encoding="ascii")


def test_headers_delimiters_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n1;x\n\n\n2;y\n\n3;z")
    source = CsvSource(tmp_path / "a.csv", header=["n", "s"], delimiter=";", types={"n": str})
    assert len(source) == 3
    assert source.read(range(3)) == [{"n": "1", "s": "x"}, {"n": "2", "s": "y"}, {"n": "3", "s": "z"}]
    assert CsvSource(tmp_path / "a.csv", header=["n", "s"], delimiter=";").read([2]) == [{"n": 3, "s": "z"}]


def test_a_value_that_does_not_fit_names_its_record(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", [["n"], *[[n] for n in range(1500)], ["many"]])
    source = CsvSource(path)
    assert source.read([1499]) == [{"n": 1499}]
    with pytest.raises(
        SourceError, match=r"Record 1500 .* has 'many' in column 'n', which is not of the type int.*types=\{'n': str\}"
    ):
        source.read([1500])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"a,b\n", "a header and no records"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "not CSV"),
        (b"\xff\xfe\xfd,1\n2,3\n", "not CSV in utf-8"),
        (b'a,b\n1,"2\n3,4\n', "not CSV"),
        (b"a,a\n1,2\n", "with the same"),
        (b"a,b\r1,2\r\n3,4\n", "not CSV"),
        (b"a,b\n1,2,3\n", "3 columns, but 2"),
    ],
)
def test_what_is_not_csv_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        CsvSource(tmp_path / "t.csv")


def test_a_row_of_another_width_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(SourceError, match=r"Record 1 .* has 1 columns instead of 2"):
        CsvSource(tmp_path / "t.csv").read(range(2))


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", [["a"], [1]])
    with pytest.raises(ConfigError, match=r"no column 'b'. Its columns are a"):
        CsvSource(path, columns=["b"])


# Parquet and Hugging Face.


def write_parquet(path: Path, size: int, row_group_size: int) -> list[dict[str, Any]]:
    records = [{"id": n, "text": f"t{n}"} for n in range(size)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=row_group_size)
    return records


def test_parquet_is_read_by_row_group_in_any_cut(tmp_path: Path) -> None:
    records = write_parquet(tmp_path / "a.parquet", 230, 50)
    more = write_parquet(tmp_path / "b.parquet", 20, 50)
    source = ParquetSource(tmp_path / "*.parquet")
    check_every_cut(source, records + more)
    assert source.row_group_size == 50
    assert all(len(part._kept) <= 2 for part in source._parts)
    assert pickle.loads(pickle.dumps(source)).read([229, 0]) == [records[229], records[0]]
    assert ParquetSource(tmp_path / "a.parquet", columns=["id"]).read([7]) == [{"id": 7}]
    with pytest.raises(ConfigError, match="no column 'x'"):
        ParquetSource(tmp_path / "a.parquet", columns=["x"])


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, 1000, 100)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(SourceError, match="not a Parquet file, or it is damaged"):
        ParquetSource(path)
    path.write_bytes(whole[:4] + b"\xee" * 3000 + whole[3004:])
    source = ParquetSource(path)
    with pytest.raises(SourceError, match=r"Row group 0 .* is damaged"):
        source.read(range(10))
    path.write_bytes(b"id,text\n1,2\n")
    with pytest.raises(SourceError, match="not a Parquet file"):
        ParquetSource(path)
    write_parquet(path, 0, 10)
    with pytest.raises(SourceError, match="no records"):
        ParquetSource(path)


def test_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    records = [{"id": n, "text": f"t{n}"} for n in range(120)]
    dataset = datasets.Dataset.from_list(records)
    source = HuggingFaceSource(dataset, name="mine")
    assert (len(source), source.name) == (120, "mine")
    assert source.read(range(5, 9)) == records[5:9]
    assert source.read([7, 3]) == [records[7], records[3]]
    assert source.fingerprint != HuggingFaceSource(dataset.select(range(7))).fingerprint
    with pytest.raises(ConfigError, match="not a map-style"):
        HuggingFaceSource(dataset.to_iterable_dataset())
    with pytest.raises(ConfigError, match="splits"):
        HuggingFaceSource(datasets.DatasetDict(train=dataset))
    with pytest.raises(SourceError, match="no records"):
        HuggingFaceSource(dataset.select([]))


# Files that are missing, or change.


@pytest.mark.parametrize("kind", [LineSource, CsvSource, ParquetSource])
def test_missing_and_empty_files_are_named(tmp_path: Path, kind: type[Any]) -> None:
    with pytest.raises(SourceError, match="No such file"):
        kind(tmp_path / "nothing")
    with pytest.raises(SourceError, match="There is no file"):
        kind(tmp_path / "*.nothing")
    with pytest.raises(SourceError, match="not a file"):
        kind(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(SourceError, match=r"is empty|not a Parquet file"):
        kind(tmp_path / "empty")


@pytest.mark.parametrize("change", ["shrinks", "is written to", "is replaced for a new process"])
@pytest.mark.parametrize("kind", ["lines", "csv", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, kind: str, change: str) -> None:
    path = tmp_path / "f"
    if kind == "parquet":
        write_parquet(path, 3000, 500)
    else:
        write_csv(path, [["n"], *[[n] for n in range(3000)]])
    make: Any = {"lines": LineSource, "csv": CsvSource, "parquet": ParquetSource}[kind]
    source = make(path)
    assert len(source.read(range(10))) == 10
    if change == "shrinks":
        os.truncate(path, 100)
    elif change == "is written to":
        with path.open("r+b") as file:
            file.write(b"9")
        os.utime(path, ns=(1, 1))
    else:
        source = pickle.loads(pickle.dumps(source))
        (tmp_path / "new").write_bytes(path.read_bytes() * 2)
        (tmp_path / "new").rename(path)
    with pytest.raises(SourceChanged, match="another name"):
        source.read(range(2000, 2010))


@pytest.mark.parametrize("at", [0, 50_000, 99_998])
def test_fingerprints_tell_data_apart(tmp_path: Path, at: int) -> None:
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f").write_bytes(b"a\n" * 50_000)
    with (tmp_path / "three" / "f").open("r+b") as file:
        file.seek(at)
        file.write(b"b")
    one, two, three = (LineSource(tmp_path / folder / "f").fingerprint for folder in ("one", "two", "three"))
    assert one == two, "the same data on another node"
    assert one != three
