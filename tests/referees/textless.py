"""
What simulated jobs decide, with every text left out: `python -m tests.referees.textless` prints one number for each of the 200 seeds.

A change of the core's texts changes every digest of a journal, because the state holds sentences. Run this before such a change and after
it: equal lines show that nothing but texts changed. It covers each command, what came out of it, events, deadlines and answers, and the
state at the end of each job. Every text with a space in it counts as the same one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from dlrover.core.commit_order import walk
from dlrover.core.job import Job
from dlrover.simulator.campaign import draw_plan
from dlrover.simulator.simulation import Simulation
from tests.referees.questions import said
from tests.referees.told import ASK_EVERY, SEEDS

_ENCODER = msgspec.msgpack.Encoder(enc_hook=repr)


def blanked(value: Any) -> Any:
    """The same in plain data; texts are blank where they have a space, names and codes stay."""
    match value:
        case str():
            return "" if " " in value else value
        case dict():
            # The digest of a state with other texts is another one.
            return [
                [blanked(key), blanked(each)] for key, each in value.items() if key != "digest" or "stage" not in value
            ]
        case list() | tuple():
            return [blanked(each) for each in value]
        case _:
            return value


def textless_of(seed: int) -> str:
    simulation = Simulation(draw_plan(seed))
    simulation.run()
    records = simulation.masters.journal.archive
    found = hashlib.blake2b(digest_size=16)
    for each in _heard(records):
        found.update(_ENCODER.encode(blanked(msgspec.to_builtins(each, enc_hook=repr, str_keys=False))))
    return f"{seed} {len(records)} {found.hexdigest()}"


def _heard(records: list[bytes]) -> Iterator[object]:
    job = Job()
    for step in walk(job, records):
        yield step.record.now
        yield step.record.command
    state = msgspec.to_builtins(job.state, enc_hook=repr, str_keys=False)
    state.pop("decision_version")
    yield state
    yield from said(Job(), records, ASK_EVERY)


def main() -> None:
    for seed in SEEDS:
        print(textless_of(seed), flush=True)


if __name__ == "__main__":
    sys.exit(main())
