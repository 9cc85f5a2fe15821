"""
Whatever a message says, the job takes it or refuses it with a code; it never fails, and a refusal changes nothing.

The messages are those of the transcripts, with one field at one of its edges, and the same ones later or twice (`perturbations.py`).
"""

from __future__ import annotations

import pathlib
import random

import pytest

from dlrover.core.commit_order import decode_record, walk
from dlrover.core.job import Job
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Micros
from tests.core.perturbations import LATER, around
from tests.core.scene import check_kind
from tests.core.transcripts import DIRECTORY, Story, told_by

NUM_NEIGHBOURS = 6
"""Of the last command of each kind in a story."""
STORIES = sorted(path for path in DIRECTORY.rglob("*.txt") if path.parent.name != "diagnosis")


@pytest.mark.parametrize("path", STORIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_message_beside_those_of_a_story_is_taken_or_refused(path: pathlib.Path) -> None:
    story = told_by(path.read_text())
    assert isinstance(story, Story)
    chance = random.Random(path.stem)
    records = story.scene.journal
    last = {type(decode_record(record).command): place for place, record in enumerate(records)}
    job, done = Job(), 0
    for place in sorted(last.values()):
        for _ in walk(job, records[done:place]):
            pass
        done = place
        record, snapshot = decode_record(records[place]), job.encode()
        for command in around(record.command, chance, NUM_NEIGHBOURS):
            other = Job.decode(snapshot)
            try:
                other.apply(command, Micros(record.now + chance.choice(LATER)), record.origin)
            except Rejected as error:
                assert other.encode() == snapshot, f"{command} was refused and changed something"
                check_kind(error)
