"""A real PostgreSQL in a temporary folder, for the tests that run on both kinds of database. As root it runs as another user, because it refuses root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

_USERS = ("postgres", "nobody")


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None: there is none on this machine."""
    found = shutil.which("initdb")
    folders = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
        *([Path(found).parent] if found else []),
    ]
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def why_not() -> str:
    """Empty: it can be started."""
    if programs() is None:
        return "PostgreSQL is not installed (apt install postgresql)"
    if os.geteuid() == 0 and _other_user() is None:
        return f"PostgreSQL refuses root, and there is none of the users {', '.join(_USERS)}"
    return ""


def _other_user() -> str | None:
    known = {each.pw_name for each in pwd.getpwall()}
    return next((name for name in _USERS if name in known), None)


class PostgresServer:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def empty_database(self) -> str:
        """Its URL. There is one, which is emptied: a database of its own for each test would take 7 MB each."""
        with psycopg.connect(host=self._folder, user="brain", dbname="postgres", autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return f"postgresql+psycopg://brain@/postgres?host={self._folder}"


@contextlib.contextmanager
def postgres() -> Iterator[PostgresServer]:
    folder = programs()
    assert folder is not None, "`why_not` was asked"
    user = _other_user() if os.geteuid() == 0 else None
    account = None if user is None else pwd.getpwnam(user)
    directory = tempfile.mkdtemp(
        prefix="brain-pg-"
    )  # a socket's path has at most 107 bytes, too few for pytest's folders
    if account is not None:
        os.chown(directory, account.pw_uid, account.pw_gid)
    os.chmod(directory, 0o755)
    who = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    data, log = f"{directory}/data", f"{directory}/log"
    init = [f"{folder}/initdb", "-D", data, "-U", "brain", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale", "C"]
    serve = [
        f"{folder}/postgres",
        "-D",
        data,
        "-k",
        directory,
        "-c",
        "listen_addresses=",
        "-c",
        "fsync=off",
        "-c",
        "max_connections=60",
    ]
    try:
        subprocess.run(init, check=True, cwd="/", stdout=subprocess.DEVNULL, **who)  # type: ignore[call-overload]
        with open(log, "wb") as output:
            server = subprocess.Popen(serve, cwd="/", stdout=output, stderr=output, **who)  # type: ignore[call-overload]
        try:
            _wait(server, directory, log)
            yield PostgresServer(directory)
        finally:
            server.send_signal(signal.SIGQUIT)  # without writing what is deleted next
            server.wait(timeout=60)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait(server: subprocess.Popen[bytes], directory: str, log: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(host=directory, user="brain", dbname="postgres").close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > until:
                raise AssertionError(Path(log).read_text()) from error
            time.sleep(0.1)  # it has no way to say when it is ready
