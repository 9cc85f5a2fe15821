"""The tutorial works as written: its script, every command of it in order, and what it says one sees."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
FIRST_JOB = "first-elastic-job.md"
DEADLINE = 120.0
NUMBER = re.compile(r"\d+(\.\d+)?")


def blocks(kind: str, page: str = FIRST_JOB) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (TUTORIALS / page).read_text(), re.DOTALL)


def commands(page: str = FIRST_JOB) -> list[str]:
    return [line for block in blocks("bash", page) for line in block.splitlines()]


class Terminal:
    """Runs commands in one directory, as somebody who has activated the environment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        self.shown = ""

    def run(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._directory,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        self.shown += done.stdout + done.stderr
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"

    @contextlib.contextmanager
    def running(self, command: str) -> Iterator[Path]:
        """Has it run meanwhile, and end well; yields the file with what it shows."""
        log = self._directory.with_suffix(".log")
        with log.open("wb") as output:
            job = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._directory,
                env=self._env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield log
            assert job.wait(DEADLINE) == 0, log.read_text()
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
                job.wait(DEADLINE)
        self.shown += log.read_text()


def wait_for(text: str, log: Path) -> None:
    end_at = time.monotonic() + DEADLINE
    while text not in log.read_text():
        assert time.monotonic() < end_at, f"no {text!r} in:\n{log.read_text()}"
        time.sleep(0.02)  # between two looks at a condition with a deadline


def plain(line: str) -> str:
    """As it looks in every run: with a number for each number."""
    return NUMBER.sub("0", line.strip())


def is_shown(said: str, shown: str) -> bool:
    """Three dots stand for an end that differs from run to run."""
    lines = [plain(line) for line in shown.splitlines()]
    if said.endswith("..."):
        return any(line.startswith(plain(said.removesuffix("..."))) for line in lines)
    return plain(said) in lines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    directory = tmp_path / "tutorial"
    directory.mkdir()
    (script,) = blocks("python")
    (directory / "train.py").write_text(script)
    terminal = Terminal(directory)
    first, kill, *others = commands()
    with terminal.running(first) as log:
        wait_for("step 40:", log)
        terminal.run(kill)
    assert [line for line in terminal.shown.splitlines() if line.startswith("starts at step")][1:], "it went on"
    for command in others:
        terminal.run(command)
    said = [line for block in blocks("text") for line in block.splitlines()]
    assert [line for line in said if not is_shown(line, terminal.shown)] == [], terminal.shown
    assert "starts at step 301" in terminal.shown
    assert terminal.shown.count("complete") == 3
    assert terminal.shown.count("good ") == 3
    assert (directory / "job.html").stat().st_size > 0


def test_the_tutorial_has_a_command_for_each_of_its_steps() -> None:
    programs = [re.split(r"[ (]", command)[0] for command in commands()]
    assert programs[:2] == ["dlrover-run", "kill"]
    assert set(programs) == {"dlrover-run", "kill", "dlrover"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "lives", "verdict"),
    [("first-checkpoint.md", 3, "good "), ("first-data.md", 2, "clean")],
)
def test_a_short_tutorial_works_as_written(page: str, lives: int, verdict: str, tmp_path: Path) -> None:
    """Their scripts kill a worker by themselves, once."""
    pytest.importorskip("torch")
    directory = tmp_path / "tutorial"
    directory.mkdir()
    (script,) = blocks("python", page)
    (directory / "train.py").write_text(script)
    terminal = Terminal(directory)
    for command in commands(page):
        terminal.run(command)
    said = [line for block in blocks("text", page) for line in block.splitlines()]
    assert [line for line in said if not is_shown(line, terminal.shown)] == [], terminal.shown
    started = [line for line in terminal.shown.splitlines() if line.startswith(("starts at", "goes on after"))]
    assert len(started) == lives, terminal.shown
    exact = "starts at step 41," if page == "first-checkpoint.md" else "sum 500500 after step 100"
    assert exact in terminal.shown
    assert verdict in terminal.shown
    assert (directory / "crashed").exists()
