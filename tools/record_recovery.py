"""
The terminal session in the README, recorded.

    python -m tools.record_recovery    # runs the first tutorial's script, kills a worker, writes what the terminal showed into README.md
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "first-elastic-job.md"
BEGIN, END = "<!-- recorded: python -m tools.record_recovery -->\n```text\n", "```\n<!-- end of the recording -->"
COMMAND = "dlrover-run --standalone --nproc-per-node=2 train.py 120"
SETTING = "export OMP_NUM_THREADS=1"
KILL = "kill -9 $(cat rank1.pid)"
DEADLINE = 180.0
COLUMNS = 110


def record() -> list[str]:
    """The lines of the session."""
    with tempfile.TemporaryDirectory(prefix="dlrover-session-") as name:
        directory = Path(name)
        script = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)[0]
        (directory / "train.py").write_text(script, encoding="utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        environ.pop("OMP_NUM_THREADS", None)
        job = subprocess.Popen(
            ["bash", "-c", f"{SETTING}; exec {COMMAND}"],
            cwd=directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            return _watched(job, directory)
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
                job.wait(DEADLINE)
            if job.stdout is not None:
                job.stdout.close()


def _watched(job: subprocess.Popen[str], directory: Path) -> list[str]:
    assert job.stdout is not None, "asked for above"
    lines, end_at = [f"$ {SETTING}", f"$ {COMMAND}"], time.monotonic() + DEADLINE
    for line in job.stdout:
        lines += textwrap.wrap(line.rstrip(), COLUMNS) or [""]  # as a terminal shows it
        if line.startswith("step 40:"):
            lines.append(f"$ {KILL}            # in a second terminal")
            subprocess.run(["bash", "-c", KILL], cwd=directory, check=True, timeout=DEADLINE)
        if time.monotonic() > end_at:
            raise SystemExit("The session took too long: " + "\n".join(lines))
    if job.wait(DEADLINE) != 0:
        raise SystemExit("The job failed:\n" + "\n".join(lines))
    return lines


def in_readme() -> list[str]:
    text = README.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].splitlines()


def write(lines: list[str]) -> None:
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit("README.md has no place for the recording.")
    README.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + after, encoding="utf-8")


if __name__ == "__main__":
    write(record())
