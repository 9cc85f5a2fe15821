"""
Recovery on a Ray cluster: how long a job of two workers stands still when one is killed. Ours and Ray Train v2, same script, alternating.

    python benchmarks/ray_recovery.py                          everything, 10 kills of each, about an hour
    python benchmarks/ray_recovery.py --kills 5 --systems ours-worker,ray-train --machines "" --json ray_recovery.json

`--collect FILE` does it in pieces: each run adds its samples to those of the file, and reports all of them. `--kills 0` only reports.

    python benchmarks/ray_recovery.py --kills 2 --machines "" --collect ray_recovery.json

A cluster of four raylets runs on this machine; each round starts each system anew and kills twice. A kill is SIGKILL to a process id: of the
training process (`ours-worker`, `ray-train`: there it is an actor), or of the node's actor (`ours-standby`, once the standby waits warm, `ours-cold`
without). The clock runs from the kill to the end of the first step that nobody had done before, completed by both ranks.

`ours-cold` may need 2 s beyond what nobody can save: the import of torch and the start of an empty actor, both measured in the same run.

After that, lost machines (`--machines`): see ray_machines.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from failover import NUM_RANKS, REFERENCE_JOB, look_again
from figures import quietness, ratio, seconds, summarise, table, times
from ray_machines import PARTS, SETTINGS, Samples, measure_machines, report_machines
from rounds import measuring, run_rounds
from timeline import EventFolder, lives, recovery

from dlrover.protocol.messages.job import STANDBY, AskStatus, JobStatus

KILLS_PER_JOB = 2
STORE_BYTES = 80 << 20
START_TIMEOUT = 240.0
RECOVERY_TIMEOUT = 300.0
NUM_STEADY_STEPS = 5
TRAIN_JOB = str(Path(__file__).with_name("ray_train_job.py"))
SYSTEMS = ("ours-worker", "ours-standby", "ours-cold", "ray-train")
BUDGETS = {"ours-worker": 0.5, "ours-standby": 1.5}


class Lab:
    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._folder = tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp", ignore_cleanup_errors=True)
        self._ray = ray
        head = {
            "num_cpus": 1,  # for the controller of Ray Train
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": self._folder.name,
        }
        os.makedirs(default_directory(), exist_ok=True)
        self._cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        for _ in range(3):
            patiently(lambda: self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        self.address: str = self._cluster.address
        ray.init(address=self.address, namespace="bench", log_to_driver=False, configure_logging=False)

    def empty_actor(self) -> float:
        """Seconds that the start of an actor takes that does nothing."""

        class Empty:
            async def answer(self) -> int:
                return 1

        began = time.monotonic()
        actor = self._ray.remote(Empty).options(num_cpus=0).remote()
        self._ray.get(actor.answer.remote())
        took = time.monotonic() - began
        self._ray.kill(actor)
        return took

    def has_standby(self) -> bool:
        """The only job has a node that waits warm."""
        from dlrover.cli.ray.driver import find_job
        from dlrover.platforms.ray.store import Registry
        from dlrover.protocol.rpc.client import ask

        [name] = Registry().names()
        account = find_job(self._ray, name).account()
        status = asyncio.run(ask(account.address, AskStatus(), token=account.token, tls=None, timeout=10.0))
        assert isinstance(status, JobStatus)
        return any(node.status == STANDBY for node in status.nodes)

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()
        self._folder.cleanup()


def default_directory() -> str:
    """Where Ray writes the address of a new cluster, whatever `temp_dir` says; it fails if that directory is missing."""
    return os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a raylet 30 s for its start, whatever else the machine does."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def command_of(system: str, lab: Lab, folder: Path) -> list[str]:
    if system == "ray-train":
        return [sys.executable, TRAIN_JOB, "--address", lab.address, "--dir", str(folder)]
    standby = "1" if system == "ours-standby" else "0"
    options = ["--address", lab.address, "--nodes", "2", "--standby", standby, "--max-relaunches", "100"]
    return [
        sys.executable,
        "-P",
        "-m",
        "dlrover.cli.main",
        "ray",
        "run",
        *options,
        "--",
        str(REFERENCE_JOB),
        "--dir",
        str(folder),
    ]


@contextlib.contextmanager
def running(system: str, lab: Lab, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ended in good order, and waited for: the next system gets an idle cluster."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command_of(system, lab, folder), stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            deadline = time.monotonic() + 60
            while processes_of(folder) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """By their command lines. The actors of Ray Train have none of their own: they are known by the files that they hold open."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) or (
                process.name().startswith("ray::") and any(str(folder) in each.path for each in process.open_files())
            ):
                found.append(process.pid)
    return [pid for pid in found if pid != os.getpid()]


def victim_of(system: str, worker: int) -> int:
    """The process to kill: the worker itself, or the actor above its node."""
    if system in ("ours-worker", "ray-train"):
        return worker
    return next(parent.pid for parent in psutil.Process(worker).parents() if parent.name().startswith("ray::"))


def import_torch() -> float:
    """Seconds that a cold node needs for what its zygote imports."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True)
    return time.monotonic() - began


def measure(system: str, lab: Lab, folder: Path, results: dict[str, list[float]]) -> None:
    folder.mkdir(parents=True)
    with running(system, lab, folder) as process:
        events = EventFolder(folder / "events")
        for number in range(KILLS_PER_JOB):
            pids = await_steady(events, process, folder)
            if system == "ours-standby":
                until = time.monotonic() + START_TIMEOUT
                while not lab.has_standby():
                    look_again(process, folder / "log", until=until, waiting_for="a standby")
                pids = await_steady(events, process, folder)
            victim = victim_of(system, pids[(number + 1) % NUM_RANKS])
            old_pids = {event.pid for event in events.events}
            killed_at_ns = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            until = time.monotonic() + RECOVERY_TIMEOUT
            while True:
                found = recovery(
                    events.refresh(),
                    killed_at_ns=killed_at_ns,
                    survivors_gone_at_ns=None,
                    old_pids=old_pids,
                    num_ranks=NUM_RANKS,
                )
                if found is not None:
                    break
                look_again(process, folder / "log", until=until, waiting_for="a new step")
            results[system].append(found.seconds)
            print(f"  {system}: {found.seconds:.3f} s", file=sys.stderr, flush=True)


def await_steady(events: EventFolder, process: subprocess.Popen[bytes], folder: Path) -> dict[int, int]:
    until = time.monotonic() + START_TIMEOUT
    while True:
        seen = events.refresh()
        pids = lives(seen, NUM_RANKS)
        if (
            pids
            and min(sum(e.pid == pid and e.name == "step" for e in seen) for pid in pids.values()) >= NUM_STEADY_STEPS
        ):
            return pids
        look_again(process, folder / "log", until=until, waiting_for="steps of all ranks")


def report(
    results: dict[str, list[float]], strangers: list[float], actors: list[float], imports: list[float]
) -> dict[str, Any]:
    base = summarise(results.get("ray-train", []))
    rows = []
    for system, samples in results.items():
        figures = summarise(samples)
        if figures is None:
            continue
        budget = BUDGETS.get(system)
        if system == "ours-cold" and actors and imports:
            budget = 2.0 + statistics.median(imports) + statistics.median(actors)
        faster = None if system == "ray-train" else ratio(base, figures)
        rows.append(
            (
                system,
                str(figures.num_samples),
                seconds(figures.median),
                seconds(figures.lowest),
                seconds(figures.highest),
                seconds(budget),
                times(faster),
            )
        )
    print(table(("system", "kills", "median s", "lowest", "highest", "budget", "faster than Ray Train"), rows))
    for what, samples in (("start of an empty actor", actors), ("import of torch", imports)):
        figures = summarise(samples)
        if figures is not None:
            print(f"{what}: median {figures.median:.3f} s, {figures.lowest:.3f} to {figures.highest:.3f} s")
    print(quietness(strangers))
    return {"recovery": results, "empty_actor": actors, "import_torch": imports, "others_percent": strangers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each system")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--machines", default=",".join(PARTS), help="parts of ray_machines.py; empty: none")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of Ray's health check, for --machines")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument(
        "--collect", type=Path, help="add the samples to those of earlier pieces in this file, and report all of them"
    )
    args = parser.parse_args()
    machines = [name for name in args.machines.split(",") if name]
    systems = [name for name in args.systems.split(",") if name]
    if unknown := [name for name in systems if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(unknown)} is unknown; known are {', '.join(SYSTEMS)}")
    if unknown := [name for name in machines if name not in PARTS]:
        parser.error(f"--machines: {', '.join(unknown)} is unknown; known are {', '.join(PARTS)}")
    if unknown := [name for name in args.settings.split(",") if name not in SETTINGS]:
        parser.error(f"--settings: {', '.join(unknown)} is unknown; known are {', '.join(SETTINGS)}")
    known = read_samples(args.collect)
    results, strangers, actors, imports = (
        known["recovery"],
        known["others_percent"],
        known["empty_actor"],
        known["import_torch"],
    )
    for name in systems:
        results.setdefault(name, [])
    lost: Samples = {tuple(names.split(", ")): samples for names, samples in known["machines"].items()}
    with measuring("dlrover-ray-recovery-") as folder:
        if systems and args.kills:
            lab = Lab()
            try:

                def run_round(number: int) -> None:
                    for system in systems:
                        actors.append(lab.empty_actor())
                        measure(system, lab, folder / f"{number}-{system}", results)
                    imports.append(import_torch())

                run_rounds(-(-args.kills // KILLS_PER_JOB), run_round, strangers)
            finally:
                lab.close()
        if machines and args.kills:

            def lose_machines(number: int) -> None:
                for settings in args.settings.split(","):
                    measure_machines(machines, settings, lost)

            run_rounds(args.kills, lose_machines, strangers)
    found = report(results, strangers, actors, imports)
    if lost:
        report_machines(lost)
        found["machines"] = {", ".join(names): samples for names, samples in lost.items()}
    for path in (args.json, args.collect):
        if path:
            path.write_text(json.dumps(found, indent=2))


def read_samples(path: Path | None) -> dict[str, Any]:
    """Of earlier pieces."""
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return {"recovery": {}, "empty_actor": [], "import_torch": [], "others_percent": [], "machines": {}, **known}


if __name__ == "__main__":
    main()
