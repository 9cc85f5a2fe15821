"""
`python -m tools.mutation`: makes small mistakes in the core, one at a time, and counts how many of them the checks notice.

    python -m tools.mutation --seed 7 --sample 500
    python -m tools.mutation --seed 7 --sample 500 --minutes 8 --results sample.jsonl    # in slices: run it again to go on
    python -m tools.mutation --seed 7 --sample 500 --results sample.jsonl --again        # survivors meet the tests of today
    python -m tools.mutation --only dlrover/core/data/ranges.py                          # every mutant of a file

The sample is drawn by the seed from all mutants of `dlrover/core`. Mutants that `equivalent.toml` names are no mistakes; they are
listed with the reason and do not count. Exit code 0 if at least 95 % of the others are caught.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tools.mutation.campaign import Campaign
from tools.mutation.mutants import Mutant, all_mutants
from tools.mutation.report import GOAL, Known, Report, read_results

ROOT = Path(__file__).parents[2]
CORE = "dlrover/core"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    mutants = _drawn(options)
    known = Known.read(ROOT, options.equivalent)
    results = options.results
    if options.fresh:
        results.unlink(missing_ok=True)
        options.memory.unlink(missing_ok=True)
    if options.again:
        caught = [result for result in read_results(results) if result.caught is not None]
        results.write_text("".join(result.line() for result in caught))
    is_in_core = options.only is None or options.only.startswith(CORE)
    folder = CORE if is_in_core else options.only  # what is remembered is about all of the core
    campaign = Campaign(ROOT, folder, workers=options.workers, minutes=options.minutes, memory=options.memory)
    told = {result.key for result in read_results(results)}
    left = [mutant for mutant in mutants if mutant.key not in told and known.reason(mutant) is None]
    if left:
        with results.open("a") as file:
            for result in campaign.run(left):
                file.write(result.line())
                file.flush()
    report = Report.make(mutants, read_results(results), known, seed=options.seed)
    print(report.text())
    if options.json:
        options.json.write_text(report.json())
    return 0 if report.share >= GOAL and not report.num_left else 1


def _drawn(options: argparse.Namespace) -> list[Mutant]:
    everything = list(all_mutants(ROOT, options.only or CORE))
    if options.only and options.sample is None:
        return everything
    size = min(options.sample or 500, len(everything))
    return random.Random(options.seed).sample(everything, size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description="Are mistakes in the core noticed?")
    parser.add_argument("--seed", type=int, default=1, help="draws the sample (default 1)")
    parser.add_argument("--sample", type=int, help="how many mutants (default 500; with --only all)")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--only", help="a file or folder, from the root of the repository, instead of dlrover/core")
    parser.add_argument("--minutes", type=float, help="begin no mutant after this time; run it again to go on")
    parser.add_argument(
        "--results", type=Path, default=Path("mutation.jsonl"), help="where results are added, one to a line"
    )
    parser.add_argument(
        "--memory", type=Path, default=Path("mutation.memory"), help="which check reaches which line, from former runs"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results and the memory of former runs")
    parser.add_argument(
        "--again", action="store_true", help="forget only the survivors of former runs, and try them again"
    )
    parser.add_argument("--json", type=Path, help="write the report as JSON, too")
    parser.add_argument(
        "--equivalent",
        type=Path,
        default=Path(__file__).parent / "equivalent.toml",
        help="mutants that are no mistakes",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
