"""
One process for each mutant, forked from one that has everything loaded: a mutant costs its checks and no start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import NoReturn

import msgspec

from tools.mutation.checks import (
    SEEDS,
    TESTS,
    Catch,
    Check,
    Checks,
    Versions,
    affordable,
    collected,
    judge,
    kind_of,
    lines_at_import,
    measure,
)
from tools.mutation.injection import Place, forget, import_anew, living_functions, module_name, replace_function
from tools.mutation.mutants import Mutant
from tools.mutation.report import Result

WALL_LIMIT = 600.0
"""Seconds after which the process of a mutant is ended that neither answered nor used up its CPU time."""
PART = 64
"""Checks that are measured in one process: what was measured is kept, should the run be interrupted."""

_NO_END = msgspec.json.encode(Catch("", "time", "it did not end"))


class Campaign:
    """Mutants of a folder against tests and simulated jobs.

    `packages`: what is imported again for a mistake in the body of a module. `memory`: a file that keeps what was measured, for checks that do not change
    from one run to the next."""

    def __init__(
        self,
        root: Path,
        folder: str,
        *,
        workers: int = 2,
        minutes: float | None = None,
        tests: tuple[str, ...] = TESTS,
        seeds: range = SEEDS,
        packages: tuple[str, ...] = ("dlrover", "tests"),
        memory: Path | None = None,
    ) -> None:
        self._root = root
        self._folder = root / folder
        self._workers = workers
        self._minutes = minutes
        self._tests = tests
        self._seeds = seeds
        self._packages = packages
        self._memory = memory
        self._measured: list[Check] = []
        self._reached: dict[tuple[str, int], list[int]] = {}
        """Places in `_measured` by file and line."""
        self._imported: dict[str, list[int]] = {}
        """Lines that run when the modules of the folder are imported, by file."""
        self._living: dict[Place, list[FunctionType]] = {}

    def run(self, mutants: list[Mutant]) -> Iterator[Result]:
        """As they end. Everything happens inside a session of pytest, in a child, so that we can be an iterator."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _live(lambda pipe: self._host(mutants, pipe), writer)
        os.close(writer)
        with open(reader, "rb") as lines:
            for line in lines:
                yield msgspec.json.decode(line, type=Result)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError("The mutation run failed; see above.")

    def _host(self, mutants: list[Mutant], writer: int) -> None:
        if collected(self._root, self._tests, lambda checks: self._run_all(checks, mutants, writer)):
            raise RuntimeError("The session of pytest failed.")

    def _run_all(self, checks: Checks, mutants: list[Mutant], writer: int) -> None:
        files = sorted(self._folder.rglob("*.py")) if self._folder.is_dir() else [self._folder]
        modules = [module_name(file.relative_to(self._root).as_posix()) for file in files]
        for module in modules:
            importlib.import_module(module)  # even if no check does

        def import_again(pipe: int) -> None:
            forget(self._packages)
            os.write(pipe, msgspec.msgpack.encode(lines_at_import(modules, self._folder)))

        ((_, told, _),) = forked([import_again], 1, limit=None)
        self._imported = msgspec.msgpack.decode(told, type=dict[str, list[int]])
        self._measure(checks)
        gc.collect()
        self._living = living_functions(self._root)
        gc.freeze()  # forked processes then share the pages of what is there already

        def work(mutant: Mutant) -> Callable[[int], None]:
            return lambda pipe: self._try(checks, mutant, pipe)

        ends_at = None if self._minutes is None else time.monotonic() + 60 * self._minutes
        for index, told, seconds in forked([work(mutant) for mutant in mutants], self._workers, ends_at=ends_at):
            catch = msgspec.json.decode(told, type=Catch | None)
            result = Result.of(mutants[index], catch, round(seconds, 2))
            os.write(writer, result.line().encode())

    def _measure(self, checks: Checks) -> None:
        versions = Versions(self._root)
        names = checks.names(self._seeds)
        for check in names:
            check.version = versions.of(check.name)
        remembered = {(check.name, check.version): check for check in self._remembered()}
        self._measured = [known for check in names if (known := remembered.get((check.name, check.version)))]
        names = [check for check in names if (check.name, check.version) not in remembered]
        parts = [names[first : first + PART] for first in range(0, len(names), PART)]

        def work(part: list[Check]) -> Callable[[int], None]:
            def measured(pipe: int) -> None:
                with open(pipe, "wb") as file:
                    file.write(msgspec.msgpack.encode(list(measure(checks, part, self._folder))))

            return measured

        for _, told, _ in forked([work(part) for part in parts], self._workers, limit=None):
            self._measured += msgspec.msgpack.decode(told, type=list[Check])
            self._remember()
        for check in self._measured:
            if check.trouble and (check.name, check.version) not in remembered:
                sys.stderr.write(f"not asked: {check.name}: {check.trouble}\n")
        if any(check.trouble.startswith("it fails") for check in self._measured):
            raise RuntimeError("A check fails on the real core, so it can tell nothing about mutants.")
        self._measured = sorted(
            (check for check in self._measured if not check.trouble),
            key=lambda check: (check.is_simulated, "/referees/" in check.name, check.seconds),
        )
        for place, check in enumerate(self._measured):
            for file, lines in check.lines.items():
                for line in lines:
                    self._reached.setdefault((file, line), []).append(place)

    def _remembered(self) -> list[Check]:
        if self._memory is None or not self._memory.exists():
            return []
        return msgspec.msgpack.decode(self._memory.read_bytes(), type=list[Check])

    def _remember(self) -> None:
        if self._memory is not None:
            sound = [each for each in self._measured if not each.trouble.startswith("it fails")]
            self._memory.write_bytes(msgspec.msgpack.encode(sound))

    def _order(self, mutant: Mutant) -> list[Check]:
        """Transcripts, lives, tables and the tests of its room first. Of a mistake in a function only who comes there."""
        file = str(self._root / mutant.path)
        is_imported = self._is_imported(mutant)
        reached = self._measured if is_imported else self._who_reaches(mutant)
        room = f"tests/core/{mutant.path.split('/')[-2]}/"

        def nearness(check: Check) -> tuple[bool, bool, bool, bool, float]:
            is_recording = "/referees/" in check.name
            is_near = kind_of(check.name) != "test" or check.name.startswith(room)
            is_first = is_recording and is_imported  # it reads what bodies of modules define
            return (
                check.is_simulated,
                not is_first,
                not is_recording and file not in check.lines,
                not is_near,
                check.seconds,
            )

        return affordable(sorted(reached, key=nearness))

    def _who_reaches(self, mutant: Mutant) -> list[Check]:
        file = str(self._root / mutant.path)
        places = {place for line in mutant.lines for place in self._reached.get((file, line), ())}
        return [self._measured[place] for place in sorted(places)]

    def _is_imported(self, mutant: Mutant) -> bool:
        """Whether it shows only when its module is executed: in a body, or in a function that only a body calls."""
        if not mutant.function:
            return True
        at_import = self._imported.get(str(self._root / mutant.path), ())
        return any(line in at_import for line in mutant.lines) and not self._who_reaches(mutant)

    def _try(self, checks: Checks, mutant: Mutant, pipe: int) -> None:
        def tell(catch: Catch | None) -> None:
            os.write(pipe, msgspec.json.encode(catch))
            os.close(pipe)

        caught: list[Catch] = []

        def hear(catch: Catch) -> None:
            caught.append(catch)
            tell(catch)

        order = self._order(mutant)
        if not self._is_imported(mutant):
            replace_function(mutant, self._root, self._living)
            judge(checks, order, hear)
        else:
            import_anew(mutant, self._root, self._packages)
            code = collected(self._root, self._tests, lambda anew: judge(anew, order, hear))
            if not caught and code not in (0, 5):
                hear(Catch("import", "import", "the tests cannot be collected"))
        if not caught:
            tell(None)


def forked(
    works: list[Callable[[int], None]],
    at_a_time: int,
    *,
    ends_at: float | None = None,
    limit: float | None = WALL_LIMIT,
) -> Iterator[tuple[int, bytes, float]]:
    """Runs each in a process of its own; yields its number, what it wrote to its pipe, and the seconds, as they end.

    One that never ends and uses no CPU time, so that no timer ends it, is ended here."""
    waiting = list(enumerate(works))[::-1]
    running: dict[int, tuple[int, int, float, list[bytes]]] = {}
    while waiting or running:
        if waiting and len(running) < at_a_time:
            if ends_at is not None and time.monotonic() > ends_at:
                waiting.clear()
                continue
            index, work = waiting.pop()
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _live(work, writer)
            os.close(writer)
            running[reader] = (index, pid, time.monotonic(), [])
            continue
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for reader, (index, pid, began, told) in list(running.items()):
            is_over = False
            if reader in ready:
                part = os.read(reader, 1 << 20)
                told.append(part)
                is_over = not part
            elif limit is not None and time.monotonic() - began > limit:
                os.kill(pid, signal.SIGKILL)
                told[:] = [_NO_END]
                is_over = True
            if is_over:
                os.close(reader)
                _, status = os.waitpid(pid, 0)
                del running[reader]
                if not any(told):  # no mutant can do that: either it is caught, or it survives, and both are told
                    raise RuntimeError(f"A process ended with status {status} and told nothing; see above.")
                yield index, b"".join(told), time.monotonic() - began


def _live(work: Callable[[int], None], writer: int) -> NoReturn:
    """The life of a forked process. What the checks print is of no interest."""
    code = 1
    try:
        with tempfile.TemporaryFile("w+") as trash, contextlib.redirect_stdout(trash):
            work(writer)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)
