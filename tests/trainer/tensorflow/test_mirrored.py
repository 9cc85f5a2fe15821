"""`TF_CONFIG` of the workers of a world."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.kv import KvGet, KvSet, KvValues
from dlrover.trainer.tensorflow import mirrored


class Store:
    """Of one master, for workers in threads."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._values: dict[tuple[int, str], bytes] = {}

    def ask(self, request: Any, *, timeout: float) -> Any:
        with self._news:
            if isinstance(request, KvSet):
                self._values.update({(request.round, key): value for key, value in request.items.items()})
                self._news.notify_all()
                return None
            assert isinstance(request, KvGet)
            keys = [(request.round, key) for key in request.keys]
            if not self._news.wait_for(lambda: all(key in self._values for key in keys), request.wait):
                raise Rejected("not all are there", code=ErrorCode.KV_TIMEOUT)
            return KvValues(tuple(self._values[key] for key in keys))


def join(
    store: Store, rank: int, size: int, *, round_: int = 1, host: str = "127.0.0.1", **patience: float
) -> dict[str, Any]:
    where: Any = SimpleNamespace(round=round_, node_host=host)
    mirrored.join_world(where, {"RANK": str(rank), "WORLD_SIZE": str(size)}, store, **patience)  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(os.environ["TF_CONFIG"])
    return found


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")


def test_all_workers_of_a_round_get_the_same_addresses_in_the_order_of_their_ranks() -> None:
    store = Store()
    addresses: dict[int, list[str]] = {}

    def other() -> None:
        addresses[1] = mirrored._addresses(SimpleNamespace(round=1), 2, store, 60.0, 5.0)  # type: ignore[arg-type]

    store.ask(KvSet(items={"tf-config/1": b"host-1:5"}, round=1), timeout=1.0)  # type: ignore[arg-type]
    waiting = threading.Thread(target=other)
    waiting.start()
    config = join(store, 0, 2)
    waiting.join(60)
    assert config["cluster"]["worker"] == addresses[1]
    assert config["cluster"]["worker"][1] == "host-1:5"
    assert config["task"] == {"type": "worker", "index": 0}


def test_the_next_round_has_addresses_of_its_own() -> None:
    store = Store()
    join(store, 0, 1)
    later = join(store, 0, 1, round_=2, host="host-1")["cluster"]["worker"]
    assert later[0].startswith("host-1:")
    assert store.ask(KvGet(keys=("tf-config/0",), round=1), timeout=1.0).values[0].decode() not in later  # type: ignore[arg-type]


def test_a_worker_that_never_tells_its_address_is_not_waited_for_for_ever() -> None:
    with pytest.raises(TimeoutError, match="Not all 2 workers of round 1"):
        join(Store(), 0, 2, patience=0.0, longest_wait=0.01)
