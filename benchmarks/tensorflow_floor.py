"""
The least that the loss of a parameter server can cost: fork, listen, build, restore, step, with nobody who decides anything.

A process that has imported TensorFlow forks servers, a chief and workers of the same model as the measured job. After a kill it ends them all and forks
the next ones, which restore the last checkpoint. No master, no agent, no journal, no books: what is left is TensorFlow.

    with Floor(directory) as floor:
        floor.kill_server()     # forks the next version

`CoordinatedFloor` does the same with a coordinator: what trains is the chief alone, workers serve. `OriginalFlow` is no floor: there the server comes back at its
former address, and TensorFlow recovers by itself in chief and workers, as in the original.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from dlrover.host.lifeline import follow_parent

REPOSITORY = Path(__file__).resolve().parents[1]
JOB = REPOSITORY / "tests" / "tensorflow" / "job"
NUM_SERVERS, NUM_WORKERS = 2, 2
PATIENCE = 300.0
SAVE_STEPS = 20


class Floor:
    """Imports what its children need, and starts nothing of TensorFlow: forks need a process without threads."""

    prefix = "COUNTING"
    """Of the variables that its model reads."""

    def __init__(self, directory: Path) -> None:
        import dlrover.trainer.tensorflow.process  # noqa: F401  as the zygote of the measured job

        gc.collect()
        gc.freeze()  # or each child would copy what it only looks at
        self.directory = directory
        self.version = 0
        self._servers: list[int] = []
        self._others: list[int] = []

    def __enter__(self) -> Floor:
        self._fork_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def kill_server(self) -> float:
        """When it was killed. All others are ended and the next version is forked."""
        return self._lose(self._servers[0])

    def _lose(self, pid: int) -> float:
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        self._end_all()
        self._fork_all()
        return at

    def _fork_all(self) -> None:
        self.version += 1
        self._servers, addresses = self._fork_servers("ps", NUM_SERVERS)
        self._fork_others(addresses)

    def _fork_servers(self, kind: str, count: int) -> tuple[list[int], tuple[str, ...]]:
        """Their pids and addresses."""
        pipes = [os.pipe() for _ in range(count)]
        pids = [
            self._fork(kind, rank, lambda w=writer, r=rank: _serve(kind, r, w))
            for rank, (_, writer) in enumerate(pipes)
        ]
        addresses = tuple(os.read(reader, 256).decode() for reader, _ in pipes)
        for ends in pipes:
            for end in ends:
                os.close(end)
        return pids, addresses

    def _fork_others(self, addresses: tuple[str, ...]) -> None:
        is_restored = self.directory / f"restored-{self.version}"
        names = [("chief", 0), *(("worker", rank) for rank in range(NUM_WORKERS))]
        self._others = [
            self._fork(kind, rank, lambda k=kind, r=rank: _train(k, r, addresses, self.directory, is_restored))
            for kind, rank in names
        ]

    def _fork(self, kind: str, rank: int, run: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            follow_parent(signal.SIGKILL)
            os.setsid()  # as our workers: the kernel shares processors among sessions first
            os.environ.update(
                {
                    f"{self.prefix}_DIR": str(self.directory),
                    "DLROVER_TASK_TYPE": kind,
                    "DLROVER_TASK_RANK": str(rank),
                    "DLROVER_CLUSTER_VERSION": str(self.version),
                }
            )
            with open(self.directory / f"{kind}-{rank}.log", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            run()
        finally:
            os._exit(0)

    def _end_all(self) -> None:
        for pid in (*self._servers, *self._others):
            os.kill(pid, signal.SIGKILL)
        for pid in (*self._servers, *self._others):
            os.waitpid(pid, 0)
        self._servers, self._others = [], []


class CoordinatedFloor(Floor):
    prefix = "COORDINATED"

    def kill_chief(self) -> float:
        """The same, with the process that runs the program."""
        return self._lose(self._chief)

    def _fork_others(self, addresses: tuple[str, ...]) -> None:
        workers, places = self._fork_servers("worker", NUM_WORKERS)
        self._chief = self._fork("chief", 0, lambda: _coordinate(addresses, places, self.directory))
        self._others = [*workers, self._chief]


class OriginalFlow(Floor):
    """Chief and workers live on. Its server is forked at once, where a pod would have to be made and to import TensorFlow."""

    def kill_server(self) -> float:
        at = time.time()
        os.kill(self._servers[0], signal.SIGKILL)
        os.waitpid(self._servers[0], 0)
        reader, writer = os.pipe()
        port = int(self._addresses[0].rpartition(":")[2])
        self._servers[0] = self._fork("ps", 0, lambda: _serve("ps", 0, writer, port))
        os.read(reader, 256)
        os.close(reader)
        os.close(writer)
        return at

    def begin_anew(self) -> None:
        """With fresh processes everywhere, for one that did not recover."""
        self._end_all()
        self._fork_all()

    def _fork_others(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        names = [("chief", 0), *(("worker", rank) for rank in range(NUM_WORKERS))]
        self._others = [
            self._fork(kind, rank, lambda k=kind, r=rank: _train_alone(k, r, addresses, self.directory))
            for kind, rank in names
        ]


def _serve(kind: str, rank: int, writer: int, port: int = 0) -> None:
    from dlrover.trainer.tensorflow.server import TaskServer

    server = TaskServer(kind, rank, "127.0.0.1", port)
    os.write(writer, server.address.encode())
    server.serve()


def _train(kind: str, rank: int, servers: tuple[str, ...], directory: Path, is_restored: Path) -> None:
    """As the measured job does it, with a file in place of the master's word that the model is restored."""
    import tensorflow as tf

    from dlrover.trainer.tensorflow.config import VARIABLE, task_config
    from dlrover.trainer.tensorflow.graph.scaffold import WaitingScaffold
    from dlrover.trainer.tensorflow.graph.session import session_config
    from dlrover.trainer.tensorflow.server import TaskServer

    sys.path.insert(0, str(JOB))
    import counting_conf

    v1 = tf.compat.v1
    server = TaskServer(kind, rank, "127.0.0.1")
    os.environ[VARIABLE] = task_config(kind, rank, servers, own_address=server.address, target=server.target).to_text()
    config = tf.estimator.RunConfig(
        model_dir=str(directory / "model"),
        session_config=session_config(kind, rank, server.address, servers),
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
    )

    class Tell(v1.train.SessionRunHook):  # type: ignore[misc]
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.session = session
            is_restored.touch()

        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs(v1.train.get_global_step())

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if int(run_values.results) % SAVE_STEPS == 0:
                [saver] = v1.get_collection(v1.GraphKeys.SAVERS)
                saver.save(self.session, str(directory / "model" / "model.ckpt"), global_step=int(run_values.results))

    def wait() -> None:
        end_at = time.monotonic() + PATIENCE
        while kind == "worker" and not is_restored.exists() and time.monotonic() < end_at:
            time.sleep(0.002)  # the measured job has no such wait: this is the floor's favour to itself

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        spec = counting_conf.model_fn(features, labels, mode, {}, config)
        hooks = [counting_conf.Steps(), *([Tell()] if kind == "chief" else [])]
        return spec._replace(training_hooks=hooks, scaffold=WaitingScaffold(wait, lambda: os._exit(0)))

    tf.estimator.Estimator(model_fn, config=config).train(_numbers)


def _numbers() -> Any:
    import counting_conf
    import tensorflow as tf

    rows = tf.data.Dataset.range(counting_conf.NUM_RECORDS).repeat().batch(10)
    ids = tf.compat.v1.data.make_one_shot_iterator(rows).get_next()
    return {"id": ids}, tf.ones_like(ids)


def _train_alone(kind: str, rank: int, servers: tuple[str, ...], directory: Path) -> None:
    """TensorFlow's own saves, restores and waits: the small cluster of the original, and nothing that hears of a loss."""
    import tensorflow as tf

    from dlrover.trainer.tensorflow.config import VARIABLE, task_config
    from dlrover.trainer.tensorflow.graph.session import session_config
    from dlrover.trainer.tensorflow.server import TaskServer

    sys.path.insert(0, str(JOB))
    import counting_conf

    server = TaskServer(kind, rank, "127.0.0.1")
    os.environ[VARIABLE] = task_config(kind, rank, servers, own_address=server.address, target=server.target).to_text()
    config = tf.estimator.RunConfig(
        model_dir=str(directory / "model"),
        session_config=session_config(kind, rank, server.address, servers),
        save_checkpoints_steps=SAVE_STEPS,
    )

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
        spec = counting_conf.model_fn(features, labels, mode, {}, config)
        return spec._replace(training_hooks=[counting_conf.Steps()])

    tf.estimator.Estimator(model_fn, config=config).train(_numbers)


def _coordinate(servers: tuple[str, ...], workers: tuple[str, ...], directory: Path) -> None:
    """As the measured job does it, without its data books: batches are numbers that nobody counts."""
    import tensorflow as tf

    sys.path.insert(0, str(JOB))
    import coordinated_conf
    import paced_reader

    with socket.socket() as probe:
        probe.bind(("", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    cluster = tf.train.ClusterSpec({"chief": [own], "ps": list(servers), "worker": list(workers)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=len(servers))
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        program = coordinated_conf.build(None)
        steps = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(global_step=steps, **program.objects)
    manager = tf.train.CheckpointManager(checkpoint, str(directory / "model"), max_to_keep=5)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()

    @tf.function
    def run_batch(ids: Any) -> Any:
        result = strategy.run(program.train_step, args=({"id": ids}, tf.ones_like(ids)))
        with tf.control_dependencies([result]):
            return steps.assign_add(1, read_value=True)

    under_way: deque[Any] = deque()
    trained = open(directory / "trained-chief-0.txt", "a", buffering=1)  # noqa: SIM115  to the end of this process

    def settle(left: int) -> int:
        step = 0
        while len(under_way) > left:
            step = int(under_way.popleft().fetch())
            trained.write(f"{time.time():.4f} {os.environ['DLROVER_CLUSTER_VERSION']} {step}\n")
        return step

    saved = int(steps)
    while True:
        for _ in range(2):  # a shard of the measured job
            under_way.append(coordinator.schedule(run_batch, args=(tf.range(10, dtype=tf.int64),)))
            step = settle(2 * len(workers))
        if step - saved >= SAVE_STEPS:
            saved = settle(0)
            manager.save(checkpoint_number=saved)
        time.sleep(paced_reader.PACE)
