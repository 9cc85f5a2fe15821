"""
Clients that load a control plane: forked processes that all begin at the same moment and do one thing until the time is over.

    python control_plane_clients.py KIND OPERATION --address HOST:PORT [--clients N] [--seconds S] [--batch B] [--pid SERVER]

It runs in the environment of the system under test (ours, torch, or dlrover 0.6.1 in its own), so it imports nothing else, and prints
one line of JSON. Everything slow is imported once, before the forks. All clients of all systems are made the same way; what they call is the
public interface of the system.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

FORK = multiprocessing.get_context("fork")
DEADLINE = 120.0
VALUE = b"v" * 32
KEYS = 64
"""Different keys that one client uses."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Operation = Callable[[int], None]
"""Takes the number of the call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ours", "tcpstore", "c10d", "dlrover-0.6.1"])
    parser.add_argument(
        "operation", choices=["serve", "set", "get", "multi-set", "multi-get", "heartbeat", "rendezvous"]
    )
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=16, help="of a rendezvous")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=32, help="keys of one multi-set or multi-get")
    parser.add_argument("--pid", type=int, default=0, help="process whose CPU time is told")
    args = parser.parse_args()
    if args.operation == "serve":
        serve_store()
    elif args.operation == "rendezvous":
        tell((rendezvous_c10d if args.kind == "c10d" else rendezvous_dlrover)(args))
    else:
        tell(load(args))


def tell(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)
    for process in multiprocessing.active_children():
        process.kill()
        process.join(DEADLINE)
    os._exit(0)  # threads of peers that nobody can stop must not keep us


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, to 10 ms."""
    if not pid:
        return 0.0
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


# Operations for as long as the time lasts.


def load(args: argparse.Namespace) -> dict[str, float]:
    build = BUILDERS[args.kind](args)
    barrier = FORK.Barrier(args.clients + 1)
    results: Any = FORK.SimpleQueue()
    for number in range(args.clients):
        FORK.Process(target=run_client, args=(build, number, args, barrier, results), daemon=True).start()
    barrier.wait(DEADLINE)
    before, began_at = cpu_seconds(args.pid), time.monotonic()
    counts = [results.get() for _ in range(args.clients)]
    took, spent = time.monotonic() - began_at, cpu_seconds(args.pid) - before
    num = sum(counts)
    per_call = args.batch if args.operation.startswith("multi") else 1
    return {"num": num * per_call, "seconds": took, "cpu": spent}


def run_client(
    build: Callable[[int], Operation], number: int, args: argparse.Namespace, barrier: Any, results: Any
) -> None:
    try:
        operation = build(number)
        for call in range(KEYS):  # connected, warm, and all keys exist
            operation(call)
        barrier.wait(DEADLINE)
        end_at, num = time.monotonic() + args.seconds, 0
        while time.monotonic() < end_at:
            operation(num)
            num += 1
        results.put(num)
    except BaseException:
        barrier.abort()
        raise


def store_operation(store: Any, number: int, args: argparse.Namespace) -> Operation:
    """Of anything that has torch's store interface."""
    keys = [f"client-{number}/{key}" for key in range(KEYS)]
    some = [keys[begin : begin + args.batch] for begin in range(0, KEYS, args.batch)]
    values = [VALUE] * args.batch
    for key in keys:
        store.set(key, VALUE)
    operations: dict[str, Operation] = {
        "set": lambda call: store.set(keys[call % KEYS], VALUE),
        "get": lambda call: store.get(keys[call % KEYS]),
        "multi-set": lambda call: store.multi_set(some[call % len(some)], values),
        "multi-get": lambda call: store.multi_get(some[call % len(some)]),
    }
    return operations[args.operation]


def build_ours(args: argparse.Namespace) -> Callable[[int], Operation]:
    """The agent's socket is in the environment, as in a worker of a job."""
    from dlrover.trainer.torch.kv_store import MasterKVStore

    return lambda number: store_operation(MasterKVStore("bench"), number, args)


def build_tcpstore(args: argparse.Namespace) -> Callable[[int], Operation]:
    import torch.distributed

    host, _, port = args.address.rpartition(":")

    def build(number: int) -> Operation:
        store = torch.distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        return store_operation(store, number, args)

    return build


def build_dlrover(args: argparse.Namespace) -> Callable[[int], Operation]:
    from dlrover.python.elastic_agent.master_client import GrpcMasterClient  # type: ignore[import-not-found]

    def build(number: int) -> Operation:
        client = GrpcMasterClient(args.address, number, "worker", 60)
        keys = [f"client-{number}/{key}" for key in range(KEYS)]
        some = [keys[begin : begin + args.batch] for begin in range(0, KEYS, args.batch)]
        values = [VALUE] * args.batch
        for key in keys if args.operation != "heartbeat" else ():
            client.kv_store_set(key, VALUE)
        operations: dict[str, Operation] = {
            "set": lambda call: client.kv_store_set(keys[call % KEYS], VALUE),
            "get": lambda call: client.kv_store_get(keys[call % KEYS]),
            "multi-set": lambda call: client.kv_store_multi_set(some[call % len(some)], values),
            "multi-get": lambda call: client.kv_store_multi_get(some[call % len(some)]),
            "heartbeat": lambda call: client.report_heart_beat(int(time.time())),
        }
        return operations[args.operation]

    return build


BUILDERS = {"ours": build_ours, "tcpstore": build_tcpstore, "dlrover-0.6.1": build_dlrover}


def serve_store() -> None:
    """torch's TCPStore alone in a process, until standard input ends."""
    import torch.distributed

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(json.dumps({"port": store.port}), flush=True)
    sys.stdin.read()
    os._exit(0)


# Rendezvous: from the last join until everybody has the world.


def rendezvous_dlrover(args: argparse.Namespace) -> dict[str, float]:
    """
    All but one node have joined; then that one joins, and everybody asks for the world until it is there. Its real agents ask every few
    seconds; here nobody pauses.
    """
    from dlrover.python.elastic_agent.master_client import GrpcMasterClient

    name = "elastic-training"
    first = GrpcMasterClient(args.address, 0, "worker", 60)
    first.report_rdzv_params(args.nodes, args.nodes, 600, 1, 600)
    del first
    num_clients = min(args.clients, args.nodes)
    barrier = FORK.Barrier(num_clients + 1)
    results: Any = FORK.SimpleQueue()

    def run(number: int) -> None:
        nodes = range(number, args.nodes, num_clients)
        client = GrpcMasterClient(args.address, number, "worker", 60)
        size_bytes = 0
        stub = client._stub.get

        def get(*call: Any, **options: Any) -> Any:
            nonlocal size_bytes
            answer = stub(*call, **options)
            size_bytes = answer.ByteSize()
            return answer

        client._stub.get = get
        for node in nodes:
            if node != args.nodes - 1:
                client._node_id = node
                client.join_rendezvous(node, 8, name)
        barrier.wait(DEADLINE)
        began_at = time.monotonic()
        if args.nodes - 1 in nodes:
            client._node_id = args.nodes - 1
            client.join_rendezvous(args.nodes - 1, 8, name)
        barrier.wait(DEADLINE)
        for node in nodes:
            while len(client.get_comm_world(name, node)[2]) < args.nodes:
                continue
        results.put((began_at, time.monotonic(), size_bytes))
        time.sleep(DEADLINE)

    for number in range(num_clients):
        FORK.Process(target=run, args=(number,), daemon=True).start()
    barrier.wait(DEADLINE)
    before = cpu_seconds(args.pid)
    barrier.wait(DEADLINE)
    times = [results.get() for _ in range(num_clients)]
    spent = cpu_seconds(args.pid) - before
    began_at = min(began for began, _, _ in times)
    return {
        "seconds": max(ended for _, ended, _ in times) - began_at,
        "cpu": spent,
        "message_bytes": max(size for _, _, size in times),
    }


def rendezvous_c10d(args: argparse.Namespace) -> dict[str, float]:
    """A process for each node, with torch's own handler; the store lives in ours."""
    import torch.distributed
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, results = store.port, FORK.SimpleQueue()

    def run(number: int, may_join: Any) -> None:
        own = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=DEADLINE)
        )
        handler = DynamicRendezvousHandler.from_backend(
            "bench", own, C10dRendezvousBackend(own, "bench"), args.nodes, args.nodes, "127.0.0.1"
        )
        if may_join is not None:
            may_join.wait(DEADLINE)
        began_at = time.monotonic()
        handler.next_rendezvous()
        results.put((began_at, time.monotonic()))
        time.sleep(DEADLINE)

    last = FORK.Event()
    for number in range(args.nodes):
        may_join = last if number == args.nodes - 1 else None
        FORK.Process(target=run, args=(number, may_join), daemon=True).start()
    watcher = C10dRendezvousBackend(store, "bench")
    end_at = time.monotonic() + DEADLINE
    while num_participants(watcher.get_state()) < args.nodes - 1:
        if time.monotonic() > end_at:
            raise TimeoutError(f"{args.nodes - 1} nodes did not join within {DEADLINE:g} s")
        time.sleep(0.05)  # nothing tells when torch's state changes
    last.set()
    times = [results.get() for _ in range(args.nodes)]
    return {"seconds": max(ended for _, ended in times) - max(began for began, _ in times)}


def num_participants(state: tuple[bytes, Any] | None) -> int:
    """torch keeps its state as a pickle; this one is our own."""
    return 0 if state is None else len(pickle.loads(state[0]).participants)


if __name__ == "__main__":
    main()
