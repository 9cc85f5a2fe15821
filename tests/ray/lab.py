"""A real Ray cluster on this machine: a head, raylets that come and go, and a look at everything that a job may leave."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from dlrover.platforms.ray import store

DEADLINE = 120.0
STORE_BYTES = 80 << 20
"""Ray's smallest object store."""
RECOMMENDED = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""What our how-to recommends for the head."""
MARK = "DLROVER_TEST_LAB"
"""A variable of all processes of a cluster, and of what they start."""
RAYS_OWN = ("ray::IDLE", "ray::SPILL", "ray::RESTORE", "ray::Dashboard", "ray::RuntimeEnv", "ray-dashboard")
"""Titles of Ray's own processes that are no actor. The others name a file of the package."""


class RayLab:
    def __init__(
        self, directory: str, *, head_cpus: int = 0, settings: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """`more`: further parameters of the head."""
        self.directory = directory
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        # Ray's 15 would give the roles of a test a thirtieth of what any other program of a busy machine has.
        os.environ.setdefault("RAY_worker_niceness", "0")
        head = {
            "num_cpus": head_cpus,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": directory,
            **({"_system_config": settings} if settings else {}),
            **more,
        }
        make_address_directory()
        self._noted: set[psutil.Process] = set()
        with self._marking():
            self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self.cluster.address
        self.connect()
        self.machines: list[Any] = []

    def connect(self) -> None:
        ray.init(address=self.address, namespace="tests", log_to_driver=False, configure_logging=False)

    def add_machine(self, num_cpus: int = 1, **more: Any) -> Any:
        with self._marking():
            machine = patiently(
                lambda: self.cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES, **more)
            )
        self.machines.append(machine)
        return machine

    def remove_machine(self, machine: Any) -> None:
        self.machines.remove(machine)
        self.cluster.remove_node(machine, allow_graceful=False)

    def drain(self, machine: Any, *, seconds: float) -> None:
        """As a cloud's preemption notice: the machine goes at the deadline."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        deadline_ms = int((time.time() + seconds) * 1000)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why_not = GcsClient(address=self.address).drain_node(machine.node_id, reason, "test", deadline_ms)
        assert is_accepted, why_not

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()

    def raylet(self, machine: Any) -> int:
        """The pid of a machine's raylet."""
        [process] = machine.all_processes["raylet"]
        return int(process.process.pid)

    def actors(self, job_uid: str = "") -> list[str]:
        """Names of living actors of our jobs."""
        found = ray.util.list_named_actors(all_namespaces=True)
        wanted = f"dlrover/{job_uid}"
        return sorted(
            f"{each['namespace']}:{each['name']}"
            for each in found
            if each["namespace"].startswith(wanted) and "driver" not in each["namespace"]
        )

    def keys(self) -> list[str]:
        return store.keys("")

    def placement_groups(self) -> list[str]:
        return [key for key, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"]

    def note(self, pids: Iterable[int]) -> None:
        """Processes of a job that live: none of them may outlive it."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._noted.add(psutil.Process(pid))

    def leftovers(self, *needles: str) -> list[str]:
        """
        Whatever a job has left in the cluster or on this machine.

        That is any process but Ray's own that came from the cluster, whatever it is called; also those that were noted, and those with one of the
        `needles` in their command lines.
        """
        in_cluster = [*self.actors(), *self.keys(), *self.placement_groups()]
        return in_cluster + sorted({*self._noted_that_live(), *self.processes(), *processes_with(*needles)})

    def processes(self) -> list[str]:
        """Those of this cluster that are not Ray's own: actors, and all that is below them or was left by them."""
        marks = (f"{MARK}={self.directory}\0".encode(), os.path.join(self.directory, ""))
        return [f"{pid}: {command}" for pid, command in living_processes() if _is_left(pid, command, *marks)]

    def _noted_that_live(self) -> list[str]:
        found = []
        for process in list(self._noted):
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
                    continue
            except psutil.NoSuchProcess:
                pass
            self._noted.discard(process)
        return found

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        """Only while processes of the cluster start: what the test itself starts bears no mark."""
        os.environ[MARK] = self.directory
        try:
            yield
        finally:
            del os.environ[MARK]

    def await_nothing_left(self, *needles: str) -> None:
        until(lambda: not self.leftovers(*needles), lambda: f"left behind: {self.leftovers(*needles)}")


def make_address_directory() -> None:
    """Ray writes the address of a new cluster into its default directory, and fails on a machine where that is missing."""
    parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    os.makedirs(os.path.join(parent, "ray"), exist_ok=True)


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a raylet 30 s for its start, whatever else the machine does."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_with(*needles: str) -> list[str]:
    """Command lines of living processes that contain one of the words, but for those of this test."""
    return [f"{pid}: {command}" for pid, command in living_processes() if any(needle in command for needle in needles)]


def living_processes() -> Iterator[tuple[int, str]]:
    """Pid and command line of all on this machine but this one."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in ("Z", "X"):
                yield int(name), command.strip()


def _is_left(pid: int, command: str, mark: bytes, directory: str) -> bool:
    """By its environment; or, as an actor writes its title over that, by where its output goes."""
    if _is_rays_own(command):
        return False
    if " from multiprocessing." in command:  # what Python itself starts beside the processes of the dashboard
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid).parent()
            if parent is not None and _is_rays_own(" ".join(parent.cmdline())):
                return False
    with contextlib.suppress(OSError):
        if mark in Path(f"/proc/{pid}/environ").read_bytes():
            return True
        return os.readlink(f"/proc/{pid}/fd/1").startswith(directory)
    return False


def until(condition: Callable[[], Any], explain: Callable[[], str] = lambda: "", *, deadline: float = DEADLINE) -> Any:
    """For what only a look from outside can tell. Gives what the condition gave."""
    end = time.monotonic() + deadline
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:.0f} s: {explain()}")
        time.sleep(0.02)
    return found


def _is_rays_own(command: str) -> bool:
    return command.startswith(RAYS_OWN) or os.path.dirname(ray.__file__) in command
