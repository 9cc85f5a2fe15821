"""Results of mutants, those that are no mistakes, and the page about both."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import msgspec

from tools.mutation.checks import Catch
from tools.mutation.mutants import Mutant, all_mutants

GOAL = 0.95
KINDS = {
    "transcript": "a transcript",
    "life": "a recorded life",
    "table": "the table of a plain function",
    "test": "another test of the core",
    "recording": "the recording of all constants, defaults and tables",
    "simulation": "an invariant of a simulated job, or an exception in it",
    "trace": "the recorded trace of a simulated job",
    "told": "the recording of all replies, events and answers of a simulated job",
    "time": "the time limit: it did not end",
    "import": "the module could not be loaded",
}


class Result(msgspec.Struct, frozen=True):
    key: str
    where: str
    line_number: int
    operator: str
    before: str
    after: str
    caught: Catch | None
    """None: it survived."""
    seconds: float

    @classmethod
    def of(cls, mutant: Mutant, caught: Catch | None, seconds: float) -> Result:
        return cls(mutant.key, mutant.where, mutant.line, mutant.operator, mutant.before, mutant.after, caught, seconds)

    def line(self) -> str:
        return msgspec.json.encode(self).decode() + "\n"

    def told(self) -> str:
        path, _, function = self.where.partition("::")
        return f"{path}:{self.line_number} {function or '(body)'}: {self.operator}\n    - {self.before}\n    + {self.after}"


def read_results(file: Path) -> list[Result]:
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in file.read_text().splitlines()]


class Equivalent(msgspec.Struct, frozen=True):
    """A mutant that decides the same as the core."""

    where: str
    before: str
    after: str
    reason: str


class Known:
    def __init__(self, listed: list[Equivalent]) -> None:
        self._reasons = {(each.where, each.before, each.after): each.reason for each in listed}

    @classmethod
    def read(cls, root: Path, file: Path) -> Known:
        """Entries name a function and the texts of a statement; one that names no mutant is an error, it protects nothing."""
        listed = msgspec.convert(tomllib.loads(file.read_text()), dict[str, list[Equivalent]]).get("equivalent", [])
        paths = sorted({each.where.split("::")[0] for each in listed})
        found = {
            (m.where, m.before, m.after) for path in paths if (root / path).exists() for m in all_mutants(root, path)
        }
        stale = [each for each in listed if (each.where, each.before, each.after) not in found]
        if stale:
            raise SystemExit(f"{file} names no mutant with: {stale[0].where}: {stale[0].before} => {stale[0].after}")
        return cls(listed)

    def reason(self, mutant: Mutant) -> str | None:
        return self._reasons.get((mutant.where, mutant.before, mutant.after))


class Report(msgspec.Struct):
    seed: int
    num_drawn: int
    equivalent: list[tuple[str, str]]
    """Mutant and reason."""
    caught: dict[str, int]
    """By kind."""
    survivors: list[Result]
    num_left: int
    """Not tried yet."""

    @classmethod
    def make(cls, mutants: list[Mutant], results: list[Result], known: Known, *, seed: int) -> Report:
        by_key = {result.key: result for result in results}
        equivalent = [
            (Result.of(mutant, None, 0.0).told(), reason)
            for mutant in mutants
            if (reason := known.reason(mutant)) is not None
        ]
        counted = [mutant for mutant in mutants if known.reason(mutant) is None]
        tried = [by_key[mutant.key] for mutant in counted if mutant.key in by_key]
        return cls(
            seed=seed,
            num_drawn=len(mutants),
            equivalent=equivalent,
            caught=dict(Counter(each.caught.kind for each in tried if each.caught is not None)),
            survivors=[each for each in tried if each.caught is None],
            num_left=len(counted) - len(tried),
        )

    @property
    def num_caught(self) -> int:
        return sum(self.caught.values())

    @property
    def share(self) -> float:
        tried = self.num_caught + len(self.survivors)
        return self.num_caught / tried if tried else 0.0

    def text(self) -> str:
        tried = self.num_caught + len(self.survivors)
        lines = [
            f"Seed {self.seed}: {self.num_drawn} mutants drawn, {len(self.equivalent)} of them equivalent, {tried} tried.",
            f"Caught: {self.num_caught} of {tried}, {self.share:.1%} (goal {GOAL:.0%}).",
            *(f"  {self.caught.get(kind, 0):5} by {words}" for kind, words in KINDS.items()),
        ]
        if self.num_left:
            lines.append(f"Not tried yet: {self.num_left}. Run it again to go on.")
        if self.equivalent:
            lines += ["", "Equivalent, not counted:"]
            lines += [f"  {told}\n    {reason}" for told, reason in self.equivalent]
        if self.survivors:
            lines += ["", "Survived:"]
            lines += [
                f"  {each.told()}" for each in sorted(self.survivors, key=lambda each: (each.where, each.line_number))
            ]
        return "\n".join(lines)

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
