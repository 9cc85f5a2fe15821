"""
Data: how fast shards are handed out and taken back, what a billion records cost, and what a training step pays: ours and dlrover 0.6.1's.

    python benchmarks/data.py                         everything, three rounds, about five minutes
    python benchmarks/data.py --quick                 one short round: does it all work?
    python benchmarks/data.py --parts shards --clients 16,256 --rounds 5 --json data.json
    python benchmarks/data.py --markdown data.json    the tables of an earlier run, to be pasted into the documentation

Both systems run as users have them: a master process, and clients in processes of their own that use the public `ShardingClient`. Ours go through
their agent's socket and the master's journal on disk. Each round measures every system, in turned order; figures are medians. Before each round
and after the last the machine is watched while we do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from control_plane_report import OLD, OURS, Sample
from data_report import report
from peers import PeerUnavailableError, dlrover_061
from process_tree import end_descendants
from rounds import measuring, run_rounds
from servers import Server, ServerError, dlrover_061_master, our_master, peer_environment, relay_agent

CLIENTS = Path(__file__).resolve().parent / "data_clients.py"
PARTS = ("shards", "start", "steps", "sampler")
SYSTEMS = (OURS, OLD)
TIMEOUT = 180.0
BILLION = 1_000_000_000
OLD_TEXT = 200_000
"""Of a shuffled text dlrover 0.6.1 lists every record, in time that grows with their square: a million take it a minute."""


class Bench:
    """One round after the other; keeps what was measured and what could not be."""

    def __init__(self, args: argparse.Namespace, folder: Path, python_061: Path | None) -> None:
        self.samples: list[Sample] = []
        self.errors: list[str] = []
        self._args, self._folder, self._python_061 = args, folder, python_061
        self._num_folders = 0

    def run_round(self, number: int) -> None:
        systems = [each for each in self._args.systems if each == OURS or self._python_061 is not None]
        turned = systems[number % len(systems) :] + systems[: number % len(systems)]
        for part in self._args.parts:
            measure: Callable[[str], Iterator[Sample]] = getattr(self, f"_{part}")
            for system in turned:
                self._attempt(part, system, measure)

    def _attempt(self, part: str, system: str, measure: Callable[[str], Iterator[Sample]]) -> None:
        try:
            for sample in measure(system):
                print(f"{sample}", file=sys.stderr, flush=True)
                self.samples.append(sample)
        except (ServerError, OSError, TimeoutError, subprocess.SubprocessError, AssertionError) as error:
            self.errors.append(f"{part}, {system}: {type(error).__name__}: {error}")
            print(f"{part}, {system}: failed: {error}", file=sys.stderr, flush=True)
        finally:
            end_descendants(deadline_at=time.monotonic() + 10)

    def _shards(self, system: str) -> Iterator[Sample]:
        for num_clients in self._args.clients:
            with self._master(system, num_clients) as (server, environment):
                extra = ["--clients", str(num_clients), "--seconds", str(self._args.seconds)]
                yield Sample("shards", system, num_clients, self._run(system, "shards", server, environment, extra))

    def _start(self, system: str) -> Iterator[Sample]:
        for storage in ("table", "text"):
            size = OLD_TEXT if (system, storage) == (OLD, "text") else BILLION
            with self._master(system, 1) as (server, environment):
                extra = ["--records", str(size), "--storage", storage]
                yield Sample(f"start {storage}", system, size, self._run(system, "start", server, environment, extra))

    def _steps(self, system: str) -> Iterator[Sample]:
        with self._master(system, 1) as (server, environment):
            extra = ["--seconds", str(2 * self._args.seconds)]
            yield Sample("steps", system, 1, self._run(system, "steps", server, environment, extra))

    def _sampler(self, system: str) -> Iterator[Sample]:
        yield Sample("sampler", system, 1, self._run(system, "sampler", None, {}, []))

    @contextlib.contextmanager
    def _master(self, system: str, num_clients: int) -> Iterator[tuple[Server, dict[str, str]]]:
        self._num_folders += 1
        folder = self._folder / str(self._num_folders)
        if system == OURS:
            with (
                our_master(folder) as master,
                relay_agent(master, folder / "node", num_workers=num_clients) as environment,
            ):
                yield master, environment
        else:
            assert self._python_061 is not None, "checked before"
            with dlrover_061_master(self._python_061, folder, num_nodes=num_clients) as server:
                yield server, {}

    def _run(
        self, system: str, part: str, server: Server | None, environment: dict[str, str], extra: list[str]
    ) -> dict[str, float]:
        python = sys.executable if system == OURS else str(self._python_061)
        base = dict(os.environ) if system == OURS else peer_environment()
        command = [python, str(CLIENTS), system, part, *extra]
        if server is not None:
            command += ["--address", server.address, "--pid", str(server.process.pid)]
        done = subprocess.run(
            command,
            env={**base, "OMP_NUM_THREADS": "1", **environment},
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        if done.returncode:
            last = " / ".join(done.stderr.strip().splitlines()[-3:])[-400:]
            raise ServerError(f"exit code {done.returncode}: {last}")
        found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def main() -> int:
    args = parse_args()
    if args.markdown:
        kept = json.loads(args.markdown.read_text())
        samples = [Sample(**each) for each in kept["samples"]]
        print(report(samples, kept["errors"], kept["machine"]["others_percent"], kept["rounds"]))
        return 0
    python_061, errors = None, []
    if OLD in args.systems:
        try:
            python_061 = dlrover_061().python
        except PeerUnavailableError as error:
            errors.append(f"{OLD}: {error}")
    strangers: list[float] = []
    with measuring("data-") as folder:
        bench = Bench(args, folder, python_061)
        bench.errors += errors
        run_rounds(args.rounds, bench.run_round, strangers)
    print(report(bench.samples, bench.errors, strangers, num_rounds=args.rounds))
    if args.json:
        machine = {"num_cores": os.cpu_count(), "python": platform.python_version(), "others_percent": strangers}
        found = [sample.as_json() for sample in bench.samples]
        kept = {"machine": machine, "rounds": args.rounds, "samples": found, "errors": bench.errors}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if bench.samples and not bench.errors else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rate (default %(default)s)")
    parser.add_argument("--clients", default="1,16,256", help="(default %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="measure nothing, show the tables of that file")
    parser.add_argument("--quick", action="store_true", help="one round of half a second, at most 16 clients")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds, args.clients = 1, 0.5, "1,16"
    for name, known in (("parts", PARTS), ("systems", SYSTEMS)):
        given = getattr(args, name).split(",")
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        setattr(args, name, given)
    try:
        args.clients = [int(each) for each in args.clients.split(",")]
    except ValueError:
        parser.error(f"--clients {args.clients}: give numbers with commas between them")
    if min(args.clients) < 1 or args.rounds < 1 or not args.seconds > 0:
        parser.error("--clients and --rounds must be at least 1 and --seconds above 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
