"""
What reading through a source costs, beside what a script would do by hand.

    python benchmarks/data_sources.py [--records N]

CPU seconds, the best of three, so that a busy machine matters little; ratios against csv.DictReader over the whole file in the same run.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

from dlrover.trainer.data_sources import CsvSource, LineSource, ParquetSource, Source

SHARD, BATCH, NUM_BATCHES = 640, 64, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=400_000, help="(default %(default)s)")
    num_records = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        table, columnar = Path(folder) / "table.csv", Path(folder) / "table.parquet"
        with table.open("w") as file:
            file.write("a,b,c,d,label\n")
            file.writelines(f"{n},{n / 7:.4f},{n % 13},{n * 3.1:.3f},{n % 2}\n" for n in range(num_records))
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(table), columnar, row_group_size=20_000)
        report(table, columnar, num_records)


def report(table: Path, columnar: Path, num_records: int) -> None:
    size_mb = table.stat().st_size / 1e6
    by_hand = best(lambda: read_by_hand(table))
    print(
        f"csv.DictReader, values to float, the whole file: {by_hand:.3f} s for {num_records} records, {size_mb:.1f} MB"
    )
    tell("counting the records of the CSV file", best(lambda: len(CsvSource(table))), by_hand)
    tell("counting the lines of the file", best(lambda: len(LineSource(table))), by_hand)
    source, group_source = CsvSource(table), ParquetSource(columnar)
    tell(f"CSV in shards of {SHARD}", best(lambda: read_shards(source, num_records)), by_hand)
    tell(f"Parquet in shards of {SHARD}", best(lambda: read_shards(group_source, num_records)), by_hand)
    chance = random.Random(1)
    batches = [[chance.randrange(num_records) for _ in range(BATCH)] for _ in range(NUM_BATCHES)]
    seconds = best(lambda: [source.read(places) for places in batches])
    print(
        f"CSV, records at random: {seconds / (BATCH * NUM_BATCHES) * 1e6:.1f} µs each ({by_hand / num_records * 1e6:.1f} by hand)"
    )


def read_by_hand(table: Path) -> int:
    with table.open(newline="") as file:
        return sum(1 for row in csv.DictReader(file) if {name: float(value) for name, value in row.items()})


def read_shards(source: Source, num_records: int) -> int:
    return sum(len(source.read(range(at, min(at + SHARD, num_records)))) for at in range(0, num_records, SHARD))


def best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        began_at = time.process_time()
        work()
        seconds.append(time.process_time() - began_at)
    return min(seconds)


def tell(what: str, seconds: float, by_hand: float) -> None:
    print(f"{what}: {seconds:.3f} s, {seconds / by_hand:.2f} x")


if __name__ == "__main__":
    main()
