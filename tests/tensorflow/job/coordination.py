"""
One chief of a coordinator and its servers in one process, without a master: what it tells is printed as JSON.

For a test: servers of one process share their threads, so TF_NUM_INTEROP_THREADS has to be larger than the number of tasks.
"""

import json
import os
import sys
from types import SimpleNamespace

import tensorflow as tf

from dlrover.protocol.messages.cluster import ClusterPhase, CutTaken, ModelSaved, ProcessParked, TakeCut, VersionView
from dlrover.trainer.tensorflow.conf import load_conf
from dlrover.trainer.tensorflow.coordinator import training
from dlrover.trainer.tensorflow.link import VersionOver
from dlrover.trainer.tensorflow.server import TaskServer

PARK_AT = int(os.environ.get("COORDINATED_PARK_AT", "0"))
"""After so many steps are saved the version parks, saves, and is over."""


class PlayedLink:
    """A master that agrees to everything."""

    where = SimpleNamespace(task_type="chief", task_rank=0, node_host="127.0.0.1", cluster_version=1, round=1)

    def __init__(self, servers, workers):
        self.told = []
        self.num_cuts = 0
        self.view = VersionView(
            number=1,
            version=1,
            phase=ClusterPhase.RESTORING,
            servers=tuple(server.address for server in servers),
            workers={rank: worker.address for rank, worker in enumerate(workers)},
            num_wanted_workers=len(workers),
        )

    def start(self):
        pass

    def wait_for(self, is_met, timeout=None):
        if self.view.version > 1:
            raise VersionOver("over")
        assert is_met(self.view), self.view
        return self.view

    def tell(self, command):
        self.told.append([type(command).__name__, getattr(command, "step", None)])
        if isinstance(command, TakeCut):
            self.num_cuts += 1
            return CutTaken(cut=self.num_cuts - 1, data_state="{}")
        if isinstance(command, ProcessParked):
            self._become(ClusterPhase.SAVING, 1)
        elif isinstance(command, ModelSaved) and self.view.phase is ClusterPhase.SAVING:
            self._become(ClusterPhase.GATHERING, 2)
        elif isinstance(command, ModelSaved) and PARK_AT and command.step >= PARK_AT:
            self._become(ClusterPhase.PARKING, 1)
        return None

    def _become(self, phase, version):
        fields = {name: getattr(self.view, name) for name in self.view.__struct_fields__}
        self.view = VersionView(**{**fields, "phase": phase, "version": version, "num_parks": 1})


servers = [TaskServer("ps", rank, "127.0.0.1") for rank in range(2)]
workers = [TaskServer("worker", rank, "127.0.0.1") for rank in range(2)]
link = PlayedLink(servers, workers)
conf = load_conf(os.environ.get("COORDINATED_CONF", "coordinated_conf.Conf"))
try:
    training.train(conf, link)
except VersionOver:
    link.told.append(["over", None])
checkpoint = tf.train.load_checkpoint(tf.train.latest_checkpoint(conf.model_dir))
values = {
    name: checkpoint.get_tensor(name) for name in checkpoint.get_variable_to_shape_map() if name.endswith("_VALUE")
}
found = {name: value.tolist() for name, value in values.items() if value.size < 10_000}
print(json.dumps({"told": link.told, "seen": found.get("seen/.ATTRIBUTES/VARIABLE_VALUE"), "values": found}))
sys.stdout.flush()
os._exit(0)  # servers have no other end
