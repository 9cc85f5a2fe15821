"""
The demonstration behind `make demo-unified`: reinforcement learning with four roles on a Ray of four machines, all on this one.

    python -m examples.grpo.demo

First undisturbed; then with SIGKILL to a worker of the trainer, a rollout, the reward, the stream, the conductor, the trainer's host and a whole
machine. Exit code 0 only if all of it took at most three minutes, both runs are the same line by line (losses as hexadecimal numbers), each sample
was used exactly once, the model has learned, and nothing is left in the cluster.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.grpo.compare import differences, repeated_keys, rewards
from examples.grpo.run import new_lab, run

KILLS = [
    ("worker", 8),
    ("rollout", 14),
    ("reward", 20),
    ("stream", 26),
    ("conductor", 32),
    ("host", 38),
    ("machine", 44),
]
TIME_LIMIT = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS", help="for all of it (default %(default).0f)"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dlrover-grpo-"))
    began = time.monotonic()
    try:
        with new_lab() as lab:
            print(f"A Ray of four machines is up after {time.monotonic() - began:.0f} s.")
            undisturbed = run(lab, folder / "undisturbed", []).record()
            print(
                f"Undisturbed: {len(undisturbed)} steps, done after {time.monotonic() - began:.0f} s. Once more, with kills:"
            )
            disturbed = run(lab, folder / "disturbed", KILLS).record()
            problems = differences(undisturbed, disturbed)
            problems += [f"key {key} is not in exactly one batch" for key in repeated_keys(disturbed)]
            first, last = rewards(disturbed)
            if last < 2 * first:
                problems.append(f"the reward went from {first:.3f} to {last:.3f} only")
            lab.await_nothing_left()
        took = time.monotonic() - began
        if took > options.time_limit:
            problems.append(
                f"it took {took:.0f} s, and has {options.time_limit:.0f} s. Is this machine busy? See --time-limit."
            )
        print(
            f"\n{len(disturbed)} steps with {len(KILLS)} kills: "
            + (f"{len(problems)} problems" if problems else "every loss equal bit for bit, every sample used once")
            + f". Reward of the first ten steps {first:.2f}, of the last ten {last:.2f}. {took:.0f} s in all."
        )
        for problem in problems[:20]:
            print(f"  {problem}")
        return 1 if problems else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
