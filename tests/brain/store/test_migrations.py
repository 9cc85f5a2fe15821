"""The tables of a database have this version, or Brain says which command brings them there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text
from sqlalchemy.engine import make_url

from dlrover.brain.config import ServiceTerms
from dlrover.brain.serving import RunningBrain
from dlrover.brain.store.database import (
    URL_FILE_VARIABLE,
    URL_VARIABLE,
    check_version,
    database_url,
    migrate,
    newest_version,
    open_engine,
    shown_url,
    version_of,
)
from dlrover.protocol.errors import ConfigError, Unavailable


def test_an_empty_database_gets_its_tables_and_a_second_time_changes_nothing(new_url: str) -> None:
    engine = open_engine(make_url(new_url))
    assert version_of(engine) == ""
    with pytest.raises(ConfigError, match="dlrover brain migrate"):
        check_version(engine)
    assert migrate(engine) == ("", newest_version())
    assert migrate(engine) == (newest_version(), newest_version())
    check_version(engine)
    engine.dispose()


def test_every_version_is_a_step_from_the_one_before(new_url: str) -> None:
    engine = open_engine(make_url(new_url))
    assert migrate(engine, version="0001") == ("", "0001")
    assert migrate(engine)[0] == "0001"
    check_version(engine)
    engine.dispose()


async def test_brain_does_not_serve_tables_of_a_newer_version(engine: Engine) -> None:
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"version 9999.*Upgrade dlrover"):
        async with RunningBrain(engine, ServiceTerms(port=0, http_port=None)):
            raise AssertionError("it serves")
    with pytest.raises(ConfigError, match="9999"):
        migrate(engine)


async def test_brain_does_not_serve_a_database_without_tables(new_url: str) -> None:
    engine = open_engine(make_url(new_url))
    with pytest.raises(ConfigError, match="dlrover brain migrate"):
        async with RunningBrain(engine, ServiceTerms(port=0, http_port=None)):
            raise AssertionError("it serves")


def test_tables_of_another_program_are_left_alone(new_url: str) -> None:
    engine = open_engine(make_url(new_url))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(text("CREATE TABLE job (id INTEGER)"))
    with pytest.raises(ConfigError, match="another program"):
        migrate(engine)
    assert inspect(engine).get_table_names() == ["job"]
    engine.dispose()


def test_a_database_that_is_away_is_unavailable() -> None:
    engine = open_engine(make_url("postgresql+psycopg://ann:a-password@127.0.0.1:1/brain"))
    with pytest.raises(Unavailable) as caught:
        version_of(engine)
    assert "a-password" not in str(caught.value)


def test_where_the_database_is_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://ann:a-password@db/brain\n")
    own = "sqlite:///elsewhere.sqlite"
    found = database_url(str(file), "", {URL_VARIABLE: own})
    assert (found.drivername, found.host) == ("postgresql+psycopg", "db")
    assert "a-password" not in shown_url(found)
    assert database_url("", "", {URL_FILE_VARIABLE: str(file), URL_VARIABLE: own}) == found
    assert database_url("", "", {URL_VARIABLE: own}).database == "elsewhere.sqlite"
    assert database_url("", "a.sqlite", {URL_FILE_VARIABLE: str(file)}).database == "a.sqlite"
    assert database_url("", "", {"HOME": "/home/ann"}).database == "/home/ann/.local/share/dlrover/brain.sqlite"


@pytest.mark.parametrize("content", ["", "no url: a-password", "mysql://ann:a-password@db/brain", "sqlite://"])
def test_defect_34_a_url_that_is_wrong_is_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "url"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        database_url(str(file), "", os.environ)
    assert "a-password" not in str(caught.value)
