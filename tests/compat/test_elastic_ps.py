"""`ElasticPsClient` of the original against a job with a cluster: it may read all and write what it likes; the master alone directs (decision 68)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.compat.client.master_client import MasterClient
from dlrover.compat.tensorflow.elastic_ps import ElasticPsClient
from dlrover.core.outcome import NotYet
from dlrover.protocol.messages.cluster import AskCluster, ClusterPhase, ModelRestored, ServerBound, VersionView
from dlrover.protocol.messages.fleet import AskClusterVersion, AskPsNodes, PsReady, Strategy, UpdateClusterVersion
from dlrover.protocol.messages.job import Reply, Run
from dlrover.trainer.agent_link import WorkerRequest
from tests.core.fleet.fleet_scene import FleetScene, ps_job
from tests.core.scene import terms

CHIEF = "n2"


class SceneLink:
    """Hands what a worker asks to the job in this process."""

    def __init__(self, scene: FleetScene) -> None:
        self._scene = scene

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        if isinstance(request, UpdateClusterVersion | PsReady):
            return self._scene.do(request).reply
        assert isinstance(request, AskClusterVersion | AskPsNodes), request
        answer = self._scene.job.ask(request)
        assert not isinstance(answer, NotYet), answer
        return answer


@pytest.fixture
def scene() -> FleetScene:
    """Two servers, a chief and a worker, all attached."""
    scene = FleetScene(replace(terms(1), strategy=Strategy.PS))
    scene.begin(ps_job(num_workers=2, num_ps=2)).run()
    for node in tuple(scene.cloud):
        scene.attach(f"n{node}")
    return scene


def client_of(scene: FleetScene, task_type: str, task_id: int) -> ElasticPsClient:
    return ElasticPsClient(task_type, task_id, MasterClient(link=SceneLink(scene)))


def train(scene: FleetScene) -> None:
    for name, agent in scene.agents.items():
        if isinstance(scene.wish(name), Run):
            bound = ServerBound(address=f"{name}:1", round=scene.world(name).round)
            scene.send(name, replace(bound, node=agent.node, incarnation=agent.incarnation))
    agent = scene.agents[CHIEF]
    restored = ModelRestored(step=5, node=agent.node, incarnation=agent.incarnation, round=scene.world(CHIEF).round)
    scene.send(CHIEF, restored)


def view(scene: FleetScene) -> VersionView:
    answer = scene.job.ask(AskCluster())
    assert isinstance(answer, VersionView)
    return answer


def test_the_handshake_of_the_original_is_answered_at_once(scene: FleetScene) -> None:
    """A server sets its local version, the first one the global one; everybody waits until that is not 0 (spec 09 §9)."""
    for task_type, task_id in (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)):
        client = client_of(scene, task_type, task_id)
        assert client.get_local_cluster_version() == 0
        client.update_local_cluster_version(1)
        assert client.get_local_cluster_version() == 1
        assert client.get_global_cluster_version() == 1, "the master has set it already"


def test_the_local_version_is_what_was_told_and_each_task_has_its_own(scene: FleetScene) -> None:
    first, second = client_of(scene, "worker", 0), client_of(scene, "worker", 1)
    first.update_local_cluster_version(7)
    first.update_local_cluster_version(3)
    assert (first.get_local_cluster_version(), second.get_local_cluster_version()) == (3, 0)


def test_global_and_restored_version_are_maxima_that_direct_nothing(scene: FleetScene) -> None:
    client = client_of(scene, "worker", 1)
    assert client.get_restored_cluster_version() == 0
    train(scene)
    assert client.get_restored_cluster_version() == 1, "the chief has restored version 1"
    before = view(scene)
    for told, global_version, restored in ((9, 9, 9), (4, 9, 9), (12, 12, 12)):
        client.update_global_cluster_version(told)
        client.update_restored_cluster_version(told)
        assert client.get_global_cluster_version() == global_version
        assert client.get_restored_cluster_version() == restored
    assert view(scene) == before, "a script began another version"
    assert (before.version, before.phase) == (1, ClusterPhase.TRAINING)


def test_a_script_that_says_it_is_ready_lets_no_server_go(scene: FleetScene) -> None:
    client = client_of(scene, "worker", 0)
    train(scene)
    before, cloud = view(scene), tuple(scene.cloud)
    client.ready_for_ps_relaunch()
    assert (view(scene), tuple(scene.cloud)) == (before, cloud)
    nodes, has_failure = client.get_all_ps_nodes()
    assert [node.rank for node in nodes] == [0, 1]
    assert not has_failure
