"""
What a mutant has to get past: the tests of the core, and simulated jobs with their invariants and recorded traces.

Each check runs once on the real core, which tells how long it takes and which lines it reaches. A mutant meets only the checks
that reach it, the nearest and fastest first, and is caught by the first that fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import coverage
import hypothesis
import msgspec
import pytest
from _pytest.runner import runtestprotocol

TESTS = ("tests/core", "tests/simulator/test_found.py", "tests/referees/test_constants.py")
SEEDS = range(1, 31)
"""Of the simulated jobs. There are recordings of 200; these few keep the price of a survivor at seconds."""
TEST_SECONDS, SIMULATED_SECONDS = 12.0, 4.0
"""Of CPU time that the tests and the simulated jobs of one mutant may need. A mutant that is not caught by then counts as a survivor."""
PATIENCE = 2.0
"""Seconds of CPU time on top of 10 times what a check needs on the real core. Then the mutant counts as one that never ends."""
ROOM_BYTES = 2 << 30
"""Of memory that a mutant may need on top of what the process has."""


class Catch(msgspec.Struct, frozen=True):
    """How a mutant was caught."""

    by: str
    """A test, or the seed of a simulated job."""
    kind: str
    """transcript, life, table, test, recording (of constants), simulation, trace, told, time (it did not end), or import (it cannot be loaded any more)."""
    how: str = ""


class Check(msgspec.Struct):
    name: str
    is_simulated: bool
    seconds: float = 0.0
    """Of CPU time, on the real core."""
    lines: dict[str, list[int]] = {}
    """Those of the mutated folder that it reaches, by file."""
    trouble: str = ""
    """Why it cannot be asked about mutants; empty if it can."""
    version: str = ""
    """Of the core and of the check itself when this was measured."""


class Versions:
    """Which version of the core and of itself a check has. A module that several tests share does not count: forget the memory when it changes much."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._core = _digest(sorted((root / "dlrover/core").rglob("*.py")))
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        file = name.split("::")[0]
        if file not in self._known:
            path = self._root / file
            beside = path.with_name(path.stem.removeprefix("test_"))
            recorded = [*sorted(beside.rglob("*.txt")), *sorted(path.parent.glob("*.xz"))]
            files = [path, *recorded] if path.is_file() else []
            self._known[file] = f"{self._core} {_digest(files)}"
        return self._known[file]


def _digest(files: list[Path]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


class Checks:
    """All checks of this process, ready to run. Made inside a session of pytest, which has the tests collected."""

    def __init__(self, session: pytest.Session) -> None:
        self._items = {item.nodeid: item for item in session.items}

    def names(self, seeds: range) -> list[Check]:
        return [Check(name, False) for name in self._items] + [Check(f"seed {seed}", True) for seed in seeds]

    def run(self, name: str) -> Catch | None:
        """None if the check is content."""
        return _simulate(int(name.removeprefix("seed "))) if name.startswith("seed ") else self._test(name)

    def _test(self, name: str) -> Catch | None:
        item = self._items.get(name)
        if item is None:
            return Catch(name, "test", "it is not even collected")
        for report in runtestprotocol(item, log=False, nextitem=None):
            if report.failed:
                how = _last_line(str(report.longrepr))
                return Catch(name, kind_of(name), how)
        return None


def kind_of(name: str) -> str:
    """Of a test, as in `Catch`."""
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "test")


_KINDS = {
    "tests/core/test_transcripts.py": "transcript",
    "tests/core/lives/": "life",
    "tests/core/test_tables.py": "table",
    "tests/referees/": "recording",
}


def _simulate(seed: int) -> Catch | None:
    from dlrover.simulator.campaign import draw_plan
    from dlrover.simulator.simulation import Simulation
    from tests.referees.recordings import TRACES
    from tests.referees.told import TOLD, fold

    name = f"seed {seed}"
    try:
        simulation = Simulation(draw_plan(seed))
        trace = simulation.run().trace
    except Exception as error:
        return Catch(name, "simulation", f"{type(error).__name__}: {error}"[:300])
    if TRACES.read_text().splitlines()[seed] != f"{seed} {trace}":
        return Catch(name, "trace", "another trace than recorded")
    try:
        told = fold(simulation.masters.journal.archive)
    except Exception as error:
        return Catch(name, "told", f"{type(error).__name__}: {error}"[:300])
    return (
        None if TOLD.read_text().splitlines()[seed] == f"{seed} {told}" else Catch(name, "told", "it says other things")
    )


def _last_line(text: str) -> str:
    told = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (told or text.splitlines() or [""])[0][:300]


class Session:
    """The plugin that hands the collected tests to `act` instead of running them."""

    def __init__(self, act: Callable[[Checks], None]) -> None:
        self._act = act

    def pytest_collection(self) -> None:
        """The same examples for each mutant, and a failing one is not made smaller: that it fails is all we want to know."""
        profile = hypothesis.settings(
            hypothesis.settings.default,
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            derandomize=True,
            database=None,
            print_blob=False,
        )
        hypothesis.settings.register_profile("mutation", profile)
        hypothesis.settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "the tests cannot be collected"
        self._act(Checks(session))
        return True


def collected(root: Path, tests: tuple[str, ...], act: Callable[[Checks], None]) -> int:
    """Calls `act` with the checks of a fresh session of pytest; what pytest itself prints is dropped unless it failed."""
    paths = [str(root / path) for path in tests if (root / path.split("::")[0]).exists()]
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", "--rootdir", str(root), *paths]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is loaded, by us
    # Not to a descriptor: the processes that we fork from inside report on theirs.
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = int(pytest.main(["--capture=sys", "-c", str(root / "pyproject.toml"), *arguments], [Session(act)]))
    if code not in (0, 5):
        sys.stderr.write(told.getvalue()[-4000:])
    return code


def measure(checks: Checks, wanted: list[Check], folder: Path) -> Iterator[Check]:
    """Runs each on the real core."""
    spawned: list[str] = []

    def watch(event: str, _: tuple[object, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            spawned.append(event)

    sys.addaudithook(watch)
    cover = _coverage(folder)
    cover.start()
    for check in wanted:
        cover.switch_context(check.name)
        del spawned[:]
        began = time.process_time()
        caught = checks.run(check.name)
        check.seconds = time.process_time() - began
        if spawned:
            check.trouble = "it starts another process, which has the real core"
        elif caught is not None:
            check.trouble = f"it fails on the real core: {caught.how}"
    cover.stop()
    data = cover.get_data()
    by_name = {check.name: check for check in wanted}
    for file in data.measured_files():
        for line, names in data.contexts_by_lineno(file).items():
            for name in names:
                if name in by_name:
                    by_name[name].lines.setdefault(file, []).append(line)
    yield from wanted


def lines_at_import(modules: list[str], folder: Path) -> dict[str, list[int]]:
    """Which lines of the folder run when these modules are imported, by file. They must not be loaded yet."""
    cover = _coverage(folder)
    cover.start()
    for module in modules:
        importlib.import_module(module)
    cover.stop()
    data = cover.get_data()
    return {file: sorted(data.lines(file) or ()) for file in data.measured_files()}


def _coverage(folder: Path) -> coverage.Coverage:
    include = [f"{folder}/*" if folder.is_dir() else str(folder)]
    return coverage.Coverage(data_file=None, include=include, config_file=False)


def affordable(order: list[Check]) -> list[Check]:
    """The first checks of an order, as many as a mutant has time for."""
    left = {False: TEST_SECONDS, True: SIMULATED_SECONDS}
    chosen = []
    for check in order:
        if check.seconds <= left[check.is_simulated]:
            left[check.is_simulated] -= check.seconds
            chosen.append(check)
    return chosen


def judge(checks: Checks, order: list[Check], tell: Callable[[Catch], None]) -> None:
    """Runs the checks one by one in this process, which has a mutant in it, and tells of the first that fails.

    A mutant that never ends is told of by the timer, which ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    running = ""

    def give_up(*_: object) -> NoReturn:
        tell(Catch(running, "time", "it did not end"))
        os._exit(0)

    signal.signal(signal.SIGPROF, give_up)
    for check in order:
        running = check.name
        signal.setitimer(signal.ITIMER_PROF, PATIENCE + 10 * check.seconds)
        caught = checks.run(check.name)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if caught is not None:
            tell(caught)
            return
