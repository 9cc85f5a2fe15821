"""
Large workers: how long a job stands still when one of its two workers is killed, with 0, 1 and 4 GiB resident in each.

    python benchmarks/large_workers.py                                        this environment, about 10 minutes
    python benchmarks/large_workers.py --other OTHER/.venv/bin/dlrover-run    beside another one, in turn
    python benchmarks/large_workers.py --other-source OTHER                   beside another source tree, in this environment
    python benchmarks/large_workers.py --gib 0,4 --kills 10 --json large.json

The kernel frees the memory of a killed worker before it closes its sockets or tells its parent. This measures what of that the job waits for. The
job is that of failover.py; each life becomes large after its first steps, so that touching the memory is no part of any figure.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from failover import Result, RunFailedError, measure_run, median_phase, say
from figures import seconds, table
from peers import Launcher, of_source, ours
from rounds import measuring
from timeline import PHASES

OURS, OTHER = "ours", "other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", default="0,1,4", help="resident in each worker (default %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="for each size and launcher (default %(default)s)")
    parser.add_argument(
        "--kills-per-run", type=int, default=5, help="then the job is started anew (default %(default)s)"
    )
    parser.add_argument("--other", type=Path, help="dlrover-run of another environment, measured in turn with this one")
    parser.add_argument(
        "--other-source", type=Path, help="directory of another version's source, run by this environment's Python"
    )
    parser.add_argument(
        "--hang-timeout", type=float, default=60.0, help="seconds without a new step (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the moments of the kills")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    args = parser.parse_args()
    launchers = {OURS: ours()}
    if args.other is not None:
        command = (str(args.other), *launchers[OURS].command[1:])
        launchers[OTHER] = replace(launchers[OURS], name=OTHER, command=command, python=args.other.parent / "python")
    if args.other_source is not None:
        launchers[OTHER] = of_source(launchers[OURS], args.other_source.resolve(), OTHER)
    results = {(float(gib), name): Result(f"{name}, {gib} GiB") for gib in args.gib.split(",") for name in launchers}
    with measuring("large-workers-") as folder:
        measure(results, launchers, args, folder)
    print(report(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results.values()], indent=1) + "\n")
    return 0 if all(result.recoveries for result in results.values()) else 1


def measure(
    results: dict[tuple[float, str], Result], launchers: dict[str, Launcher], args: argparse.Namespace, folder: Path
) -> None:
    chance = random.Random(args.seed)
    number = 0
    for gib in dict.fromkeys(size for size, _ in results):
        while any(len(result.kills) < args.kills for (size, _), result in results.items() if size == gib):
            for name in sorted(launchers, reverse=number % 2 == 1):
                result = results[gib, name]
                num_kills = min(args.kills_per_run, args.kills - len(result.kills))
                run = folder / f"{number}-{name}"
                launcher = replace(launchers[name], options=("--resident-mib", str(int(gib * 1024))))
                try:
                    measure_run(launcher, result, run, num_kills, args.hang_timeout, chance)
                except RunFailedError as error:
                    result.errors.append(str(error))
                    say(result, f"failed: {error}")
                finally:
                    shutil.rmtree(run, ignore_errors=True)
            number += 1
            if any(len(result.errors) > 2 for result in results.values()):
                return


def report(results: dict[tuple[float, str], Result]) -> str:
    rows = []
    for (gib, name), result in results.items():
        kill = result.kill_summary()
        other = results[gib, OTHER].kill_summary() if (gib, OTHER) in results else None
        rows.append(
            [
                f"{gib:g}",
                name,
                str(len(result.kills)),
                seconds(kill.median if kill else None),
                f"{kill.lowest:.3f}-{kill.highest:.3f}" if kill else "-",
                f"{other.median / kill.median:.2f}" if kill and other and name == OURS else "-",
                str(result.num_hangs),
                *(seconds(median_phase(result, phase)) for _, phase in PHASES),
            ]
        )
    head = [
        "GiB each",
        "launcher",
        "kills",
        "median s",
        "min-max",
        "other / ours",
        "hangs",
        *(phase for _, phase in PHASES),
    ]
    failed = [
        f"{result.name}: NOT FULLY MEASURED: {e}" for result in results.values() for e in dict.fromkeys(result.errors)
    ]
    return "\n".join([table(head, rows), "", "Phases are medians in seconds.", *failed])


if __name__ == "__main__":
    sys.exit(main())
