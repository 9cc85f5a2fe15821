"""
The example as a whole: a Ray of four machines on this one, a trainer, two rollouts, a reward and a stream, and faults at given steps.

    python -m examples.grpo.run --dir run-1
    python -m examples.grpo.run --dir run-2 --kill worker:8 rollout:14 reward:20 stream:26 conductor:32 host:38 machine:44
    python -m examples.grpo.compare run-1 run-2

`worker` is a process of the trainer, `machine` a whole raylet with all that runs on it. All are killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
os.environ["PYTHONPATH"] = str(REPOSITORY)  # for the raylets, and so for the roles

from dlrover.unified import Ensemble, EnsembleHandle, Role  # noqa: E402
from tests.ray.jobs import raylet_above  # noqa: E402
from tests.ray.lab import RECOMMENDED, RayLab, until  # noqa: E402

NUM_STEPS = 60
HEADWAY = 3
"""Steps that the trainer may do beyond the one of a kill until what was killed is back."""
FAULTS = ("worker", "rollout", "reward", "stream", "conductor", "host", "machine")


class Fault(Struct, frozen=True, kw_only=True):
    what: str
    step: int
    """The newest step when it was killed."""
    seconds: float
    """
    From the kill until what was killed is there again, as the job tells it; of the conductor: until it answers; of a worker: until both workers have
    restored their state.
    """
    changed: list[str]
    """What is another process than before."""


def ensemble(folder: Path, *, num_steps: int = NUM_STEPS, stale: int = 0, restart_pause: float = 1.0) -> Ensemble:
    """
    `stale`: rollouts answer with weights that are so many steps older than they say. The trainer fails then, and no restart would help.
    `restart_pause`: of a rollout, the reward and the stream, before a second restart within an hour.
    """
    restarts: Any = {"max_restarts": 20, "restart_pause": restart_pause}
    return Ensemble(
        "grpo",
        roles=[
            Role.elastic(
                "policy",
                f"{REPOSITORY}/examples/grpo/policy.py --steps {num_steps} --dir {folder}",
                nproc=2,
                cpus=0.5,
                env={"PYTHONPATH": str(REPOSITORY)},
                options=["--max-restarts=0" if stale else "--max-restarts=20"],
                on_failure="stop" if stale else "self",
                takes_calls=True,
            ),
            Role.simple("rollout", "examples.grpo.rollout.Rollout", count=2, cpus=0.5, needs=["reward"], **restarts),
            Role.simple("reward", "examples.grpo.reward.Reward", cpus=0.5, **restarts),
            Role.stream("samples", batch=16, **restarts),
        ],
        config={"stale": stale},
        working_dir="",
    )


class GrpoRun:
    """One run of it on a lab, with faults."""

    def __init__(self, lab: RayLab, folder: Path, *, num_steps: int = NUM_STEPS, **more: Any) -> None:
        """`more`: of `ensemble`."""
        self.lab = lab
        self.folder = folder
        self.job: EnsembleHandle = ensemble(folder, num_steps=num_steps, **more).submit()
        self.faults: list[Fault] = []

    def step(self) -> int:
        return max((each["step"] for each in self.events()), default=0)

    def hold_before(self, step: int) -> None:
        """The trainer goes on to this step and waits there."""
        fresh = self.folder / "limit.new"
        fresh.write_text(str(step))
        fresh.rename(self.folder / "limit")

    def await_step(self, step: int) -> None:
        until(lambda: self.step() >= step, self.explain, deadline=300.0)

    def pids(self) -> dict[str, int]:
        """By instance; its workers are `worker-0` and `worker-1`."""
        account = self.job.account()
        found = {name.rpartition(".")[0] or f"{name}-host": pid for name, pid in account.pids.items()}
        for event in self.events():
            found[f"worker-{event['rank']}"] = event["pid"]
        return {**found, "conductor": account.pid}

    def kill(self, what: str) -> Fault:
        before = self.pids()
        step, began, killed_at = self.step(), time.monotonic(), time.time()
        name = {
            "worker": "worker-1",
            "rollout": "rollout-1",
            "reward": "reward-0",
            "stream": "samples-0",
            "host": "policy-host",
        }.get(what, what)
        if what == "machine":
            [machine] = [
                each for each in self.lab.machines if self.lab.raylet(each) == raylet_above(before["rollout-0"])
            ]
            lost = {each for each, pid in before.items() if raylet_of(pid) == self.lab.raylet(machine)}
            self.lab.remove_machine(machine)
        else:
            lost = {"worker-0", "worker-1"} if what == "worker" else {name}
            os.kill(before[name], signal.SIGKILL)
        seconds = self._await_back(before, lost, began)
        after = self.pids()
        if what == "worker":
            seconds = self._restored_at({before[each] for each in lost}) - killed_at
        changed = sorted(each for each, pid in before.items() if after.get(each) != pid)
        fault = Fault(what=what, step=step, seconds=seconds, changed=changed)
        self.faults.append(fault)
        return fault

    def wait(self) -> int:
        return self.job.wait(300)

    def record(self) -> list[dict[str, object]]:
        return list(json.loads((self.folder / "record.json").read_text()))

    @property
    def report(self) -> str:
        """After the end: why it failed."""
        return self.job.report

    def explain(self) -> str:
        with contextlib.suppress(Exception):
            return f"at step {self.step()}: {self.job.status()}\n" + "\n".join(self.job.logs())
        return f"at step {self.step()}"

    def _await_back(self, before: dict[str, int], lost: set[str], began: float) -> float:
        def are_back() -> bool:
            with contextlib.suppress(Exception):  # the conductor may be away
                now = self.pids()
                return all(now.get(each, before[each]) != before[each] for each in lost)
            return False

        until(are_back, self.explain, deadline=180.0)
        return time.monotonic() - began

    def _restored_at(self, former: set[int]) -> float:
        """When the last of the new workers noted that it goes on. `former`: pids of the killed ones."""
        firsts: dict[int, float] = {}
        for event in self.events():
            firsts.setdefault(event["pid"], event["at"])
        newest = {event["rank"]: event["pid"] for event in self.events()}
        assert former.isdisjoint(newest.values())
        return max(firsts[pid] for pid in newest.values())

    def events(self) -> list[dict[str, Any]]:
        """What the workers have noted, the oldest first."""
        found = []
        for path in self.folder.glob("events-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # it is being written
                    found.append(json.loads(line))
        return sorted(found, key=lambda event: event["at"])


def raylet_of(pid: int) -> int:
    """Above a process; 0: the process is gone."""
    with contextlib.suppress(Exception):
        return raylet_above(pid)
    return 0


@contextlib.contextmanager
def new_lab(*, num_machines: int = 4, settings: dict[str, int] | None = RECOMMENDED) -> Iterator[RayLab]:
    """`settings`: of Ray's health check; None: its own, which take a machine for lost after about 14 s, and no busy one."""
    directory = tempfile.mkdtemp(prefix="dr-", dir="/tmp")
    lab = RayLab(directory, settings=settings)
    try:
        for _ in range(num_machines):
            lab.add_machine(num_cpus=1)
        yield lab
    finally:
        lab.close()
        shutil.rmtree(directory, ignore_errors=True)


def run(lab: RayLab, folder: Path, kills: Sequence[tuple[str, int]], *, num_steps: int = NUM_STEPS) -> GrpoRun:
    """Until its end. Raises `AssertionError` if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if kills:
        (folder / "limit").write_text("1")
    grpo = GrpoRun(lab, folder, num_steps=num_steps)
    for what, step in sorted(kills, key=lambda kill: kill[1]):
        grpo.hold_before(step + HEADWAY)
        grpo.await_step(step)
        fault = grpo.kill(what)
        print(
            f"  step {fault.step:2}: {what} killed, back after {fault.seconds:.1f} s; other processes: {', '.join(fault.changed)}"
        )
    grpo.hold_before(num_steps + 1)
    code = grpo.wait()
    assert code == 0, f"exit code {code}: {grpo.job.report}"
    return grpo


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="for the record of the run")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument(
        "--kill", nargs="*", default=[], metavar="WHAT:STEP", help=f"WHAT is one of {', '.join(FAULTS)}"
    )
    options = parser.parse_args()
    kills = [(text.partition(":")[0], int(text.partition(":")[2])) for text in options.kill]
    if unknown := [what for what, _ in kills if what not in FAULTS]:
        parser.error(f"--kill {unknown[0]}: give one of {', '.join(FAULTS)}")
    with new_lab() as lab:
        grpo = run(lab, options.dir.resolve(), kills, num_steps=options.steps)
        for line in grpo.record():
            print(line["step"], line["loss"], f"{line['reward']:.3f}", line["keys"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
