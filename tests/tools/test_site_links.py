"""On the site, a link into the repository is its path; a link between pages stays."""

from __future__ import annotations

import pytest

from tools.site.links import rewritten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](../reference/x.md#part)", "[a](../reference/x.md#part)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("![a](../images/x.png)", "![a](../images/x.png)"),
        ("see [the README](../../README.md).", "see the README (`README.md` in the repository)."),
        ("[`dlrover/core/job.py`](../../dlrover/core/job.py)", "`dlrover/core/job.py`"),
        ("[a [b]](../../examples/gpt)", "a [b] (`examples/gpt` in the repository)"),
    ],
)
def test_only_links_that_leave_the_docs_are_rewritten(text: str, expected: str) -> None:
    assert rewritten(text, "explanation/tour.md") == expected
