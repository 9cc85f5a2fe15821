"""
Last breaths with a second fault: how long a job stands still when a worker is killed, and another one dies or stops while it saves the last step.

    python benchmarks/second_faults.py                              31 jobs, about 5 minutes
    python benchmarks/second_faults.py --kinds hsdp --signals SIGSTOP --json faults.json

The scripts are those of the tests (`tests/integration/scripts`): three workers of DDP and four of HSDP that save to memory every 20 steps. A worker is killed
at no particular moment of a step; rank 0 has the second fault at the named point. The pause is the time from the kill until all ranks have
done a step of their next life. All jobs of a kind must end with the bits of its undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from failover import environment_for
from figures import table
from peers import Launcher, ours
from process_tree import running
from rounds import look_at_others, measuring

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "integration" / "scripts"
KINDS = {"ddp": (3, "guarded_steps.py", ("unused",)), "hsdp": (4, "guarded_hsdp.py", ())}
POINTS = ("order", "undone", "offered", "finishing", "saving", "written", "saved", "told")
VICTIM = 2
NUM_STEPS, SAVE_EVERY = 60, 20
BUDGET = 5.0
DEADLINE = 90.0


@dataclass
class Outcome:
    kind: str
    fault: str
    """Empty: the kill alone."""
    pause: float | None = None
    num_repeated: int = 0
    bits: str = ""
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--signals", default="SIGKILL,SIGSTOP")
    parser.add_argument("--json", type=Path, help="write every outcome into this file")
    args = parser.parse_args()
    chance = random.Random(0)
    launcher = ours()
    outcomes: list[Outcome] = []
    bits: dict[str, str] = {}
    with measuring("second-faults-") as folder:
        print(f"others use {look_at_others():.0f} % of the machine", file=sys.stderr)
        for kind in args.kinds.split(","):
            bits[kind] = run(launcher, folder / f"{kind}-calm", kind, None, chance).bits
            faults = [""]
            faults += [
                f"{point},{name},0"
                for point in args.points.split(",")
                if kind == "hsdp" or point != "finishing"
                for name in args.signals.split(",")
            ]
            for fault in faults:
                outcomes.append(run(launcher, folder / f"{kind}-{fault or 'kill'}", kind, fault, chance))
                print(asdict(outcomes[-1]), file=sys.stderr, flush=True)
    print(report(outcomes, bits))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    is_good = all(each.bits == bits[each.kind] and not each.error for each in outcomes)
    return 0 if is_good else 1


def run(launcher: Launcher, folder: Path, kind: str, fault: str | None, chance: random.Random) -> Outcome:
    """`fault`: None for an undisturbed job."""
    num_ranks, script, words = KINDS[kind]
    outcome = Outcome(kind, fault or "")
    (folder / "tmp").mkdir(parents=True)
    ranks = [folder / f"rank{rank}" for rank in range(num_ranks)]
    options = [*words, *([f"fault={fault}"] if fault else [])]
    command = [
        *launcher.command, f"--nproc-per-node={num_ranks}", "--max-restarts=50",
        str(SCRIPTS / script), str(folder), str(NUM_STEPS), str(SAVE_EVERY), *options,
    ]  # fmt: skip
    ends_at = time.monotonic() + DEADLINE
    with running(command, environment=environment_for(launcher, folder), folder=folder, log=folder / "log") as job:
        killed_at = 0.0
        while job.poll() is None and time.monotonic() < ends_at:
            if fault is not None and not killed_at and all(len(lines(each)) > SAVE_EVERY + 3 for each in ranks):
                time.sleep(chance.uniform(0, 0.02))
                killed_at = time.monotonic()
                os.kill(int(lines(ranks[VICTIM])[0][1]), signal.SIGKILL)
            time.sleep(0.01)
        if job.poll() != 0:
            log = (folder / "log").read_text(errors="replace")
            outcome.error = "hangs" if job.poll() is None else f"exit code {job.poll()}: {log[-500:]}"
            return outcome
    found = [lines(each) for each in ranks]
    outcome.bits = ",".join(sorted({each[-1][1] for each in found}))
    if fault is not None:
        outcome.pause = max(first_of_second_life(each) for each in found) - killed_at
        steps = [line[1] for line in found[0] if line[0] == "step"]
        outcome.num_repeated = len(steps) - len(set(steps))
    return outcome


def lines(path: Path) -> list[list[str]]:
    """Whole ones."""
    text = path.read_text() if path.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def first_of_second_life(found: Sequence[Sequence[str]]) -> float:
    life = [number for number, line in enumerate(found) if line[0] == "life"][1]
    return float(next(line[2] for line in found[life:] if line[0] == "step"))


def report(outcomes: Sequence[Outcome], bits: dict[str, str]) -> str:
    rows = [
        [
            each.kind,
            each.fault.removesuffix(",0").replace(",", ", ") or "(the kill alone)",
            "-" if each.pause is None else f"{each.pause:.2f}",
            str(each.num_repeated),
            each.error or ("equal" if each.bits == bits[each.kind] else "DIFFERENT"),
        ]
        for each in outcomes
    ]
    worst = max((each.pause for each in outcomes if each.pause is not None), default=0.0)
    verdict = "met" if worst <= BUDGET and not any(each.error for each in outcomes) else "missed"
    head = ["job", "second fault", "pause s", "steps done again", "bits"]
    return f"{table(head, rows)}\n\nlongest pause {worst:.2f} s, budget {BUDGET:g} s: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
