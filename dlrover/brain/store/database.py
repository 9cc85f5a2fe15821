"""
Which database, and whether its tables are those of this version.

Its URL may hold a password. So it comes from a file or the environment, never from a command line, and no text of ours shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from dlrover.brain.store.schema import METADATA
from dlrover.protocol.errors import ConfigError, Unavailable

URL_VARIABLE = "DLROVER_BRAIN_DATABASE_URL"
URL_FILE_VARIABLE = "DLROVER_BRAIN_DATABASE_URL_FILE"
SQLITE, POSTGRESQL = "sqlite", "postgresql+psycopg"
BUSY_SECONDS = 30.0
"""A command may write while the service does."""
_MIGRATIONS = Path(__file__).parent / "migrations"


def database_url(url_file: str, sqlite_file: str, environ: Mapping[str, str]) -> URL:
    """The given file with a URL, the given SQLite file, the environment, else the SQLite file of this user. Raises ConfigError."""
    if url_file and sqlite_file:
        raise ConfigError("--database-url-file and --sqlite both name a database. Give only one of them.")
    url_file = url_file or ("" if sqlite_file else environ.get(URL_FILE_VARIABLE, ""))
    if url_file:
        try:
            text = Path(url_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The file {url_file} with the database's URL cannot be read: {error}") from error
        return _parse(text, f"The file {url_file}")
    if not sqlite_file and (text := environ.get(URL_VARIABLE, "").strip()):
        return _parse(text, f"The variable {URL_VARIABLE}")
    return URL.create(SQLITE, database=str(Path(sqlite_file) if sqlite_file else _default_file(environ)))


def _default_file(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_DATA_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "share")
    return Path(home) / "dlrover" / "brain.sqlite"


def _parse(text: str, shown: str) -> URL:
    """No error shows the text: a password may stand in it."""
    try:
        url = make_url(text)
    except ArgumentError:
        raise ConfigError(f"{shown} holds no database URL. Give one such as {POSTGRESQL}://user@host/brain.") from None
    if url.drivername == "postgresql":
        url = url.set(drivername=POSTGRESQL)
    if url.drivername not in (SQLITE, POSTGRESQL):
        raise ConfigError(
            f"{shown}: the kind of database {url.drivername!r} is not supported. Give {SQLITE}:///FILE or {POSTGRESQL}://…"
        )
    if url.drivername == SQLITE and not url.database:
        raise ConfigError(f"{shown}: the SQLite URL names no file. Give {SQLITE}:///FILE.")
    return url


def shown_url(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def open_engine(url: URL, *, readers: int = 4) -> Engine:
    """Makes the folder of an SQLite file. Raises ConfigError."""
    if url.drivername != SQLITE:
        return create_engine(url, pool_size=readers + 1, max_overflow=2, pool_pre_ping=True, pool_timeout=BUSY_SECONDS)
    try:
        Path(url.database or "").parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"The folder of {url.database} cannot be made: {error.strerror}.") from error
    engine = create_engine(url, pool_size=readers + 1, max_overflow=2, connect_args={"timeout": BUSY_SECONDS})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: object) -> None:
    """The driver's own transactions are off: they begin too late for what is read before it is written."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-32000"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Any) -> None:
    mode = "IMMEDIATE" if connection.get_execution_options().get("writes") else "DEFERRED"
    connection.exec_driver_sql(f"BEGIN {mode}")


def newest_version() -> str:
    head = _scripts().get_current_head()
    assert head is not None, "there is a migration"
    return head


def version_of(engine: Engine) -> str:
    """Of the tables; empty: there are none. Raises ConfigError or Unavailable."""
    try:
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            if found is None and set(inspect(connection).get_table_names()) & set(METADATA.tables):
                raise ConfigError(
                    f"The database {shown_url(engine.url)} has tables of another program with names that Brain needs. Give an empty database."
                )
    except SQLAlchemyError as error:
        raise unreachable(engine.url, error) from error
    return found or ""


def check_version(engine: Engine) -> None:
    """Raises ConfigError with what to do."""
    found, needed = version_of(engine), newest_version()
    if found == needed:
        return
    where = shown_url(engine.url)
    if not found:
        raise ConfigError(f"The database {where} has no tables of Brain. Create them with: dlrover brain migrate")
    if found in _known_versions():
        raise ConfigError(
            f"The tables of {where} have version {found}, but this dlrover needs {needed}. Stop every Brain on "
            "this database and run: dlrover brain migrate"
        )
    raise ConfigError(
        f"A newer dlrover made the tables of {where}: they have version {found}, and this dlrover supports "
        f"versions up to {needed}. Upgrade dlrover here: pip install --upgrade 'dlrover[brain]'"
    )


def migrate(engine: Engine, *, version: str = "head") -> tuple[str, str]:
    """Bring the tables to the newest version, in one transaction. Gives the version before and after. Raises ConfigError or Unavailable."""
    before = version_of(engine)
    if before and before not in _known_versions():
        check_version(engine)
    scripts = _scripts()
    config = Config()

    def steps(revision: Any, _: MigrationContext) -> Any:
        return scripts._upgrade_revs(version, revision)

    try:
        with (
            engine.connect().execution_options(writes=True) as connection,
            EnvironmentContext(config, scripts, fn=steps) as environment,
        ):
            environment.configure(connection=connection, target_metadata=METADATA)
            with environment.begin_transaction():
                environment.run_migrations()
            connection.commit()
    except SQLAlchemyError as error:
        raise unreachable(engine.url, error) from error
    return before, version_of(engine)


def unreachable(url: URL, error: SQLAlchemyError) -> Unavailable:
    """The driver's words name host and user, and never the password."""
    cause = getattr(error, "orig", None) or error
    return Unavailable(f"The database {shown_url(url)} does not answer: {str(cause).strip()}")


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(_MIGRATIONS))


def _known_versions() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}
