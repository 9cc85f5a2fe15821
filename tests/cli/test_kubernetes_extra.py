"""Without `dlrover[k8s]` every program that talks to a cluster says so: a sentence and exit code 2, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("aiohttp", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("dlrover.cli.main", "job", "list", "-n", "a"),
        ("dlrover.cli.main", "job", "submit", "examples/kubernetes/job.yaml"),
        ("dlrover.cli.main", "job", "submit", "--name", "a", "--image", "i", "--dry-run", "--", "x"),
        ("dlrover.cli.main", "master", "--job-name", "a", "--platform", "pyk8s"),
        ("dlrover.cli.main", "master", "--job-name", "a", "--platform", "k8s"),
        ("dlrover.operator",),
    ],
    ids=lambda words: "-".join(words[1:3]) or words[0],
)
def test_the_error_names_the_extra(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'dlrover[k8s]'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, "a sentence, no traceback"
