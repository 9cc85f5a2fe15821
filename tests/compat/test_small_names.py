"""Constants, settings, loggers, ports, decorators and other small names of the original: they mean what they meant."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dlrover.python.common import comm, constants, env_utils, serialize
from dlrover.python.common.global_context import Context, DefaultValues
from dlrover.python.common.log import get_logger
from dlrover.python.common.singleton import Singleton, singleton
from dlrover.python.diagnosis.common.diagnosis_action import EventAction, JobAbortionAction, NodeAction
from dlrover.python.elastic_agent.sharding.client import ShardingClient
from dlrover.python.master.shard.dataset_splitter import PartitionOffsets
from dlrover.python.util import args_util, common_util, file_util, function_util, reflect_util, time_util
from dlrover.python.util.actor_util.parse_actor import parse_type_id_from_actor_name
from dlrover.python.util.store_util import barrier
from dlrover.trainer.constants.tf_constants import TFConstants
from dlrover.trainer.util.net_util import get_available_port

from dlrover.trainer.stand_in import StandIn


def test_constants_are_plain_values_of_the_spec() -> None:
    assert type(constants.NodeType.WORKER) is str
    assert constants.NodeStatus.is_terminal_status(constants.NodeStatus.DELETED)
    assert not constants.NodeStatus.is_terminal_status(constants.NodeStatus.RUNNING)
    expected = {
        "NodeExitReason.OOM": "OOMKilled",
        "JobExitReason.SUCCEEDED": "Completed",
        "RendezvousName.TRAINING": "elastic-training",
        "TrainingExceptionLevel.NODE_ERROR": "node_error",
        "DistributionStrategy.ALLREDUCE": "AllreduceStrategy",
        "PlatformType.PY_KUBERNETES": "pyk8s",
        "OptimizeMode.MANNUAL": "manunal",
        "Accelerators.ASCEND_NPU": "ascend-npu",
        "NodeEnv.JOB_NAME": "ELASTIC_JOB_NAME",
        "ConfigPath.ENV_PARAL_CONFIG": "DLROVER_PARAL_CONFIG_PATH",
        "ElasticJobLabel.RANK_INDEX_KEY": "elasticjob.dlrover/rank-index",
        "ExitCode.OOM_CODE": 247,
        "JobConstant.RDZV_JOIN_TIMEOUT_DEFAULT": 600,
        "TrainingLoopStatus.PENDING": 3,
        "NodeResourceLimit.MAX_MEMORY": 65536,
        "CheckpointConstant.TRACER_FILE_NAME": "dlrover_latest.txt",
    }
    found = {path: getattr(getattr(constants, path.partition(".")[0]), path.partition(".")[2]) for path in expected}
    assert found == expected
    assert (TFConstants.SaveSteps.name, TFConstants.SaveSteps()) == ("save_steps", 100)


def test_messages_have_defaults_of_their_own_and_survive_as_json() -> None:
    one, other = comm.ParallelConfig(), comm.ParallelConfig()
    one.dataloader.batch_size = 8
    assert other.dataloader.batch_size == 0
    assert json.loads(one.to_json())["dataloader"]["batch_size"] == 8
    for message in (
        one,
        comm.Task(3, comm.Shard("data", 0, 10, [1, 2]), 1),
        comm.RendezvousState(world={0: 8, 1: 8}, round=2),
        comm.KeyValuePairs({"a": b"\x00\xff"}, "set"),
        comm.HeartbeatResponse(comm.DiagnosisAction("NoAction", "{}")),
    ):
        assert comm.deserialize_message(message.serialize()) == message
    assert comm.deserialize_message(b'{"type": "os.system", "fields": {}}') is None
    assert comm.deserialize_message(b"\x80\x04N.") is None, "a pickle is not opened"
    assert comm.deserialize_message(b"") is None
    request = comm.BaseRequest(1, "worker", b"\xff")
    assert comm.BaseRequest.from_json(request.to_json()) == request


def test_objects_are_rendered_by_their_own_dict() -> None:
    class Plan(serialize.JsonSerializable):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.b, self.a = PartitionOffsets({"p": 1}), 2

    assert Plan().to_json() == '{"a": 2, "b": {"p": 1}}'


def test_the_context_has_the_defaults_and_says_that_setting_them_does_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context()
    assert (context.hang_downtime, context.max_relaunch_count, context.master_port) == (10, 3, None)
    assert DefaultValues.SEC_TO_WAIT_PENDING_POD == context.seconds_to_wait_pending_pod == 900
    context.hang_downtime = 30
    assert "Context.hang_downtime=30 has no effect on the job: give `dlrover master` --hang_downtime" in caplog.text
    context.own = 1
    context.config_master_port(50001)
    assert context.master_port == 50001
    with socket.socket() as taken:
        taken.bind(("", 0))
        monkeypatch.setenv("HOST_PORTS", f"{taken.getsockname()[1]},0")  # 0: any
        context.config_master_port(50001)
        assert context.master_port not in (50001, taken.getsockname()[1])
    assert context.pre_check_enabled()
    assert context.is_pre_check_operator_bypass(context.get_pre_check_operators()[0])
    with pytest.raises(AttributeError):
        context.no_such_setting  # noqa: B018


def test_there_is_one_object_of_a_class() -> None:
    class One(Singleton):  # type: ignore[misc,valid-type]
        def __init__(self, number: int) -> None:
            self.number = number

    class Derived(One):
        """Has an object of its own."""

    assert One.singleton_instance(1) is One.singleton_instance(2)
    assert Derived.singleton_instance(3).number == 3
    made = singleton(One)
    assert made(4) is made(5)


def test_the_logger_writes_to_stderr_and_to_a_file_that_rotates(tmp_path: Path) -> None:
    code = "from dlrover.python.common.log import default_logger as logger; logger.info('hello'); logger.debug('not')"
    environ = {**os.environ, "DLROVER_LOG_ROOT_DIR": str(tmp_path / "logs")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert "[INFO] [<string>:1:<module>] hello" in done.stderr
    assert done.stderr == (tmp_path / "logs" / "dlrover.log").read_text()
    logger = get_logger("of-a-test", handlers=[logging.NullHandler()])
    assert get_logger("of-a-test") is logger
    assert len(logger.handlers) == 2


def test_the_environment_is_read_at_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("JOB_UID", "uid")
    monkeypatch.setenv("EMPTY", "")
    assert (env_utils.get_rank(), env_utils.get_job_uid(), env_utils.get_env("EMPTY")) == (7, "uid", "")
    env_utils.set_env("OF_A_TEST", 1)
    assert os.environ.pop("OF_A_TEST") == "1"
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "b", "MASTER_PORT": "1"},
    )
    try:
        assert child.pid in env_utils.get_all_child_pids()
        assert env_utils.is_worker_process(child.pid)
        assert not env_utils.is_worker_process(os.getpid())
        assert env_utils.get_proc_env(child.pid)["MASTER_PORT"] == "1"
    finally:
        child.communicate(b"\n")
    assert env_utils.get_kernel_stack(2**30) == (False, f"not exist: /proc/{2**30}/stack")
    env_utils.print_process_list()


def test_free_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert common_util.is_port_in_use(port)
        with pytest.raises(RuntimeError):
            common_util.find_free_port_in_set([port])
        with pytest.raises(RuntimeError):
            common_util.find_free_port_in_range(port, port)
        assert common_util.find_free_port_in_set([port, 0]) > 0
    assert int(get_available_port().removeprefix("localhost:")) > 0
    found, sock = common_util.find_free_port_from_env_and_bind("127.0.0.1")
    with sock:
        assert sock.getsockname() == ("127.0.0.1", found)
    first = common_util.find_free_port_for_hccl(50000)
    assert first == 0 or first >= 50000


def test_time_limits_and_retries() -> None:
    began, let_go = threading.Event(), threading.Event()

    @function_util.threading_timeout(callback_func=lambda: 0.05)
    def wait() -> bool:
        began.set()
        return let_go.wait(60)

    with pytest.raises(function_util.TimeoutException):
        wait()
    let_go.set()
    assert wait() is True

    before = signal.getsignal(signal.SIGALRM)

    @function_util.timeout(0.05)
    def wait_for_a_signal() -> None:
        signal.pause()

    with pytest.raises(function_util.TimeoutException):
        wait_for_a_signal()
    assert signal.getsignal(signal.SIGALRM) is before

    calls: list[int] = []

    @function_util.retry(retry_times=3, retry_interval=0)
    def third_time(succeeds_at: int) -> str:
        calls.append(1)
        if len(calls) < succeeds_at:
            raise OSError("not yet")
        return "done"

    assert third_time(3) == "done"
    calls.clear()
    with pytest.raises(OSError, match="not yet"):
        third_time(9)
    assert len(calls) == 3
    assert function_util.ignore_exceptions()(lambda: 1 / 0)() is None


def test_arguments_files_and_times(tmp_path: Path) -> None:
    assert args_util.parse_tuple_list("[('a', 'b', True)]") == [("a", "b", True)]
    assert args_util.parse_tuple_dict("{('a', 'b'): 'yes'}") == {("a", "b"): True}
    assert args_util.parse_group_affinity("{0: 10, 1: 15}") == {0: 10, 1: 15}
    assert args_util.parse_group_affinity("") is None
    for parse, text in (
        (args_util.pos_int, "0"),
        (args_util.str2bool, "perhaps"),
        (args_util.parse_tuple_list, "[1]"),
        (args_util.parse_dict, "[]"),
        (args_util.parse_group_affinity, "{0: 0}"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="give"):
            parse(text)
    (tmp_path / "log").write_bytes(b"\n".join(b"%d" % number for number in range(5000)))
    assert file_util.read_last_n_lines(str(tmp_path / "log"), 2) == [b"4998", b"4999"]
    assert file_util.read_last_n_lines(str(tmp_path / "none"), 2) == []
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert file_util.find_file_in_parents("log", str(tmp_path / "deep" / "er")) == str(tmp_path / "log")
    assert file_util.is_same_path(f"{tmp_path}//log", f"{tmp_path}/deep/../log")
    assert time_util.has_expired(0, 10)
    assert time_util.timestamp_diff_in_seconds(1.5, 3) == 1.5
    assert time_util.get_pending_timeout() >= 600


def test_classes_by_name() -> None:
    assert reflect_util.get_class("collections.OrderedDict")() == {}
    assert reflect_util.new_instance("collections.Counter", "aa") == {"a": 2}
    assert reflect_util.Importer.import_module("no.such", raise_if_error=False) == (None, False)
    names = ["no.such.Thing", "json.dumps"]
    found = reflect_util.Importer.import_first_available_module_content(names, raise_if_error=False)
    assert found == (json.dumps, True)
    with pytest.raises(ValueError, match="cannot be imported"):
        reflect_util.import_callable("no.such.Thing")
    with pytest.raises(ValueError, match="is not callable"):
        reflect_util.import_callable("sys.path")
    assert common_util.get_class_by_module_and_class_name("json", "none") is None
    assert common_util.get_dlrover_version() != "Unknown"
    assert [parse_type_id_from_actor_name(name) for name in ("PsActor_1", "Worker-4|20", "Evaluator_7", "x")] == [
        ("ps", 1),
        ("worker", 4),
        ("evaluator", 1),
        ("", 0),
    ]


def test_actions_take_their_own_fields_by_position() -> None:
    event = EventAction("warn", "job", "action", "text", {"k": "v"})
    assert (event.event_type, event.event_msg, event.action_type) == ("warn", "text", "event")
    assert JobAbortionAction("why", "text").reason == "why"
    node = NodeAction(3, "worker", "Failed", "bad")
    assert (node.node_id, node.reason) == (3, "bad")
    assert EventAction.from_json(event.to_json()) == event


def test_offsets_of_partitions_make_a_stream() -> None:
    offsets = PartitionOffsets({0: 1, 1: 0})
    assert [offsets.get_round_robin_partition() for _ in range(3)] == [0, 1, 0]
    offsets.set_partition_offset(1, 5)
    assert (offsets.get_partition_offset(1), offsets.get_partition_offset(9)) == (5, None)
    assert (offsets.partitions, offsets.partition_num, offsets.to_dict()) == ([0, 1], 2, {0: 1, 1: 5})
    with ShardingClient("log", 10, 1, 40, storage_type="sls", partitions=offsets, link=StandIn()) as client:
        shard = client.fetch_shard(timeout=60)
        assert shard is not None
        assert (shard.name, shard.start) in (("0", 1), ("1", 5))


def test_a_barrier_over_a_store() -> None:
    from dlrover.trainer.torch.kv_store import MasterKVStore

    store = MasterKVStore("barrier", link=StandIn())
    waiting = threading.Thread(target=barrier, args=(store, 2, "here"), kwargs={"barrier_timeout": 60})
    waiting.start()
    barrier(store, 2, "here", barrier_timeout=60)
    waiting.join(60)
    assert not waiting.is_alive()


def test_scripts_and_agents_rotate_one_log_file_together(tmp_path: Path) -> None:
    """A script whose file was moved aside by another process goes on in the new one."""
    code = (
        "import os, pathlib; from dlrover.python.common.log import default_logger as logger; logger.info('first');"
        "path = pathlib.Path(os.environ['DLROVER_LOG_ROOT_DIR'], 'dlrover.log'); path.rename(path.with_suffix('.log.1'));"
        "logger.info('second')"
    )
    environ = {**os.environ, "DLROVER_LOG_ROOT_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "dlrover.log.1").read_text().endswith("first\n")
    assert (tmp_path / "dlrover.log").read_text().endswith("second\n")


def test_a_directory_that_cannot_be_written_to_costs_the_log_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from dlrover.python.common.log import default_logger as logger; logger.info('hello')"
    environ = {**os.environ, "DLROVER_LOG_ROOT_DIR": str(tmp_path / "file" / "logs")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("hello\n")


def test_a_node_that_was_given_its_rank_by_the_master_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "WORKER_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert env_utils.get_node_rank() == 0
    monkeypatch.setenv("DLROVER_NODE_RANK", "3")
    assert env_utils.get_node_rank() == 3
    monkeypatch.setenv("NODE_RANK", "5")
    assert env_utils.get_node_rank() == 5


def test_label_selectors_are_written_and_read_back() -> None:
    from dlrover.python.util.k8s_util import gen_dict_from_k8s_label_selector, gen_k8s_label_selector_from_dict

    labels = {"app": "dlrover", "elasticjob.dlrover/name": "points"}
    text = gen_k8s_label_selector_from_dict(labels)
    assert text == "app=dlrover,elasticjob.dlrover/name=points"
    assert gen_dict_from_k8s_label_selector(text) == labels
    assert gen_dict_from_k8s_label_selector("app==dlrover, ") == {"app": "dlrover"}
    for other in ("app!=dlrover", "app in (a, b)", "app"):
        with pytest.raises(ValueError, match="key=value"):
            gen_dict_from_k8s_label_selector(other)
