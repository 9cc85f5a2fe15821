"""`MasterClient` of the original: over a real agent's socket and a real master, alone, and with an address but no agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from dlrover.agent.monitor.old_diagnosis_data import TrainingLog
from dlrover.compat.client import comm
from dlrover.compat.client.diagnosis import CollectorType, DiagnosisMonitor
from dlrover.compat.client.local_dataset import LocalDataset
from dlrover.compat.client.master_client import (
    GlobalMasterClient,
    LocalMasterClient,
    MasterClient,
    build_master_client,
)
from dlrover.compat.client.resource_monitor import ResourceMonitor
from dlrover.compat.names.constants import NodeStatus, TrainingExceptionLevel
from dlrover.master.diagnosis.old_actions import EventAction, JobAbortionAction, JobRestartAction, NoAction
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.data import TaskType
from dlrover.protocol.messages.goodput import AskEvents, Events, JobEvent
from dlrover.protocol.messages.job import AskStatus, JobStatus, Query, Reply
from dlrover.trainer.stand_in import StandIn
from tests.trainer.torch.store_lab import StoreLab

_names = count()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path_factory.mktemp("lab"), num_workers=2)
    yield lab
    lab.close()


@pytest.fixture
def client(lab: StoreLab) -> MasterClient:
    return MasterClient(link=lab.link())


@pytest.fixture
def alone() -> LocalMasterClient:
    return LocalMasterClient(3)


@pytest.fixture(params=["master", "alone"])
def either(request: pytest.FixtureRequest) -> MasterClient:
    found: MasterClient = request.getfixturevalue("client" if request.param == "master" else "alone")
    return found


@pytest.fixture
def name() -> str:
    """Of something that no other test uses: the store and the books are shared."""
    return f"test-{next(_names)}"


def ask(lab: StoreLab, question: Query) -> Reply:
    return lab.run(lab._channel.call(question, timeout=30))


def event_named(lab: StoreLab, wanted: str) -> JobEvent:
    """Observations come on the stream before the next question."""
    reply = ask(lab, AskEvents())
    assert isinstance(reply, Events)
    return next(event for event in reply.events if event.name == wanted)


def until(is_reached: Callable[[], bool]) -> None:
    end_at = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < end_at, "not within 60 s"
        time.sleep(0.01)


def register(client: MasterClient, dataset: str, **options: object) -> comm.Response:
    cut = {"batch_size": 10, "num_epochs": 1, "dataset_size": 100, "num_minibatches_per_shard": 3, "task_type": 1}
    return client.report_dataset_shard_params(dataset_name=dataset, **{**cut, **options})  # type: ignore[arg-type]


class TestStore:
    def test_values_are_set_read_added_to_and_read_together(self, either: MasterClient, name: str) -> None:
        assert either.kv_store_set(f"{name}/a", b"\x00\xff")
        assert either.kv_store_get(f"{name}/a") == b"\x00\xff"
        assert either.kv_store_get(f"{name}/none") == b""
        assert (either.kv_store_add(f"{name}/n", 2), either.kv_store_add(f"{name}/n", 40)) == (2, 42)
        assert int(either.kv_store_get(f"{name}/n")) == 42
        assert either.kv_store_multi_get([f"{name}/a", f"{name}/n"]) == {f"{name}/a": b"\x00\xff", f"{name}/n": b"42"}
        assert either.kv_store_multi_get([f"{name}/a", f"{name}/none"]) == {}
        assert either.kv_store_multi_get([]) == {}

    def test_many_are_set_at_once_or_none(self, either: MasterClient, name: str) -> None:
        assert either.kv_store_multi_set([f"{name}/b", f"{name}/c"], [b"1", "2", b"surplus"])
        assert either.kv_store_multi_get([f"{name}/b", f"{name}/c"]) == {f"{name}/b": b"1", f"{name}/c": b"2"}
        with pytest.raises(IndexError):
            either.kv_store_multi_set([f"{name}/d", f"{name}/e"], [b"1"])
        assert either.kv_store_get(f"{name}/d") == b""
        with pytest.raises(TypeError, match="a value must be bytes or str, not int"):
            either.kv_store_set(f"{name}/d", 1)  # type: ignore[arg-type]


class TestTasks:
    def test_a_dataset_is_read_task_by_task_to_its_end(self, either: MasterClient, name: str) -> None:
        assert register(either, name).success
        assert (either.get_dataset_epoch(name), either.get_dataset_shard_num(name)) == (0, 4)
        ranges = []
        while (found := either.get_task(name))[1].shard.end > 0:
            is_there, task = found
            assert (is_there, task.type, task.shard.name) == (True, TaskType.TRAINING, name)
            ranges.append((task.shard.start, task.shard.end))
            assert either.report_task_result(name, task.task_id, "").success
        assert ranges == [(0, 30), (30, 60), (60, 90), (90, 100)]
        assert (found[0], found[1].task_id, found[1].type) == (True, -1, TaskType.NONE)
        assert (either.get_dataset_epoch(name), either.get_dataset_shard_num(name)) == (1, 0)

    def test_while_others_hold_the_rest_the_task_says_wait(
        self, lab: StoreLab, client: MasterClient, name: str
    ) -> None:
        register(client, name, dataset_size=30)
        _, task = client.get_task(name)
        waiting = MasterClient(link=lab.link(local_rank=1)).get_task(name)[1]
        assert (waiting.task_id, waiting.type) == (-1, TaskType.WAIT)
        client.report_task_result(name, task.task_id)
        assert client.get_task(name)[1].type == TaskType.NONE

    def test_a_task_that_failed_comes_again(self, either: MasterClient, name: str) -> None:
        register(either, name, dataset_size=30)
        _, task = either.get_task(name)
        response = either.report_task_result(name, task.task_id, "unreadable")
        assert (response.success, response.reason) == (False, "unreadable")
        _, again = either.get_task(name)
        assert (again.shard.start, again.shard.end) == (0, 30)
        assert again.task_id != task.task_id

    def test_a_result_of_nobodys_task_changes_nothing_and_says_so(self, either: MasterClient, name: str) -> None:
        register(either, name)
        response = either.report_task_result(name, 77, "")
        assert not response.success
        assert "does not hold task 77" in response.reason

    def test_a_shard_checkpoint_goes_back_and_a_reset_to_the_beginning(self, either: MasterClient, name: str) -> None:
        register(either, name)
        _, first = either.get_task(name)
        either.report_task_result(name, first.task_id)
        either.get_task(name)
        text = either.get_shard_checkpoint(name)
        told = json.loads(text)
        assert (told["dataset_name"], told["doing"], told["epoch"]) == (name, [[30, 60]], 1)
        assert either.report_shard_checkpoint(text).success
        assert either.get_task(name)[1].shard.start == 30
        either.reset_dataset(name)
        assert either.get_task(name)[1].shard.start == 0
        assert not either.report_shard_checkpoint("{}").success

    def test_a_table_of_maxcompute_is_a_table_of_the_given_size(self, either: MasterClient, name: str) -> None:
        assert register(either, name, storage_type="maxcompute_table", dataset_size=45).success
        assert [either.get_task(name)[1].shard.end for _ in range(2)] == [30, 45]

    def test_a_shuffled_text_names_its_records(self, either: MasterClient, name: str) -> None:
        register(either, name, storage_type="text", shuffle=True, dataset_size=60)
        records = [index for _ in range(2) for index in either.get_task(name)[1].shard.indices]
        assert sorted(records) == list(range(60))
        assert records != sorted(records)

    def test_what_cannot_be_cut_is_refused_with_a_reason(self, either: MasterClient, name: str) -> None:
        assert "storage_type 'tape' is unknown" in register(either, name, storage_type="tape").reason
        assert not register(either, name, dataset_size=-1).success
        assert register(either, name).success
        assert "other parameters" in register(either, name, batch_size=7).reason
        assert either.get_task(f"{name}-unknown") == (True, comm.Task())


class TestJob:
    def test_the_nodes_and_the_world_are_those_of_the_job(self, lab: StoreLab, client: MasterClient) -> None:
        node, _, _ = lab.life
        [running] = client.get_running_nodes()
        assert (running.id, running.rank, running.addr, running.status) == (node, 0, "host", NodeStatus.RUNNING)
        assert client.get_comm_world("elastic-training", 0)[1:] == (0, {0: 2})
        assert client.num_nodes_waiting("elastic-training") == 0
        assert client.check_fault_node(timeout=1) == ([], "")
        assert client.check_straggler(timeout=1) == ([], "")
        assert client.network_check_success()
        assert client.get_pre_check_result() == "DISABLED"

    def test_training_has_started_when_a_task_is_done(self, lab: StoreLab, tmp_path_factory) -> None:
        other = StoreLab(tmp_path_factory.mktemp("fresh"))
        try:
            client = MasterClient(link=other.link())
            assert client.query_training_status() == 3
            register(client, "data")
            _, task = client.get_task("data")
            client.report_task_result("data", task.task_id)
            until(lambda: client.query_training_status() == 1)
        finally:
            other.close()

    def test_sync_points_and_barriers(self, lab: StoreLab, client: MasterClient, name: str) -> None:
        assert not client.sync_finished(name)
        other = MasterClient(link=lab.link(local_rank=1))
        assert client.join_sync(name)
        assert not client.sync_finished(name)
        assert other.join_sync(name)
        assert client.sync_finished(name)
        assert other.sync_finished(name)
        assert not client.barrier(name)
        assert client.barrier(name, notify=True)
        assert client.barrier(name)
        assert other.barrier(name)

    def test_a_job_without_parameter_servers(self, client: MasterClient) -> None:
        assert client.query_ps_nodes() == ([], False)
        client.update_cluster_version("LOCAL", 4, "worker", 0)
        assert client.get_cluster_version("LOCAL", "worker", 0) == 0
        response = client.ready_for_ps_relaunch()
        assert not response.success
        assert "started by hand" in response.reason

    def test_a_blocked_rendezvous_names_its_reason_until_it_is_free(self, lab: StoreLab, client: MasterClient) -> None:
        client.set_rdzv_blocked(True, "the checkpoint is converted")
        status = ask(lab, AskStatus())
        assert isinstance(status, JobStatus)
        assert "the checkpoint is converted" in status.verdict
        client.set_rdzv_blocked(False)
        status = ask(lab, AskStatus())
        assert isinstance(status, JobStatus)
        assert "no longer" in status.verdict


class TestNews:
    def test_an_event_of_a_script_is_an_event_of_the_job(self, lab: StoreLab, client: MasterClient, name: str) -> None:
        client.report_event("warn", "worker-0", name, "the loss explodes", {"loss": "nan"})
        event = event_named(lab, name)
        assert (event.level, event.text, event.node) == ("warn", "the loss explodes", lab.life[0])
        assert event.labels == {"instance": "worker-0", "loss": "nan"}

    def test_a_failure_is_cut_and_told_with_its_level(self, lab: StoreLab, client: MasterClient) -> None:
        client.report_failures("x" * 5000, 2, TrainingExceptionLevel.PROCESS_ERROR)
        event = event_named(lab, "script-failure")
        assert (event.level, len(event.text)) == ("error", 2048)
        assert event.labels == {"level": "process_error", "restart_count": "2"}

    def test_a_node_error_reaches_the_job(self, lab: StoreLab, client: MasterClient) -> None:
        client.report_failures("the disk is gone", level=TrainingExceptionLevel.NODE_ERROR)
        status = ask(lab, AskStatus())
        assert isinstance(status, JobStatus)
        assert "node_error: the disk is gone" in status.verdict

    def test_what_the_agent_does_itself_is_accepted_with_the_reason(
        self, client: MasterClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        for response in (
            client.report_used_resource(1024, 10, [comm.GPUStats(index=0)]),
            client.update_node_addr("ps", 0, "127.0.0.1:1234"),
            client.report_node_event("ADDED", "ADDED"),
            client.report_network_check_status(0, "NODE_CHECK_SUCCEEDED", 10),
            client.report_pre_check_status("WAIT_PRE_CHECK"),
            client.report_failed_exited(),
            client.report_succeeded_exited(),
            client.report_prestop(),
        ):
            assert response.success
            assert "The agent of this node reports this by itself" in response.reason
        assert isinstance(client.report_heart_beat(0), NoAction)
        client.report_used_resource(1, 1)
        assert caplog.text.count("MasterClient.report_used_resource") == 1, "once is enough"

    def test_what_is_not_there_yet_answers_as_without_it_and_says_so(
        self, client: MasterClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        client.report_model_info(comm.ModelInfo())
        assert client.get_paral_config() == comm.ParallelConfig()
        assert client.get_elastic_run_config() == {}
        assert client.need_to_restart_training() is False
        assert client.report_rdzv_params(1, 2, 30, 1, 600) is False
        assert client.join_rendezvous(0, 8, "elastic-training") == 0
        assert "options of `dlrover-run` set" in caplog.text

    def test_monitors_start_nothing_and_report_through_the_client(self, client: MasterClient) -> None:
        ResourceMonitor.singleton_instance().start()
        monitor = DiagnosisMonitor()
        monitor.start()
        assert len(monitor.get_collectors()) == 3
        assert isinstance(monitor.collect_data(CollectorType.TRAININGLOG), TrainingLog)
        assert monitor.collect_data("unknown") is None
        client.report_diagnosis_agent_metrics(TrainingLog(logs=["line"]))
        with pytest.raises(TypeError):
            monitor.report_diagnosis_data("text")  # type: ignore[arg-type]


class TestActions:
    """On a job of their own: they end it."""

    def test_a_script_restarts_all_workers_and_ends_the_job(self, tmp_path_factory) -> None:
        lab = StoreLab(tmp_path_factory.mktemp("directed"))
        try:
            client = MasterClient(link=lab.link())
            client.report_action(EventAction("info", "job", "nothing"))
            assert client.num_nodes_waiting("") == 0
            client.report_action(JobRestartAction("the data have changed"))
            told = ask(lab, AskEvents())
            assert isinstance(told, Events)
            assert any("the data have changed" in event.text for event in told.events)
            until(lambda: lab.where.round == 2)
            client = MasterClient(link=lab.link())
            client.report_action(JobAbortionAction(reason="enough"))
            reply = ask(lab, AskStatus())
            assert isinstance(reply, JobStatus)
            assert reply.end is not None
            assert "enough" in reply.end.message
            until(lambda: client.num_nodes_waiting("") == -1)
        finally:
            lab.close()


class TestAlone:
    def test_the_rendezvous_knows_its_own_join(self, alone: LocalMasterClient) -> None:
        assert alone.get_comm_world("elastic-training", 0) == (0, 0, {})
        assert alone.join_rendezvous(0, 8, "elastic-training") == 0
        assert alone.get_comm_world("elastic-training", 0) == (0, 0, {0: 8})
        assert alone.num_nodes_waiting("elastic-training") == 0
        assert alone.network_check_success()
        assert [node.id for node in alone.get_running_nodes()] == [3]
        assert alone.report_rdzv_params(1, 1, 30, 1, 600)

    def test_reports_succeed_and_say_that_nobody_hears_them(
        self, alone: LocalMasterClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert alone.report_used_resource(1, 1).success
        assert alone.ready_for_ps_relaunch().success
        assert alone.report_global_step(5, 0).success
        assert alone.report_atorch_event(0, "AtorchTrainerV2", "#step", "END", 6).success
        alone.report_failures("bad", 0, TrainingExceptionLevel.NODE_ERROR)
        alone.report_event("info", "job", "an-event", "text")
        alone.report_action(JobAbortionAction("no job"))
        alone.set_rdzv_blocked(True, "why")
        alone.report_diagnosis_training_log(TrainingLog())
        assert caplog.text.count("has no effect outside of `dlrover-run`") == 7
        assert alone.query_ps_nodes() == ([], False)
        assert alone.get_cluster_version("GLOBAL", "worker", 0) == 0

    def test_sync_and_agreements_are_reached_at_once(self, alone: LocalMasterClient, name: str) -> None:
        assert alone.join_sync(name)
        assert alone.sync_finished(name)
        assert alone.sync_checkpoint(100)
        assert alone.sync_training_ports(64000) == comm.SyncTrainingPort(port=64000)

    def test_a_stand_in_refuses_what_only_a_job_can_do(self) -> None:
        client = MasterClient(link=StandIn())
        for act in (
            lambda: client.report_event("info", "job", "an-event", "text"),
            lambda: client.report_action(JobAbortionAction("why")),
            lambda: client.set_rdzv_blocked(True, "why"),
        ):
            with pytest.raises(Rejected, match="runs outside a job"):
                act()
        assert not client.ready_for_ps_relaunch().success

    def test_a_local_dataset_gives_ranges_epoch_by_epoch(self) -> None:
        dataset = LocalDataset(batch_size=2, num_epochs=2, dataset_size=5, num_minibatches_per_shard=2)
        assert dataset.get_current_epoch() == 0
        assert [dataset.get_task() for _ in range(5)] == [(0, 4), (4, 5), (0, 4), (4, 5), (-1, -1)]
        assert dataset.get_current_epoch() == 2
        dataset.reset()
        assert dataset.get_task() == (0, 4)
        with pytest.raises(ValueError, match="must be at least 1"):
            LocalDataset(2, 1, 5, False, 0)

    def test_the_process_has_one_client(self) -> None:
        code = """if True:
            from dlrover.python.elastic_agent.master_client import GlobalMasterClient, MasterClient, build_master_client
            client = MasterClient.singleton_instance()
            print(type(client).__name__, client is MasterClient.singleton_instance(), client is build_master_client())
            print(GlobalMasterClient.MASTER_CLIENT is client, client._timeout)
        """
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "MASTER_CLIENT_TIMEOUT": "7"},
        )
        assert done.stdout.splitlines() == ["LocalMasterClient True False", "True 7"]


class TestWithoutAgent:
    def test_an_address_without_an_agent_is_said_and_never_answered_by_a_stand_in(self, name: str) -> None:
        client = build_master_client("10.0.0.1:50001", 1)
        with pytest.raises(Unavailable, match=r"outside a job, so it cannot reach the master at 10\.0\.0\.1:50001"):
            client.kv_store_set(name, b"1")
        assert client.get_task(name) == (False, comm.Task())
        assert client.num_nodes_waiting("") == 0
        assert client.need_to_restart_training() is False

    def test_the_global_client_is_of_the_class(self) -> None:
        assert isinstance(GlobalMasterClient.MASTER_CLIENT, MasterClient)


def test_ports_are_agreed_on_from_the_greatest_on(lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of a world, one after the other; the round is that of the whole job here."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    nodes = [MasterClient(link=lab.link()) for _ in range(2)]

    def say(node: int, port: int) -> comm.SyncTrainingPort:
        monkeypatch.setenv("GROUP_RANK", str(node))
        return nodes[node].sync_training_ports(port)

    assert say(0, 64000) == comm.SyncTrainingPort()
    assert say(1, 64016) == comm.SyncTrainingPort(newport=64016)
    assert say(0, 64000) == comm.SyncTrainingPort(newport=64016)
    assert say(0, 64016) == comm.SyncTrainingPort()
    assert say(1, 64016) == comm.SyncTrainingPort(port=64016)
    assert say(0, 64032) == comm.SyncTrainingPort(port=64016), "agreed is agreed"


def test_a_checkpoint_is_in_step_when_all_nodes_name_the_same(lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    nodes = [MasterClient(link=lab.link()) for _ in range(2)]

    def say(node: int, step: int) -> bool:
        monkeypatch.setenv("GROUP_RANK", str(node))
        return nodes[node].sync_checkpoint(step)

    assert [say(0, 10), say(1, 20), say(0, 20), say(1, 20)] == [False, False, True, True]


def test_a_refusal_is_raised_with_its_reason(client: MasterClient, name: str) -> None:
    client.kv_store_set(name, b"text")
    with pytest.raises(Rejected):
        client.kv_store_add(name, 1)
