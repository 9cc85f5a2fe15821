"""
Chooses the rows of the tables (`tests/core/tables.py`): of a thousand rows that a function could have, those that notice a mistake.

    python -m tools.mutation.rows                     # all functions that have no rows yet
    python -m tools.mutation.rows --anew --only data. # those of a room, whether they have rows or not
    python -m tests.referees --record                 # then what they answer

Each mistake that `mutants.py` knows in a function is made once, and the rows that come to its line are asked until one answers otherwise. A row stays if it
noticed a mistake that those chosen before it did not. Mistakes that no row notices are for other tests.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import copy
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import msgspec

from tests.core.tables import ROWS, Function, answer, functions, read_rows
from tools.mutation.campaign import forked
from tools.mutation.injection import codes_in
from tools.mutation.mutants import Mutant, changed, mutants_of

ROOT = Path(__file__).parents[2]
MOST_ROWS = 2000
MOST_SECONDS = 0.15
"""Of CPU time for the candidates of one function."""
SECONDS_OF_MUTANT = 0.01
"""Of the same, for each mistake that is possible in it: a small function needs few."""
MUTANT_SECONDS = 0.03
"""Of CPU time for the rows that are asked about one mistake."""
SLOW_ROW = 0.02
"""Seconds. A row that takes longer is none."""
ALWAYS = 2
"""Rows that come to the function's end, whether they notice anything or not."""
PART = 8


class Chosen(msgspec.Struct, array_like=True):
    name: str
    rows: list[int]
    num_mutants: int
    num_noticed: int


class _TooSlow(BaseException):
    """No answer of the core, so nothing in it may catch it."""


def choose(name: str, function: Function, mutants: list[Mutant], tree: ast.Module) -> Chosen:
    plain = _function_of(function)
    candidates = _candidates(name, function, plain, min(MOST_SECONDS, (len(mutants) + 1) * SECONDS_OF_MUTANT))
    chosen: list[int] = list(candidates)[:ALWAYS]
    original, num_noticed = plain.__code__, 0
    for mutant in mutants:
        code = _compiled(mutant, tree)
        if code is None:
            continue
        plain.__code__ = code
        try:
            ends_at = time.process_time() + MUTANT_SECONDS
            for row in dict.fromkeys([*chosen, *candidates]):
                expected, lines = candidates[row]
                if lines.isdisjoint(mutant.lines):
                    continue
                if _asked(name, function, row) != expected:
                    num_noticed += 1
                    if row not in chosen:
                        chosen.append(row)
                    break
                if time.process_time() > ends_at:
                    break
        finally:
            plain.__code__ = original
    for row in chosen:
        if _asked(name, function, row) != candidates[row][0]:
            raise RuntimeError(f"Row {row} of {name} has two answers.")
    return Chosen(name, sorted(chosen), len(mutants), num_noticed)


def _candidates(
    name: str, function: Function, plain: FunctionType, seconds: float
) -> dict[int, tuple[bytes, frozenset[int]]]:
    """Rows with different answers, or that take another way through the function: what they answer, and the lines they come to."""
    found: dict[int, tuple[bytes, frozenset[int]]] = {}
    ways: Counter[frozenset[int]] = Counter()
    seen: set[bytes] = set()
    own = {plain.__code__, *codes_in(plain.__code__)}
    ends_at = time.process_time() + seconds
    for row in range(MOST_ROWS):
        if time.process_time() > ends_at:
            break
        lines: set[int] = set()
        sys.settrace(_tracer(own, lines))
        began = time.process_time()
        try:
            told = _asked(name, function, row)
        finally:
            sys.settrace(None)
        way = frozenset(lines)
        is_slow = time.process_time() - began > SLOW_ROW
        if told is None or not way or is_slow or (told in seen and ways[way] >= 20):
            continue
        seen.add(told)
        ways[way] += 1
        found[row] = (told, way)
    return found


def _tracer(own: set[CodeType], lines: set[int]) -> Callable[[FrameType, str, Any], Any]:
    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in own:
            return None
        lines.add(frame.f_lineno)
        return step

    def step(frame: FrameType, event: str, _: Any) -> Any:
        lines.add(frame.f_lineno)
        return step

    return enter


def _asked(name: str, function: Function, row: int) -> bytes | None:
    signal.setitimer(signal.ITIMER_PROF, 10 * SLOW_ROW)
    try:
        return answer(name, function, row)
    except _TooSlow:
        return b"it does not end"
    except Exception as error:  # what the mistake made of the answer cannot even be written
        return type(error).__name__.encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _function_of(function: Function) -> FunctionType:
    call = function.call
    while hasattr(call, "__wrapped__"):
        call = call.__wrapped__
    assert isinstance(call, FunctionType)
    return call


def _compiled(mutant: Mutant, tree: ast.Module) -> CodeType | None:
    """Only the statement of the module around the mistake: the whole module takes a hundred times as long."""
    (field, index), *steps = mutant.steps
    assert index is not None, field
    part = ast.Module([copy.deepcopy(tree.body[index])], [])
    flags = __future__.annotations.compiler_flag
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed(part, (("body", 0), *steps), mutant.replacement)
        code = compile(part, str(ROOT / mutant.path), "exec", flags=flags, dont_inherit=True)
    for each in codes_in(code):
        if each.co_qualname == mutant.function and each.co_firstlineno == mutant.first_line:
            return each
    return None


def _work(names: list[str], known: dict[str, Function]) -> Callable[[int], None]:
    def chosen_by(pipe: int) -> None:
        signal.signal(signal.SIGPROF, _stop)  # this process does nothing else
        with open(pipe, "wb") as file:
            file.write(msgspec.msgpack.encode([_chosen(name, known[name]) for name in names]))

    return chosen_by


def _stop(*_: object) -> None:
    raise _TooSlow


def _chosen(name: str, function: Function) -> Chosen:
    plain = _function_of(function)
    path = Path(plain.__code__.co_filename).relative_to(ROOT).as_posix()
    tree = ast.parse((ROOT / path).read_text())
    mutants = [
        each
        for each in mutants_of(ROOT, path)
        if each.function == plain.__qualname__ and each.first_line == plain.__code__.co_firstlineno
    ]
    return choose(name, function, mutants, tree)


def choose_all(names: list[str], known: dict[str, Function], workers: int, minutes: float) -> Iterator[list[Chosen]]:
    parts = [names[first : first + PART] for first in range(0, len(names), PART)]
    ends_at = time.monotonic() + 60 * minutes
    for _, told, _ in forked([_work(part, known) for part in parts], workers, ends_at=ends_at):
        yield msgspec.msgpack.decode(told, type=list[Chosen])


def _write(chosen: list[Chosen], order: list[str]) -> dict[str, tuple[int, ...]]:
    """All rows that are known then: another process may have written some meanwhile."""
    rows = {**read_rows(), **{each.name: tuple(each.rows) for each in chosen}}
    ROWS.write_text("".join(f"{' '.join([name, *map(str, rows[name])])}\n" for name in order if name in rows))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation.rows", description="Chooses the rows of the tables."
    )
    parser.add_argument("--only", default="", help="choose for functions whose name begins so, `scaling.` for example")
    parser.add_argument("--anew", action="store_true", help="choose for functions that have rows, too")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin with no function after this time")
    parser.add_argument("--workers", type=int, default=2, help="functions at a time (default 2)")
    options = parser.parse_args()
    plain = dict(functions())
    order = list(plain)
    known = read_rows()
    wanted = [name for name in order if name.startswith(options.only) and (options.anew or name not in known)]
    num_mutants = num_noticed = 0
    for part in choose_all(wanted, plain, options.workers, options.minutes):
        num_mutants += sum(each.num_mutants for each in part)
        num_noticed += sum(each.num_noticed for each in part)
        known = _write(part, order)
    left = sum(name not in known for name in order)
    num_rows = sum(len(known[name]) for name in order if name in known)
    print(
        f"{num_noticed} of {num_mutants} mistakes are noticed. {num_rows} rows in all; {left} functions have none yet."
    )


if __name__ == "__main__":
    main()
