"""The configuration of a launch from Python: the fields and methods of the original, and what each leads to."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.config import Entry, EntryKind, WorkerLogConfig
from dlrover.cli.launch.config import ElasticLaunchConfig
from dlrover.cli.launch.programmatic import _settings
from dlrover.cli.options.environment import Environment, read_environment
from dlrover.cli.options.settings import Settings
from dlrover.protocol.errors import ConfigError

# What the original adds to torch's LaunchConfig, in its order.
ORIGINAL = (
    "precheck", "network_check", "comm_perf_test", "node_unit", "training_port", "auto_config", "auto_tunning", "exclude_straggler",
    "save_at_breakpoint", "accelerator", "log_config", "training_log_file", "failure_node_errors", "numa_affinity", "membind_policy",
    "ucp_device_type", "dynamic_failover_extension",
)  # fmt: skip


def settings_of(config: Any, environment: Environment | None = None) -> Settings:
    return _settings(config, environment or read_environment({}), entry=Entry.of(EntryKind.PROGRAM, "true"))


def test_the_fields_stand_where_the_original_has_them() -> None:
    """Positional arguments of scripts mean what they meant on top of torch's class."""
    launcher = pytest.importorskip("torch.distributed.launcher.api")
    of_torch = [each.name for each in dataclasses.fields(launcher.LaunchConfig)]
    ours = [each.name for each in dataclasses.fields(ElasticLaunchConfig)]
    assert ours[: len(of_torch) + len(ORIGINAL)] == [*of_torch, *ORIGINAL]
    theirs, own = launcher.LaunchConfig(1, 1, 1), ElasticLaunchConfig()
    different = {name for name in of_torch if getattr(theirs, name) != getattr(own, name)}
    assert different == {"logs_specs", "max_restarts", "shutdown_timeout"}, "where nothing is given, our own rules hold"
    config = ElasticLaunchConfig(2, 4, 8)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 8)


def test_a_launch_config_of_torch_becomes_one_of_ours() -> None:
    """`ElasticLaunchConfig(**config.__dict__)` is how wrappers begin."""
    launcher = pytest.importorskip("torch.distributed.launcher.api")
    of_torch = launcher.LaunchConfig(2, 2, 4, rdzv_configs={"join_timeout": 60}, rdzv_timeout=77, max_restarts=0)
    config = ElasticLaunchConfig(**of_torch.__dict__)
    config.set_node_unit(2)
    assert config.rdzv_configs == {"join_timeout": 60, "timeout": 77, "node_unit": 2}
    terms = settings_of(config).terms
    assert (terms.limits.max_nodes, terms.limits.node_unit, terms.limits.join_timeout) == (2, 2, 60.0)
    assert terms.restarts.max_restarts == 0


def check_of(**fields: Any) -> Any:
    return settings_of(ElasticLaunchConfig(**fields)).terms.check


def test_nodes_are_checked_as_the_fields_say() -> None:
    assert check_of() is None
    assert check_of(network_check=True, accelerator="cpu").accelerator == "cpu"
    assert check_of(precheck=1).is_perf_test is False
    assert check_of(precheck=2).is_perf_test
    assert check_of(comm_perf_test=True).is_perf_test
    assert check_of(network_check=True, exclude_straggler=True).excludes_stragglers
    assert check_of(network_check=True).excludes_stragglers is False


def test_fields_that_are_options_elsewhere(tmp_path: Path) -> None:
    assert settings_of(ElasticLaunchConfig(save_at_breakpoint=True)).is_saving_at_break_points
    assert settings_of(ElasticLaunchConfig(node_unit=4, min_nodes=4, max_nodes=8)).terms.limits.node_unit == 4
    watch = settings_of(ElasticLaunchConfig(training_log_file="/train.log", failure_node_errors="#a b#c#")).watch
    assert (watch.log_file, watch.node_errors) == ("/train.log", ("a b", "c"))
    told = settings_of(ElasticLaunchConfig(), read_environment({"TRAINING_LOG_FILE": "/env.log"}))
    assert told.watch.log_file == "/env.log"
    assert settings_of(ElasticLaunchConfig(dynamic_failover_extension="mine::It")).failover_extension == "mine::It"
    with pytest.raises(ConfigError, match="--dynamic-failover-extension mine"):
        settings_of(ElasticLaunchConfig(dynamic_failover_extension="mine"))


def test_automatic_numbers_do_not_override_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = read_environment({"NODE_NUM": "6"})
    automatic = settings_of(ElasticLaunchConfig(auto_config=True), environment)
    assert (automatic.terms.limits.min_nodes, automatic.terms.limits.max_nodes) == (6, 6)
    assert automatic.local_world_size == "auto"
    assert automatic.terms.check is not None, "jobs of four nodes and more are checked"
    given = settings_of(ElasticLaunchConfig(2, 3, 5, auto_config=True), environment)
    assert (given.terms.limits.min_nodes, given.terms.limits.max_nodes, given.local_world_size) == (2, 3, 5)

    monkeypatch.setenv("NODE_NUM", "6")
    monkeypatch.setenv("TRAINING_LOG_FILE", "/t.log")
    monkeypatch.setenv("FAILURE_NODE_ERRORS", " #one#two# ")
    config = ElasticLaunchConfig(auto_config=True)
    config.auto_configure_params()
    assert (config.min_nodes, config.max_nodes, config.network_check) == (6, 6, True)
    assert (config.training_log_file, config.failure_node_errors) == ("/t.log", "#one#two#")
    plain = ElasticLaunchConfig()
    plain.auto_configure_params()
    assert (plain.min_nodes, plain.network_check, plain.training_log_file) == (1, False, "/t.log")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"precheck": 0}, (False, False)),
        ({"precheck": 0, "network_check": True}, (True, False)),
        ({"precheck": 1}, (True, False)),
        ({"precheck": 1, "comm_perf_test": True}, (True, True)),
        ({"precheck": 2}, (True, True)),
    ],
)
def test_a_level_never_switches_anything_off(before: dict[str, Any], after: tuple[bool, bool]) -> None:
    config = ElasticLaunchConfig(**before)
    config.update_precheck_args()
    assert (config.network_check, config.comm_perf_test) == after


def test_files_of_workers() -> None:
    config = ElasticLaunchConfig()
    assert config.get_log_dir(), "somewhere temporary"
    assert (config.get_log_redirects(), config.get_log_tee()) == (0, 0)
    config.setup_log(None)
    assert settings_of(config).log == WorkerLogConfig()
    config.setup_log("/logs")
    assert (config.get_log_dir(), config.get_log_redirects(), config.get_log_tee()) == ("/logs", 3, 3)
    assert settings_of(config).log == WorkerLogConfig(log_dir="/logs", redirect_default=3, tee_default=3)
    config.setup_log("/logs", redirects=123, tee=1)
    assert (config.get_log_redirects(), config.get_log_tee()) == (0, 1)
    config.setup_log("/logs", redirects="0:1", tee="nonsense")
    assert settings_of(config).log == WorkerLogConfig(log_dir="/logs", redirects={0: 1})
    assert ElasticLaunchConfig().log_config.given_dir == "", "each configuration has its own"
    pytest.importorskip("torch")
    assert type(config.get_log_specs()).__name__ == "DefaultLogsSpecs"


def test_the_view_for_the_master() -> None:
    config = ElasticLaunchConfig(1, 2, 4, rdzv_configs={"join_timeout": 5}, max_restarts=3, accelerator="ascend-npu")
    view = config.to_json()
    assert json.loads(view.pop("rdzv_configs")) == {"join_timeout": 5, "timeout": 900}
    assert view == {
        "min_nodes": 1,
        "max_nodes": 2,
        "nproc_per_node": 4,
        "rdzv_backend": "etcd",
        "rdzv_endpoint": "",
        "max_restarts": 3,
        "accelerator": "ascend-npu",
    }


def test_what_has_no_effect_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings_of(ElasticLaunchConfig(membind_policy="bind", training_port=60000))
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        settings_of(ElasticLaunchConfig(numa_affinity=True, training_port=1, ucp_device_type="gpu"))
    [line] = caplog.messages
    assert line.startswith("training_port, numa_affinity, ucp_device_type has no effect in this version.")


class Extension:
    """As far as the launcher looks at it."""


def test_an_extension_is_found_where_its_module_is() -> None:
    settings = settings_of(ElasticLaunchConfig(dynamic_failover_extension=Extension()))
    assert settings.failover_extension == "tests.cli.launch.test_config::Extension"
    assert settings.failover_dir == str(Path(__file__).parents[3])
