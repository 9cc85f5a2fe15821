"""Records for the coordinator, at a pace that a test can follow. Whoever reads is the chief."""

import os
import time

from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader

DIRECTORY = os.environ["COORDINATED_DIR"]
NUM_RECORDS = int(os.environ.get("COORDINATED_RECORDS", "2000"))
PACE = float(os.environ.get("COORDINATED_PACE", "0"))


def hold(where):
    """Say that this process is here, and stay as long as the test wants it to."""
    open(os.path.join(DIRECTORY, f"reached-{where}"), "w").close()
    while os.path.exists(os.path.join(DIRECTORY, f"hold-{where}")):
        time.sleep(0.02)


class NotedClient:
    """The client of a dataset. Writes down when which step was trained, as far as the chief knows."""

    def __init__(self, client):
        self._client = client
        self._file = open(os.path.join(DIRECTORY, "trained-chief-0.txt"), "a", buffering=1)  # noqa: SIM115

    def report_batch_done(self, count, *, step):
        self._file.write(f"{time.time():.4f} {os.environ['DLROVER_CLUSTER_VERSION']} {step}\n")
        self._client.report_batch_done(count, step=step)

    def __getattr__(self, name):
        return getattr(self._client, name)


class PacedReader(ElasticReader):
    """Writes down when which records are read. `before`: called before the first ones of a process, when the model is restored."""

    def __init__(self, name, record, before=None):
        super().__init__(name)
        self._record, self._before = record, before

    def count_data(self):
        self._data_nums = NUM_RECORDS

    def build_data_shard_client(self):
        return NotedClient(super().build_data_shard_client())

    def read_data_by_index_range(self, start_index, end_index):
        if self._before is not None:
            self._before()
            self._before = None
        with open(os.path.join(DIRECTORY, "steps-chief-0.txt"), "a") as file:
            file.write(f"{time.time():.4f} {os.environ['DLROVER_CLUSTER_VERSION']} {start_index}\n")
        hold("stepping")
        if not os.path.exists(os.path.join(DIRECTORY, "hurry")):  # the test has seen what it came for
            time.sleep(PACE)
        return (self._record(number) for number in range(start_index, end_index))
