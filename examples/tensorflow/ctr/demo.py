"""
The demonstration behind `make demo-tensorflow`: a click-rate model with parameter servers that lose nothing.

    python examples/tensorflow/ctr/demo.py [--limit 180]

Makes a click log, trains DeepFM with 2 parameter servers, a chief, 2 workers and an evaluator under `dlrover local`, kills a server in the middle, then
asks for a third one. Ends with a report of what each of these cost, computed from the decisions of the master and the checkpoints. Exit code 0 only if
training went on from the last checkpoint, the planned change lost no step, the data books beside the last checkpoint count every record of every pass,
and all of it took less than three minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE)]

NUM_ROWS, NUM_EPOCHS, BATCH = 20_000, 4, 16
TRAINS = r"Version \d+ trains"


class TooSlow(Exception):
    """The limit is over."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for the whole demonstration (180)")
    limit = parser.parse_args().limit
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "This needs TensorFlow 2.15: pip install 'dlrover[tensorflow-estimator]', or `make demo-tensorflow`.",
            file=sys.stderr,
        )
        return 2
    import make_data

    from tests.tensorflow.cluster_job import ClusterJob

    with tempfile.TemporaryDirectory(prefix="dlrover-ctr-") as name:
        directory = Path(name)
        make_data.write(str(directory / "train.csv"), NUM_ROWS)
        make_data.write(str(directory / "eval.csv"), 1000, seed=2)
        options = ("--ps", "2", "--chief", "1", "--evaluator", "1", "--nodes", "2")
        job = ClusterJob(
            directory,
            *options,
            conf="conf.TrainConf",
            cwd=HERE,
            pace=0.02,
            save_steps=100,
            batch=BATCH,
            epochs=NUM_EPOCHS,
        )
        began_at = time.monotonic()
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            code = show(job)
            print(f"  the demonstration took {time.monotonic() - began_at:.0f} s; its limit is {limit:g} s")
            return code
        except TooSlow:
            print(
                f"demo: failed: it was not over within {limit:g} s (--limit). The end of the job's output:",
                file=sys.stderr,
            )
            print(job.output[-2000:], file=sys.stderr)
            return 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            job.close()


def _stop(_number: int, _frame: object) -> None:
    raise TooSlow


def show(job: ClusterJob) -> int:  # noqa: F821
    say("2 parameter servers, a chief, 2 workers and an evaluator start; each imports TensorFlow once")
    job.wait_for_verdict(TRAINS)
    job.wait_until("a checkpoint", lambda: "saved step 1" in job.output)
    say("training; now parameter server 0 is killed")
    killed_at = job.kill("ps-0")
    loss = job.wait_for_verdict(TRAINS, 2)
    to_model = job.decided_at(TRAINS, 2) - killed_at
    say(f"{loss} {to_model:.1f} s after the kill")
    again = " ".join(job.matching("are read again")) or "No record is read again."
    say(again)
    say("now a third parameter server is wanted: dlrover scale --replicas ps=3")
    job.command("scale", "--replicas", "ps=3")
    change = job.wait_for_verdict(TRAINS, 3)
    pause = job.decided_at(TRAINS, 3) - job.decided_at("chief and workers park")
    say(f"{change} Training paused for {pause:.1f} s")
    code = job.finish(timeout=600)
    return report(job, code, to_model=to_model, pause=pause)


def report(job: ClusterJob, code: int, *, to_model: float, pause: float) -> int:  # noqa: F821
    saved = step_of(job.matching("is saved and the parameter servers change")[0], r"step (\d+) is saved")
    began = step_of(job.matching(TRAINS)[2], r"model of step (\d+)")
    is_complete = bool(job.matching(r"The job ends \(Completed\)"))
    exports = list((job.model_dir / "export" / "best").glob("*"))
    num_counted, num_wanted = records_counted(job.model_dir), NUM_ROWS * NUM_EPOCHS
    checks = {
        "the job completed": code == 0 and is_complete,
        f"the data books of the last checkpoint count {num_counted:,} of {num_wanted:,} records": num_counted
        == num_wanted,
        f"the planned change lost no step: saved {saved}, went on with {began}": saved == began,
        "the best model was exported": bool(exports),
        "no process is left": not job.left_behind(),
    }
    print()
    print(f"  parameter server killed -> model restored on fresh processes   {to_model:6.1f} s")
    print(f"  2 -> 3 parameter servers: training paused                      {pause:6.1f} s")
    for sentence, is_met in checks.items():
        print(f"  {'ok ' if is_met else 'NOT'}  {sentence}")
    return 0 if all(checks.values()) else 1


def records_counted(model_dir: Path) -> int:
    """That the model has seen, by the master's books at the cut of the last checkpoint."""
    pointer = json.loads((model_dir / "data_shard_checkpoint.json").read_text())
    stored = json.loads((model_dir / f"{pointer['checkpoint']}.dlrover.json").read_text())
    return sum(books["num_consumed"] for books in json.loads(stored["data_state"])["datasets"].values())


def step_of(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found.group(1))


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
