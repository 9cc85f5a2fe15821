"""Job files of the original for `dlrover master --platform ray`: what becomes of each field. Needs no Ray."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from dlrover.cli.master_command import build_parser, reset_options_without_effect
from dlrover.cli.options.settings import read_settings
from dlrover.cli.ray.job_file import read_job_file, run_job_file
from dlrover.cli.ray.plan import RayRun
from dlrover.master.config import MasterConfig
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodeType, Resource, Strategy
from dlrover.protocol.messages.scaling import ScaleMode


@pytest.fixture
def read(tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()

    def read(spec: dict[str, object], worker: dict[str, object], suffix: str = "json", **options: object) -> RayRun:
        content = {"spec": {**spec, "replicaSpecs": {"worker": {"replicas": 2, **worker}}}}
        file = tmp_path / f"job.{suffix}"
        file.write_bytes((msgspec.json if suffix == "json" else msgspec.yaml).encode(content))
        return read_job_file(str(file), [str(script)], {}, job_name="filed", **options)

    return read


def master_of(run: RayRun) -> MasterConfig:
    assert run.plan.master is not None
    return run.plan.master


def master_options(*words: str) -> argparse.Namespace:
    return build_parser("dlrover master").parse_args(["--job-name=j", "--platform=ray", *words])


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_each_kind_of_file_says_the_same(read, suffix: str):
    run = read({}, {"restartCount": 1, "criticalNodes": "0:2"}, suffix)
    worker = master_of(run).fleet.replicas[NodeType.WORKER]
    assert (worker.count, worker.max_relaunches, worker.critical) == (2, 1, "0:2")
    assert run.plan.job_name == "filed"
    assert run.notes == ()


def test_a_node_may_ask_for_an_accelerator_by_its_kubernetes_name(read):
    run = read({}, {"resource": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 2}})
    assert run.resource == Resource(cpu=4, memory_mb=8192, gpus=2)
    assert run.plan.summary == "2 nodes of 4 CPU, 2 GPU, 8192 MiB memory"


def test_a_job_with_parameter_servers_has_nodes_of_all_types(tmp_path: Path):
    """As the original's manifests: each type with its own size, and the same command for all."""
    command = ["python", "-m", "dlrover.trainer.entry.local_entry", "--platform=RAY", "--conf=conf.TrainConf"]
    template = {"spec": {"containers": [{"name": "main", "command": command}]}}
    sizes = {"ps": {"cpu": 2, "memory": "4Gi"}, "master": {"cpu": 1}, "worker": {"cpu": 4}, "evaluator": {}}
    replicas = {
        name: {"replicas": 1, "resources": size, "restartCount": 2, "template": template, "autoScale": name == "ps"}
        for name, size in sizes.items()
    }
    file = tmp_path / "job.json"
    spec = {"distributionStrategy": "ParameterServerStrategy", "replicaSpecs": {**replicas, "dlrover-master": {}}}
    file.write_bytes(msgspec.json.encode({"spec": spec}))
    run = read_job_file(str(file), (), {}, job_name="filed")
    fleet = master_of(run).fleet
    assert fleet.strategy is Strategy.PS
    assert {kind.value: (each.count, each.resource.cpu) for kind, each in fleet.replicas.items()} == {
        "worker": (1, 4),
        "ps": (1, 2),
        "chief": (1, 1),
        "evaluator": (1, 0),
    }
    assert master_of(run).scaling.types == (NodeType.PS,)
    assert run.plan.summary == "1 worker, 1 ps, 1 chief, 1 evaluator; each worker 4 CPU"
    _, settings = read_settings(run.plan.nodes.argv[3:], {"NODE_TYPE": "ps", "DLROVER_MASTER_ADDR": "h:1"})
    assert settings.terms.strategy is Strategy.PS
    assert settings.entry.args == (b"--platform=RAY", b"--conf=conf.TrainConf")


def test_the_limits_of_the_job_hold_on_ray(read):
    worker = {"resources": {"cpu": 2, "gpu.intel.com": 1}}
    run = read({"resourceLimits": {"cpu": 8, "memory": "64Gi", "gpu": 4}}, worker)
    assert master_of(run).fleet.limits == Resource(cpu=8, memory_mb=65536, gpus=4)
    with pytest.raises(ConfigError, match="ask for 4 cores, and the job's limit is 3"):
        read({"resourceLimits": {"cpu": 3}}, worker)
    with pytest.raises(ConfigError, match=r"spec\.resourceLimits: 'many'"):
        read({"resourceLimits": {"cpu": "many"}}, worker)


@pytest.mark.parametrize(("mode", "expected"), [("manual", ScaleMode.OFF), ("single-job", ScaleMode.ON)])
def test_the_optimize_mode_says_whether_the_job_scales_itself(read, mode: str, expected: ScaleMode):
    assert master_of(read({"optimizeMode": mode}, {})).scaling.mode is expected


def test_options_of_the_master_count_more_than_the_file(read):
    options = master_options("--auto-scale=dry-run", "--pending-timeout=60", "--pending-fail-strategy=2")
    run = read(
        {"optimizeMode": "single-job"},
        {},
        scaling=options,
        pending_timeout=options.pending_timeout,
        pending_strategy=options.pending_fail_strategy,
    )
    master = master_of(run)
    assert master.scaling.mode is ScaleMode.DRY_RUN
    assert (master.fleet.pending_timeout, master.fleet.pending_strategy) == (60.0, 2)


def test_workers_that_shall_keep_their_number_are_not_scaled(read):
    assert master_of(read({}, {})).scaling.types == (NodeType.WORKER,)
    assert master_of(read({"optimizeMode": "single-job"}, {"autoScale": "false"})).scaling.types == ()


def test_fields_without_effect_are_named(read):
    run = read({"enableDynamicSharding": False}, {"restartTimeout": 60})
    assert run.notes == (
        "These fields have no effect on Ray: spec.enableDynamicSharding, spec.replicaSpecs.worker.restartTimeout.",
    )


def test_another_state_backend_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("state_backend_type", "Redis")
    given = {"pending_timeout": None, "pending_strategy": None, "relaunches_errors": False, "scaling": master_options()}
    with pytest.raises(ConfigError, match="state_backend_type=Redis is not supported"):
        run_job_file("job.json", (), job_name="x", **given)


def test_options_of_the_master_without_effect_are_named():
    options = master_options("--port=1", "--node-num=3", "--auto-scale=on", "--journal=/j", "--enable-dashboard")
    said = reset_options_without_effect(options)
    assert [text.partition(" has no effect")[0] for text in said] == [
        "--port 1",
        "--journal /j",
        "--enable-dashboard true",
    ]
    assert (options.port, options.journal, options.auto_scale) == (0, "", "on")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "spec: {replicaSpecs: {server: {replicas: 1}, worker: {replicas: 1}}}",
            "is not a type of node. The types are",
        ),
        ("spec: {replicaSpecs: {ps: {replicas: 1}}}", "replicaSpecs.worker is missing"),
        ("spec: {replicaSpecs: {chief: {}, master: {}, worker: {}}}", "name the same type"),
        ("spec: {replicaSpecs: {chief: {}, worker: {command: a.py}}}", "belong to a job with parameter servers"),
        (
            "spec: {distributionStrategy: ParameterServerStrategy, replicaSpecs: {worker: {command: a.py}}}",
            "needs spec.replicaSpecs.ps",
        ),
        (
            "spec: {distributionStrategy: AllreduceStrategy, replicaSpecs: {ps: {}, worker: {command: a.py}}}",
            "belong to a job with parameter servers",
        ),
        (
            "spec: {replicaSpecs: {ps: {command: a.py}, worker: {command: b.py}}}",
            "worker and ps have different commands",
        ),
        ("spec: {replicaSpecs: {}}", "lists no nodes"),
        ("kind: ElasticJob", "no `spec`"),
        ("spec: {replicaSpecs: {worker: {replicas: many}}}", "must be a whole number"),
        ("spec: {replicaSpecs: {worker: {replicas: 1, colour: red}}}", "colour is unknown"),
        ("spec: {replicaSpecs: {worker: {replicas: 1, autoScale: 3, command: python}}}", "must be true or false"),
        ("spec: {optimizeMode: fast, replicaSpecs: {worker: {replicas: 1}}}", "must be one of manual"),
        ("spec: {resourceLimits: 3, replicaSpecs: {worker: {replicas: 1}}}", "resourceLimits must be a map"),
        ("spec: {replicaSpecs: {worker: {replicas: 1}}}", "does not say which command the workers run"),
    ],
)
def test_a_job_file_that_makes_no_sense(tmp_path: Path, text: str, sentence: str):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_job_file(str(file), (), {}, job_name="x")


def test_a_job_file_of_an_unknown_kind(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"must end in .json, .yaml or .yml"):
        read_job_file(str(file), (), {}, job_name="x")
