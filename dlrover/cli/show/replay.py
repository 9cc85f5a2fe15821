"""
`dlrover replay JOURNAL`: what was decided, when and why, and whether it can be believed.

The journal is only read. Its records are applied again by the same core that decided them; each stored digest and each
snapshot on the way must come out the same, bit for bit. A journal that a master is writing right now can be read too.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, assert_never
from urllib.parse import quote

import msgspec
from rich.text import Text

from dlrover.cli.tables import plain_console
from dlrover.core.commit_order import JournalCorrupt, Step, load, walk
from dlrover.core.job import DECISION_VERSION, Job
from dlrover.host.plain_text import printable
from dlrover.master.journal.journal import ADVICE, JournalError, check_meta, checksum, explain, read_meta, read_stored
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode
from dlrover.protocol.messages.job import (
    Attach,
    Check,
    Command,
    DeadlinePassed,
    Effect,
    End,
    EndStream,
    FinishJob,
    Idle,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    LeaveJob,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeSilent,
    ReportFailure,
    ReportFinished,
    Run,
    StopJob,
    TellNode,
    Wait,
    Wish,
)
from dlrover.protocol.messages.scaling import PlanOffered, RoomSeen, RunMeasured, ScaleTo, SetScaling

_LONGEST = 200
"""Characters of a command that is printed field by field."""


def main(arguments: Sequence[str]) -> int:
    parsed = build_parser().parse_args(arguments)
    return replay(parsed.journal, as_json=parsed.as_json)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlrover replay",
        description="Replay a job's journal: show what was decided, and check that it is correct.",
    )
    parser.add_argument("journal", type=Path, metavar="JOURNAL", help="the master's journal (an SQLite file)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON object per line")
    return parser


def replay(journal: Path, *, as_json: bool = False) -> int:
    """Print the timeline. 0 if every digest was the same as then, 1 with the reason if not, or if it cannot be read."""
    try:
        with _reading(journal) as connection:
            _print_timeline(connection, journal, as_json=as_json)
    except DLRoverError as error:
        print(f"dlrover replay: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise JournalError(f"There is no journal {path}. Give the path of the master's journal (an SQLite file).")
    connection = None
    try:
        try:
            connection = _open(path, "mode=ro&immutable=1" if _is_folded(path) else "mode=ro")
        except sqlite3.OperationalError:
            # On a medium that cannot be written SQLite can make no side files. Nobody writes there: read it as it is.
            connection = _open(path, "mode=ro&immutable=1")
        yield connection
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        if connection is not None:
            connection.close()


def _is_folded(path: Path) -> bool:
    """
    Whether no master has the journal open and none was killed with it: its write-ahead log is in the file. A reader would make an
    empty log and its index beside the file, and has no right to remove them.
    """
    try:
        with path.open("rb") as file:
            has_log = file.read(20)[18:] == bytes(
                [2, 2]
            )  # SQLite's versions for writing and reading: 2 with such a log
    except OSError:
        return False
    return has_log and not os.path.exists(f"{path}-wal")


def _open(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True, isolation_level=None)
    try:
        connection.execute("BEGIN")  # one view of a journal that may grow meanwhile
        connection.execute("SELECT count(*) FROM meta")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def walk_journal(path: Path) -> Iterator[tuple[Step | None, Job]]:
    """The job before the first record of a journal (with None), then after each of them. Raises `JournalError`."""
    with _reading(path) as connection:
        _check_version(read_meta(connection), path)
        stored = read_stored(connection, path, oldest=True)
        job = load(stored.snapshot)
        yield None, job
        try:
            for step in walk(job, stored.records):
                yield step, job
        except JournalCorrupt as error:
            raise JournalError(
                f"The journal {path} differs from what its commands lead to, after record {job.number}: {error}"
            ) from error


def _check_version(meta: dict[str, Any], path: Path) -> None:
    check_meta(meta, path)
    if meta.get("decision_version") != DECISION_VERSION:
        raise JournalError(
            f"The journal {path} was written by decision version {meta.get('decision_version')}, and this "
            f"dlrover has version {DECISION_VERSION}. Different versions may decide differently. Use the "
            "dlrover that wrote the journal."
        )


def _print_timeline(connection: sqlite3.Connection, path: Path, *, as_json: bool) -> None:
    meta = read_meta(connection)
    _check_version(meta, path)
    stored = read_stored(connection, path, oldest=True)
    snapshots = _snapshots(connection, path)
    printer = _JsonPrinter() if as_json else _TextPrinter()
    job = load(stored.snapshot)
    printer.begin(str(meta.get("job_name", "")), stored.first_number)
    try:
        for step in walk(job, stored.records):
            printer.step(step, job)
            _check_snapshot(snapshots, job, path)
    except (JournalCorrupt, AssertionError, LookupError, TypeError, ValueError) as error:
        # The core checks its own invariants: a record that breaks one was not written by it.
        text = str(error) or type(error).__name__
        raise JournalError(
            f"The journal {path} differs from what its commands lead to, after record {job.number}: {text}"
        ) from error
    printer.end(job, len(stored.records))


def _snapshots(connection: sqlite3.Connection, path: Path) -> dict[int, bytes]:
    """By the number of the record that follows them; as checksums, a large job has large snapshots."""
    found = {}
    for number, data, stored in connection.execute("SELECT number, data, checksum FROM snapshots"):
        if not isinstance(data, bytes) or checksum(data) != stored:
            raise JournalError(f"The journal {path} is damaged: snapshot {number} fails its checksum. {ADVICE}")
        found[number] = stored
    return found


def _check_snapshot(snapshots: dict[int, bytes], job: Job, path: Path) -> None:
    stored = snapshots.get(job.number + 1)
    if stored is not None and checksum(job.encode()) != stored:
        raise JournalError(
            f"The journal {path}: the snapshot after record {job.number} differs from the state that the records "
            "lead to."
        )


class _TextPrinter:
    """For people: a line per command, below it why and what followed."""

    def __init__(self) -> None:
        self._console = plain_console(highlight=False, soft_wrap=True)

    def begin(self, job_name: str, first_number: int) -> None:
        self._console.print(Text(f"job {job_name}, from record {first_number}", style="bold"))

    def step(self, step: Step, job: Job) -> None:
        record = step.record
        line = Text(f"{record.number:>6}  {clock_time(record.now)}  ", style="dim")
        line.append(in_words(record.command), style="default")
        self._console.print(line)
        for verdict in step.outcome.verdicts:
            self._console.print(Text(f"{'':>8}because: {verdict}", style="cyan"))
        for effect in step.outcome.effects:
            self._console.print(Text(f"{'':>8}> {effect_in_words(effect, job)}", style="green"))

    def end(self, job: Job, num_records: int) -> None:
        self._console.print(Text(f"{num_records} records replayed; all digests match", style="bold"))
        self._console.print(f"digest {job.digest().hex()}")


class _JsonPrinter:
    """For programs: an object per line, the last one says what was verified."""

    def begin(self, job_name: str, first_number: int) -> None:
        self._write({"job_name": job_name, "first_number": first_number})

    def step(self, step: Step, job: Job) -> None:
        record = step.record
        self._write(
            {
                "number": record.number,
                "now": record.now,
                "master_epoch": record.master_epoch,
                "origin": record.origin,
                "command": record.command,
                "words": in_words(record.command),
                "verdicts": step.outcome.verdicts,
                "effects": [effect_in_words(effect, job) for effect in step.outcome.effects],
            }
        )

    def end(self, job: Job, num_records: int) -> None:
        self._write({"verified": True, "num_records": num_records, "digest": job.digest().hex()})

    def _write(self, line: dict[str, object]) -> None:
        sys.stdout.write(printable(msgspec.json.encode(line).decode()) + "\n")


def clock_time(now: Micros) -> str:
    return datetime.fromtimestamp(now / 1e6).astimezone().isoformat(sep=" ", timespec="milliseconds")


def in_words(command: Command) -> str:
    match command:
        case MasterStarted():
            return f"master started, epoch {command.master_epoch}"
        case Attach():
            rank = "any rank" if command.node_rank is None else f"rank {command.node_rank}"
            life = "for the first time" if not command.incarnation else f"again (incarnation {command.incarnation})"
            runs = f", running round {command.running_round}" if command.running_round else ""
            return f"{command.host} attaches {life}, {rank}, {command.local_world_size} workers{runs}"
        case JoinRendezvous():
            return f"{_node(command)} joins round {command.round} and offers {command.offer}"
        case ReportFailure():
            first = command.failures[0]
            others = f" and {len(command.failures) - 1} more" if len(command.failures) > 1 else ""
            return (
                f"{_node(command)}: global rank {first.global_rank} failed in round {command.round} "
                f"({first.kind.value}: {first.message or 'no message'}){others}"
            )
        case ReportFinished():
            return f"{_node(command)} finished in round {command.round}"
        case LeaveJob():
            return f"{_node(command)} leaves ({command.reason.value}){_quoted(command.message)}"
        case NodeDisconnected():
            return f"the stream of {_node(command)} broke"
        case NodeSilent():
            return f"{_node(command)} has sent nothing since {clock_time(command.last_seen_at)}"
        case DeadlinePassed():
            return f"deadline {command.kind.value} of {command.id} passed"
        case RunMeasured():
            return _run_in_words(command)
        case RoomSeen():
            most = "an unknown number of" if command.most is None else command.most
            return f"the platform has room for {most} nodes of type {command.node_type.value}{_quoted(command.reason)}"
        case SetScaling():
            return f"a user sets scaling to {command.mode.value}"
        case ScaleTo():
            return f"a user asks for {command.nodes} nodes{_quoted(command.reason)}"
        case PlanOffered():
            return f"{command.source} offers a plan{_quoted(command.sentence)}"
        case StopJob():
            return f"a user stops the job{_quoted(command.message)}"
        case _:
            return _plainly(command)


def _run_in_words(run: RunMeasured) -> str:
    groups = ", ".join(f"{group.count} {group.node_type.value}" for group in run.configuration.groups)
    state = "is over" if run.is_over else "goes on"
    records = f", {run.records_per_second:.4g} records/s" if run.records_per_second else ""
    disturbed = ", disturbed" if run.is_disturbed else ""
    return (
        f"run {run.number} with {groups} {state}: {run.steps} steps of {run.step_time:.4g} s in {run.seconds:.0f} s"
        f"{records}{disturbed}"
    )


def effect_in_words(effect: Effect, job: Job) -> str:
    match effect:
        case TellNode(node=node):
            return f"node {node}: {_wish_in_words(job.desired(node).wish)}"
        case EndStream(node=node):
            return f"node {node}: its stream ends"
        case FinishJob(end=end):
            return f"the job ended: {end.reason.value}, exit code {end.exit_code}. {end.message}"
        case LaunchNode():
            return f"platform: launch {effect.name} as {effect.node_type.value} {effect.rank}"
        case RemoveNode():
            return f"platform: remove {effect.name}: {effect.reason}"
        case _:
            return _plainly(effect)


def _plainly(message: msgspec.Struct) -> str:
    """Most commands of the smaller rooms say enough by their names and fields."""
    fields = ", ".join(f"{name}={getattr(message, name)!r}" for name in message.__struct_fields__)
    text = f"{type(message).__name__}({fields})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _wish_in_words(wish: Wish) -> str:
    match wish:
        case Join():
            return f"join round {wish.round}: {wish.reason}"
        case JoinCheck():
            return f"join round {wish.round} of the node check: {wish.reason}"
        case Check(world=world):
            return f"check, round {world.round} ({wish.phase}), as group rank {world.group_rank} of {world.group_world_size}"
        case Wait():
            return f"wait: {wish.reason}"
        case Run(world=world):
            return (
                f"run round {world.round} as group rank {world.group_rank} of {world.group_world_size}, global ranks "
                f"{world.first_global_rank}-{world.first_global_rank + world.local_world_size - 1} of {world.world_size}"
            )
        case Leave():
            return f"leave: {wish.reason}"
        case Idle():
            return f"idle: {wish.reason}"
        case End(end=end):
            return f"end: {end.reason.value}"
        case _:
            assert_never(wish)


def _node(
    command: JoinRendezvous | ReportFailure | ReportFinished | LeaveJob | NodeDisconnected | NodeSilent,
) -> str:
    return f"node {command.node}.{command.incarnation}"


def _quoted(message: str) -> str:
    return f": {message}" if message else ""
