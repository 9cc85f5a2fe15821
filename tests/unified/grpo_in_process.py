"""The example of reinforcement learning in one process, without a cluster: the trainer's script, two rollouts in threads, a reward and a stream."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from dlrover.unified.runtime.current import Current, enter
from dlrover.unified.runtime.stream_server import StreamServer
from dlrover.unified.runtime.wire import CallHeader, Parts
from examples.grpo.reward import Reward
from examples.grpo.rollout import Rollout
from tests.unified.loopback import LoopbackWire

POLICY = Path(__file__).parents[2] / "examples" / "grpo" / "policy.py"


class OneProcess(LoopbackWire):
    """The trainer serves its weights to the rollouts beside it."""

    def __init__(self) -> None:
        super().__init__({"samples": [StreamServer(batch=16, lease=30.0)], "reward": [Reward()], "policy": [object()]})
        self._own: Future[Callable[[CallHeader, Parts], Parts]] = Future()

    def serve(self, answer: Callable[[CallHeader, Parts], Parts]) -> None:
        self._own.set_result(answer)

    def call(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Future[Parts]:
        if role == "policy":
            return self._threads.submit(lambda: self._own.result(120)(header, parts))
        return super().call(role, rank, header, parts)


def main(folder: str, num_steps: str, stale: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # alone in its world, so no other has to know the port
    config = pickle.dumps({"stale": int(stale)})
    enter(
        Current(job="grpo", job_uid="uid", role="policy", rank=0, world_size=1, config_data=config, wire=OneProcess())
    )
    for _ in range(2):
        threading.Thread(target=lambda: Rollout().run(), daemon=True).start()
    sys.argv = [str(POLICY), "--steps", num_steps, "--dir", folder]
    runpy.run_path(str(POLICY), run_name="__main__")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)  # threads of rollouts wait for tasks
