"""The import paths of the original that exist here."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.aliases import ALIASES, MISSING
from tests.cli.conftest import DEADLINE, until_said

FLASH = "dlrover.trainer.torch.flash_checkpoint."
FLASH_NAMES = {
    # Names that scripts import from the front ends themselves, which have kept their paths.
    "checkpointer": "StorageType Checkpointer",
    "ddp": "DdpCheckpointer StorageType",
    "ddp_engine": "DdpCheckpointEngine",
    "fsdp": "FsdpShardCheckpointer FsdpFullCheckpointer FsdpCheckpointer StorageType",
    "fsdp_engine": "FsdpCheckpointEngine SharedMemoryWriter SharedMemoryReader FileReader",
    "deepspeed": "DeepSpeedCheckpointer AsyncCheckpointAgent AsyncSaveEngine StorageType",
    "deepspeed_engine": "DeepSpeedCheckpointEngine",
    "hf_trainer": "FlashCkptTrainer HfFlashCheckpointer HfDeepSpeedCheckpointer HfDdpCheckpointer",
    "megatron": "save_checkpoint load_checkpoint wait_latest_checkpoint MegatronCheckpointer StorageType",
    "megatron_dist_ckpt": "save_checkpoint load_checkpoint wait_latest_checkpoint MegatronDistCheckpointer KeepStepIntervalStrategy "
    "KeepLatestStepStrategy get_checkpoint_storage get_dist_optimizer_checkpoint_name StorageType",
    "engine": "CheckpointEngine check_all_rank_ready verify_all_rank_step_consistent start_saver_process wait_socket_server",
    "full_ckpt_engine": "FullCheckpointEngine",
    "megatron_engine": "MegatronCheckpointEngine MegatronDistCheckpointEngine",
    "replica": "CkptReplicaManger ShardCkptReplicaManager FullCkptReplicaManager",
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in ALIASES.items() for name in names])
def test_an_old_path_gives_what_lives_elsewhere_now(module: str, name: str) -> None:
    target_module, _, attribute = ALIASES[module][name].partition(":")
    if target_module.startswith("dlrover.trainer.tensorflow.hooks"):
        pytest.importorskip("tensorflow", reason="the extra `tensorflow-estimator`")
    old = getattr(importlib.import_module(module), name)
    assert old is getattr(importlib.import_module(target_module), attribute)
    assert name in dir(importlib.import_module(module))


@pytest.mark.parametrize(("module", "names"), FLASH_NAMES.items())
def test_a_front_end_has_the_names_that_scripts_import(module: str, names: str) -> None:
    if module == "hf_trainer":
        pytest.importorskip("transformers", reason="dlrover[frameworks]")
    found = importlib.import_module(FLASH + module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MISSING.items() for name in names])
def test_a_name_whose_feature_is_not_there_says_what_is_missing(module: str, name: str) -> None:
    found = importlib.import_module(module)
    with pytest.raises(ImportError, match=rf"{name} is not available in this version of DLRover: it belongs to "):
        getattr(found, name)
    assert name not in dir(found)


def test_a_missing_name_stops_a_script_with_a_sentence() -> None:
    with pytest.raises(ImportError, match="belongs to a class of the original's inside"):
        from dlrover.trainer.util.conf_util import ConfigurationManagerMeta  # noqa: F401


def test_from_import_works_as_in_users_scripts() -> None:
    from dlrover.python.elastic_agent.torch.training import ElasticLaunchConfig, launch_agent  # type: ignore[import-not-found]

    assert callable(launch_agent)
    assert ElasticLaunchConfig().max_nodes == 1


def test_what_is_not_in_the_table_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dlrover.python.no_such")
    with pytest.raises(ImportError):
        from dlrover.python.elastic_agent.torch.training import NoSuchThing  # noqa: F401


def test_an_old_path_costs_nothing_until_it_is_used() -> None:
    code = "import dlrover.python.elastic_agent.torch.training, sys; print('dlrover.cli.launch.programmatic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "False"


OLD_MASTER = (sys.executable, "-m", "dlrover.python.master.main", "--job_name", "by-its-old-name")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no-such-kubeconfig"),
        (["--platform", "ray", "--namespace", "n"], "--platform ray needs --job-spec FILE"),
        (["--fleet", "f"], "--fleet has no effect with --platform pyk8s"),
    ],
)
def test_the_old_master_module_looks_for_a_cluster_unless_told_otherwise(
    short_dir: Path, words: list[str], complaint: str
) -> None:
    environ = {**os.environ, "TMPDIR": str(short_dir), "KUBECONFIG": str(short_dir / "no-such-kubeconfig")}
    done = subprocess.run([*OLD_MASTER, *words], env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_the_old_master_module_goes_on_with_options_that_it_does_not_know(short_dir: Path, reserved_port: int) -> None:
    """And takes a port of HOST_PORTS rather than the one it was given, because others can reach that."""
    words = ["--platform", "local", "--no_such", "3", "--namespace", "n", "--relaunch_error", "--service_type=http"]
    words += ["--dynamic_failover_extension", "mine::Failover", "--node_num", "2", "--port", "1"]
    environ = {**os.environ, "TMPDIR": str(short_dir), "HOST_PORTS": str(reserved_port)}
    master = subprocess.Popen([*OLD_MASTER, *words], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        until_said(
            master,
            "Unknown options are ignored: --no_such 3",
            "--namespace n has no effect: --platform local has no namespaces",
            "--relaunch-error true has no effect, because this master starts no nodes",
            "`dlrover dashboard by-its-old-name` prints a link",  # --service_type=http: the page's port is open
            "--dynamic_failover_extension mine::Failover is ignored",
            f"job by-its-old-name at 127.0.0.1:{reserved_port}",
        )
        master.terminate()
        assert master.wait(DEADLINE) == 128 + signal.SIGTERM
    finally:
        master.kill()
        master.communicate()


def test_the_new_master_command_refuses_what_it_does_not_know(short_dir: Path) -> None:
    command = [sys.executable, "-m", "dlrover.cli.main", "master", "--job-name", "j"]
    for words, complaint in (
        (["--no-such", "3"], "--no-such 3"),
        (["--", "train.py"], "unrecognized arguments: train.py"),
        (["--job-spec", "job.json"], "--job-spec job.json needs --platform ray."),
        (["--namespace", "n"], "--namespace n has no effect: --platform local has no namespaces. Leave it out."),
        (
            ["--training-elastic-mode", "ucp"],
            "--training-elastic-mode ucp has no effect: this version does not support the mode of DeepSpeed",
        ),
        (["--xpu-type", "abacus"], "--xpu-type abacus has no effect: the resource names"),
        (["--platform", "pyk8s", "--group-affinity", "{0: 0}"], "each group needs at least 1 worker"),
        (["--platform", "pyk8s", "--group-affinity", "half"], "give a map of groups to workers"),
        (["--platform", "volcano"], "Name it in `spec.gang` of the job"),
        (["--plat", "local"], "--plat"),
    ):
        environ = {**os.environ, "TMPDIR": str(short_dir)}
        done = subprocess.run([*command, *words], env=environ, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 2
        assert complaint in done.stderr
