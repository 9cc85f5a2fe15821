"""Whether two runs are the same run: each step's loss bit for bit, each step's keys, each key once, and whether it learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

Record = list[dict[str, object]]


def differences(undisturbed: Record, disturbed: Record) -> list[str]:
    """Sentences; none: the records are equal line by line."""
    found = []
    if len(undisturbed) != len(disturbed):
        found.append(f"{len(undisturbed)} steps and {len(disturbed)} steps")
    for one, other in zip(undisturbed, disturbed, strict=False):
        found += [
            f"step {one['step']}: {name} {one[name]} and {other[name]}" for name in one if one[name] != other.get(name)
        ]
    return found


def repeated_keys(record: Record) -> list[int]:
    """Keys that are in more than one batch, or in none."""
    keys = [key for line in record for key in line["keys"]]  # type: ignore[attr-defined]
    return sorted({key for key in keys if keys.count(key) > 1} | (set(range(len(keys))) - set(keys)))


def rewards(record: Record) -> tuple[float, float]:
    """Means of the first and of the last ten steps."""
    values = [float(str(line["reward"])) for line in record]
    return sum(values[:10]) / 10, sum(values[-10:]) / 10


def main() -> int:
    one, other = (json.loads(Path(folder, "record.json").read_text()) for folder in sys.argv[1:3])
    problems = [*differences(one, other), *(f"key {key} is not in exactly one batch" for key in repeated_keys(other))]
    print("\n".join(problems) or f"equal: {len(one)} steps, each key once")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
