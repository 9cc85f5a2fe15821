"""A script of the original that speaks to the master itself: keys, tasks, sync points, events. Rank 1 dies once."""

import json
import os
import sys
import time

from dlrover.python.common.constants import NodeEnv, NodeType, RendezvousName
from dlrover.python.common.log import default_logger as logger
from dlrover.python.elastic_agent.master_client import MasterClient
from dlrover.python.elastic_agent.monitor.resource import ResourceMonitor

folder = sys.argv[1]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
client = MasterClient.singleton_instance()
ResourceMonitor.singleton_instance().start()
logger.info("rank %d uses %s", rank, NodeEnv.DLROVER_MASTER_ADDR)


def wait_for(is_reached):
    while not is_reached():
        time.sleep(0.01)


def meet(name):
    """All ranks, by the sync points of the control plane."""
    assert client.join_sync(name)
    wait_for(lambda: client.sync_finished(name))


client.kv_store_add("lives", 1)  # of the whole job: it outlives the restart
client.report_dataset_shard_params(
    batch_size=4, num_epochs=1, dataset_size=64, num_minibatches_per_shard=2, dataset_name="numbers", task_type=1
)
meet("registered")
if life == 0 and rank == 1:
    is_there, task = client.get_task("numbers")  # goes back when this worker is gone
    assert is_there
    assert task.shard.end == task.shard.start + 8
    client.report_event("warn", "worker-1", "script-dies", "rank 1 dies now", {"life": "0"})
    sys.exit(3)

num_read = 0
while True:
    is_there, task = client.get_task("numbers")
    assert is_there
    if task.type == 4:  # others hold the rest
        time.sleep(0.05)
        continue
    if task.task_id < 0:
        break
    num_read += task.shard.end - task.shard.start
    with open(f"{folder}/read-{rank}", "a") as file:
        file.write(f"{task.shard.start} {task.shard.end}\n")
    assert client.report_task_result("numbers", task.task_id, "").success
    client.report_global_step(num_read, int(time.time()))
meet("read")
if rank == 0:
    client.barrier("written", notify=True)
wait_for(lambda: client.barrier("written"))
wait_for(lambda: client.sync_checkpoint(100))
round_, group, world = client.get_comm_world(RendezvousName.TRAINING, 0)
nodes = client.get_running_nodes()
result = {
    "lives": int(client.kv_store_get("lives")),
    "world": [round_, group, world],
    "nodes": [[node.type == NodeType.WORKER, node.rank, node.status] for node in nodes],
    "port": client.sync_training_ports(64000 + 16 * rank).port,
    "waiting": client.num_nodes_waiting(RendezvousName.TRAINING),
    "status": client.query_training_status(),
    "has_grpc": "grpc" in sys.modules,
}
with open(f"{folder}/result-{rank}.json", "w") as file:
    json.dump(result, file)
meet("end")
