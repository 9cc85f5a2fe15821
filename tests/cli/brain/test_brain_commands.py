"""`dlrover brain`: the service as a process, and what operators and users see of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from dlrover.cli.main import main
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.brain import BrainQuestion, BrainReply, RunsTold
from dlrover.protocol.rpc.brain import BrainChannel
from tests.brain.jobs import began, ended, ref, run

WAIT = 60.0


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str, **environ: str) -> Outcome:
    """In this process: a new one takes a second."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_")}
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {**clean, "COLUMNS": "200", **environ}, clear=True),
        mock.patch.object(sys, "argv", ["dlrover", "brain", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, output.getvalue(), errors.getvalue())


class Service:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.address = ""

    def wait(self) -> None:
        until = time.monotonic() + WAIT
        while not self.address:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            found = re.search(r"Brain serves .* on (\S+:\d+)", self.log.read_text())
            self.address = found[1] if found else ""
            time.sleep(0.05)


@contextlib.contextmanager
def service(tmp_path: Path, *options: str) -> Iterator[Service]:
    log = tmp_path / f"serve-{len(list(tmp_path.glob('serve-*')))}.log"
    arguments = [f"--sqlite={tmp_path / 'brain.sqlite'}", "--port=0", "--http-port=none", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlrover.cli.main", "brain", "serve", *arguments], stdout=output, stderr=output
        )
    found = Service(process, log)
    try:
        found.wait()
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=WAIT)
            finally:
                process.kill()


def told(address: str, *questions: BrainQuestion, token: str = "") -> list[BrainReply]:
    async def ask() -> list[BrainReply]:
        channel = BrainChannel(address, token=token)
        try:
            return [await channel.ask(question, timeout=20) for question in questions]
        finally:
            await channel.close()

    return asyncio.run(ask())


def test_a_job_is_told_and_shown_and_sigterm_ends_the_service_in_order(tmp_path: Path) -> None:
    with service(tmp_path) as brain:
        told(brain.address, began(), RunsTold(job=ref(), runs=(run(1), run(2, nodes=6))), ended())
        jobs = command("jobs", "--brain", brain.address)
        assert jobs.returncode == 0
        assert re.search(r"job-1 .*a-job .*nightly .*Completed .* 2 ", jobs.stdout)
        shown = command("job", "a-job", DLROVER_BRAIN_SERVICE_ADDR=brain.address)
        assert "6 worker" in shown.stdout
        whole = json.loads(command("job", "job-1", "--json", "--brain", brain.address).stdout)
        assert [each["number"] for each in whole["runs"]] == [1, 2]
        assert command("plans", "--brain", brain.address).stdout == "Brain knows no plan.\n"
        missing = command("job", "nothing", "--brain", brain.address)
        assert (missing.returncode, "`dlrover brain jobs` lists them" in missing.stderr) == (1, True)
    assert brain.process.returncode == 0
    away = command("jobs", "--brain", brain.address)
    assert (away.returncode, "not reachable" in away.stderr) == (1, True)


def test_a_killed_service_keeps_what_it_has_confirmed(tmp_path: Path) -> None:
    with service(tmp_path) as brain:
        told(brain.address, began(), RunsTold(job=ref(), runs=tuple(run(number) for number in range(1, 21))))
        brain.process.kill()
        brain.process.wait()
    with service(tmp_path) as brain:
        whole = json.loads(command("job", "job-1", "--json", "--brain", brain.address).stdout)
        assert [each["number"] for each in whole["runs"]] == list(range(1, 21))


def test_a_token_opens_a_service_and_stands_in_no_log_and_no_database(tmp_path: Path) -> None:
    database, file = f"--sqlite={tmp_path / 'brain.sqlite'}", tmp_path / "token"
    made = command("tenants", "add", "team", "--token-file", str(file), "--row-limit=9", database)
    assert made.returncode == 0, made.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert len(token) > 40
    assert token not in made.stdout
    again = command("tenants", "add", "team", "--token-file", str(file), database)
    assert (again.returncode, file.read_text().strip()) == (2, token)
    printed = command("tenants", "add", "team", "--role=reader", database).stdout.rpartition(" ")[2].strip()
    with service(tmp_path, "--host=0.0.0.0") as brain:
        port = brain.address.rpartition(":")[2]
        address = f"127.0.0.1:{port}"
        refused = command("jobs", "--brain", address)
        assert (refused.returncode, "token of a tenant" in refused.stderr) == (1, True)
        told(address, began(), token=token)
        assert "job-1" in command("jobs", "--brain", address, "--brain-token-file", str(file)).stdout
        reader = tmp_path / "reader"
        reader.write_text(printed)
        assert "job-1" in command("jobs", "--brain", address, DLROVER_BRAIN_TOKEN_FILE=str(reader)).stdout
        with pytest.raises(DLRoverError, match="role"):
            told(address, began("other"), token=printed)
        line = Path(f"/proc/{brain.process.pid}/cmdline").read_bytes().decode()
    for secret in (token, printed):
        assert secret not in brain.log.read_text()
        assert secret not in line
        assert not any(secret.encode() in path.read_bytes() for path in tmp_path.glob("brain.sqlite*"))
    listed = command("tenants", "list", database).stdout
    assert re.search(r"team +1 job, 1 reader +9 +1", listed)
    assert "2 tokens" in command("tenants", "remove", "team", database).stdout
    assert command("tenants", "remove", "team", database).returncode == 2


def test_without_a_token_it_does_not_serve_other_machines(tmp_path: Path) -> None:
    found = command("serve", "--host=0.0.0.0", "--port=0", "--http-port=none", f"--sqlite={tmp_path / 'b.sqlite'}")
    assert found.returncode == 2
    assert "dlrover brain tenants add" in found.stderr


def test_another_schema_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    assert "version none became" in command("migrate", f"--sqlite={path}").stdout
    assert "already" in command("migrate", f"--sqlite={path}").stdout
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    for name in ("serve", "migrate", "settings", "prune"):
        found = command(name, f"--sqlite={path}")
        assert (found.returncode, "9999" in found.stderr, "pip install --upgrade" in found.stderr) == (2, True, True)


def test_settings_are_written_shown_and_removed(tmp_path: Path) -> None:
    database = f"--sqlite={tmp_path / 'b.sqlite'}"
    assert "every parameter has its default" in command("settings", database).stdout
    found = command(
        "settings",
        "--entry=2",
        "--include=user=ann,bob",
        "--set=optimizer.ps.cpu.overload=0.9",
        "--set=optimizer.worker.cpu.min=3",
        database,
    )
    assert found.stdout.splitlines() == [
        "entry 2",
        "  include user=ann,bob",
        "  optimizer.ps.cpu.overload = 0.9",
        "  optimizer.worker.cpu.min = 3",
    ]
    assert "optimizer.worker.create.cpu.min" in found.stderr, "a misspelt key is named with what was meant"
    assert "0.9" not in command("settings", "--entry=2", "--set=optimizer.ps.cpu.overload=", database).stdout
    assert command("settings", "--entry=2", "--remove", database).returncode == 0
    for wrong in (["--remove"], ["--set=x"], ["--include=colour=red"], ["--set=cluster.room.nodes=many"]):
        assert command("settings", *wrong, database).returncode == 2


def test_prune_tells_what_it_deleted(tmp_path: Path) -> None:
    found = command("prune", f"--sqlite={tmp_path / 'b.sqlite'}")
    assert (
        found.stdout == "run: 0 rows deleted, node_event: 0 rows deleted, plan: 0 rows deleted, job: 0 rows deleted\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "--http-port=x"], "--http-port"),
        (["serve", "--tls-cert=a"], "--tls-key"),
        (["tenants", "add"], "add NAME"),
        (["tenants", "add", "a b"], "name of letters"),
        (["tenants", "add", "a", "--role=king"], "--role king"),
        (["jobs", "--brain=x:port"], "--brain"),
        (["jobs", "--brain-token-file=/nowhere/at/all"], "token file"),
        (["migrate", "--database-url-file=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, arguments: list[str], text: str) -> None:
    found = command(*arguments, XDG_DATA_HOME=str(tmp_path))
    assert found.returncode == 2, found.stderr
    assert text in found.stderr
    assert "Traceback" not in found.stderr


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """An environment without it: its packages cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'sqlalchemy' else find(name, package)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "dlrover.cli.main", "brain", "serve"]
    found = subprocess.run(line, capture_output=True, text=True, timeout=WAIT, env=environ)
    assert found.returncode == 2
    assert "extra `brain`" in found.stderr
    assert "pip install 'dlrover[brain]'" in found.stderr
