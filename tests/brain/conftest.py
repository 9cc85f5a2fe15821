"""Stores on both kinds of database, and a Brain that serves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from dlrover.brain.config import ServiceTerms
from dlrover.brain.desk import BrainDesk
from dlrover.brain.rates import SendRates
from dlrover.brain.serving import RunningBrain
from dlrover.brain.store.database import migrate, open_engine
from dlrover.brain.store.store import BrainStore
from tests.brain.jobs import BIG_RATE, Clock
from tests.brain.postgres import PostgresServer, postgres, why_not


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Of one file: tests of other packages kill what this process has started."""
    if reason := why_not():
        pytest.skip(reason)
    with postgres() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/brain.sqlite"
    found = request.getfixturevalue("server")
    assert isinstance(found, PostgresServer)
    return found.empty_database()


@pytest.fixture
def engine(new_url: str) -> Iterator[Engine]:
    found = open_engine(make_url(new_url))
    migrate(found)
    yield found
    found.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(engine: Engine, clock: Clock) -> Iterator[BrainStore]:
    found = BrainStore(engine, gather=0.002, clock=clock)
    found.start()
    yield found
    found.close()


@pytest.fixture
def desk(store: BrainStore) -> BrainDesk:
    return BrainDesk(store, SendRates(BIG_RATE), start_patience=60.0)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[RunningBrain]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A Brain in this process with real ports, on SQLite: what is behind the store has its tests on both."""
    url = make_url(f"sqlite:///{tmp_path}/served.sqlite")

    @contextlib.asynccontextmanager
    async def serving(port: int = 0, http_port: int | None = None, **more: object) -> AsyncIterator[RunningBrain]:
        engine = open_engine(url)
        migrate(engine)
        values = {"rate": BIG_RATE, "gather": 0.002, "start_patience": 60.0, **more}
        async with RunningBrain(engine, ServiceTerms(port=port, http_port=http_port, **values)) as brain:  # type: ignore[arg-type]
            yield brain

    return serving
