"""
`python -m dlrover.simulator`: inject faults by the million and see that nothing breaks.

    --faults 1000000 --jobs 2 --seed 1     a campaign
    --seed 4711 --timeline                 what happened in one life
    --seed 4711 --shrink                   the same with as few faults as still break it
    --false-alarms --node-days 10000       healthy nodes with realistic pauses
    --standard                             small jobs under the standard mix: for measuring speed
    --tasks                                parameter-server jobs only; with --timeline and --shrink, too
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable

from dlrover.simulator.campaign import (
    Failure,
    Outcome,
    Totals,
    draw_pauses,
    draw_plan,
    draw_task_plan,
    run_many,
    run_plan,
    run_seed,
    run_standard_seed,
    run_task_seed,
    shrink,
)
from dlrover.simulator.plan import SeedPlan

NUM_SHOWN = 10
PAUSE_NODES = 100
PAUSE_DAYS = 2.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.timeline or options.shrink:
        return _tell(options)
    if options.false_alarms:
        return _false_alarms(options)
    return _campaign(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dlrover.simulator", description="Simulate jobs under faults.")
    parser.add_argument("--faults", type=int, default=100_000, help="stop after so many injected faults")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many seconds; 0: no limit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; others count up from it")
    parser.add_argument("--timeline", action="store_true", help="run this one seed and tell what happened")
    parser.add_argument("--shrink", action="store_true", help="the same with as few faults as still break it")
    parser.add_argument("--standard", action="store_true", help="small jobs under the standard mix only")
    parser.add_argument("--tasks", action="store_true", help="parameter-server jobs only")
    parser.add_argument("--false-alarms", action="store_true", help="realistic pauses of healthy nodes only")
    parser.add_argument("--node-days", type=float, default=10_000.0, help="of --false-alarms")
    return parser


def _campaign(options: argparse.Namespace) -> int:
    def is_enough(totals: Totals) -> bool:
        is_late = options.seconds and totals.seconds >= options.seconds
        return totals.num_faults >= options.faults or bool(is_late) or len(totals.failures) >= NUM_SHOWN

    run = run_task_seed if options.tasks else run_standard_seed if options.standard else run_seed
    totals = _run(run, options, is_enough, lambda totals: f"{totals.num_faults:,} faults")
    _report(totals, options.jobs, is_of_tasks=options.tasks)
    return _exit_code(totals, bool(totals.failures))


def _false_alarms(options: argparse.Namespace) -> int:
    def is_enough(totals: Totals) -> bool:
        return totals.node_hours >= options.node_days * 24 or bool(totals.failures)

    totals = _run(_run_pauses, options, is_enough, lambda totals: f"{totals.node_hours / 24:,.0f} node-days")
    _report(totals, options.jobs)
    print(f"false alarms: {totals.num_alarms} in {totals.node_hours / 24:,.0f} node-days (at most 1 allowed)")
    return _exit_code(totals, bool(totals.failures) or totals.num_alarms > 1)


def _exit_code(totals: Totals, is_bad: bool) -> int:
    if is_bad:
        return 1
    return 130 if totals.is_interrupted else 0


def _run_pauses(seed: int) -> Outcome:
    return run_plan(draw_pauses(seed, num_nodes=PAUSE_NODES, days=PAUSE_DAYS))


def _run(
    run: Callable[[int], Outcome],
    options: argparse.Namespace,
    is_enough: Callable[[Totals], bool],
    describe: Callable[[Totals], str],
) -> Totals:
    totals, shown_at, num_told = Totals(), 0.0, 0
    is_terminal = sys.stderr.isatty()
    try:
        for totals in run_many(run, itertools.count(options.seed), jobs=options.jobs, is_enough=is_enough):
            for failure in totals.failures[
                num_told:
            ]:  # a campaign is long: who watches may begin to look for the cause
                sys.stderr.write(f"\r{_sentence(failure)}\n")
            num_told = len(totals.failures)
            if totals.seconds - shown_at >= (0.5 if is_terminal else 30.0):
                shown_at = totals.seconds
                text = f"{describe(totals)}, {totals.num_seeds:,} seeds, {len(totals.failures)} violations, {shown_at:.0f} s"
                sys.stderr.write(f"\r{text}   " if is_terminal else f"{text}\n")
                sys.stderr.flush()
    except KeyboardInterrupt:
        totals.is_interrupted = True  # what was done until here is worth telling
    if is_terminal:
        sys.stderr.write("\r" + " " * 100 + "\r")
    return totals


def _report(totals: Totals, jobs: int, *, is_of_tasks: bool = False) -> None:
    seconds = max(totals.seconds, 1e-9)
    print(
        f"{totals.num_faults:,} faults over {totals.num_seeds:,} seeds in {seconds:.0f} s on {jobs} "
        f"process{'' if jobs == 1 else 'es'}: {totals.num_faults / seconds:,.0f} faults/s, "
        f"{totals.node_hours / seconds / jobs:,.0f} node-hours/s per process"
    )
    print(
        f"{totals.node_hours:,.0f} node-hours, {totals.num_events:,} events, {totals.num_commands:,} commands, "
        f"{totals.num_rounds:,} rounds, {totals.num_masters:,} master lives"
    )
    print(
        "ends: "
        + ", ".join(f"{reason or 'not waited for'} {count:,}" for reason, count in sorted(totals.by_reason.items()))
    )
    print("faults: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(totals.by_kind.items())))
    print(f"data: {totals.num_records:,} records in models, {totals.num_read_out:,} datasets read to the end")
    print(f"last breaths: {totals.num_breaths:,}, of which {totals.num_breaths_saved:,} saved a step")
    print(f"slowest recovery after the faults stopped: {totals.slowest_recovery:.0f} s")
    if totals.is_interrupted:
        print("interrupted: this is what was done until then")
    print(f"violations: {len(totals.failures)}")
    for failure in totals.failures[:NUM_SHOWN]:
        print(f"  {_sentence(failure)}")
        print(f"    python -m dlrover.simulator --seed {failure.seed} --timeline{' --tasks' * is_of_tasks}")


def _sentence(failure: Failure) -> str:
    return f"seed {failure.seed}: {failure.invariant}: {failure.sentence}"


def _tell(options: argparse.Namespace) -> int:
    plan = (draw_task_plan if options.tasks else draw_plan)(options.seed)
    outcome = run_plan(plan)
    if options.shrink and isinstance(outcome, Failure):
        plan, outcome = shrink(plan, outcome.invariant)
    run_plan(plan, on_note=_print_note)
    _describe(plan)
    if isinstance(outcome, Failure):
        print(f"VIOLATION {outcome.invariant}: {outcome.sentence}")
        return 1
    print(f"ended: {outcome.reason}; {outcome.num_faults} faults, {outcome.num_rounds} rounds; trace {outcome.trace}")
    return 0


def _print_note(at: int, text: str) -> None:
    print(f"{at / 1e6:12.6f}  {text}")


def _describe(plan: SeedPlan) -> None:
    print(f"seed {plan.seed}: {plan.shape}")
    print(f"{len(plan.faults)} planned faults in {plan.hours:g} h")


if __name__ == "__main__":
    sys.exit(main())
