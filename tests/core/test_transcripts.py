"""The stories under `transcripts/`. After a wanted change: `python -m tests.core.transcripts`, and review the difference."""

from __future__ import annotations

import pathlib

import pytest

from tests.core.transcripts import DIRECTORY, play


@pytest.mark.parametrize("path", sorted(DIRECTORY.rglob("*.txt")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_core_says_what_the_transcript_says(path: pathlib.Path) -> None:
    assert play(path.read_text()) == path.read_text()
