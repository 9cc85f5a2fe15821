"""From words to settings: what is understood, and one paragraph for everything that is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.agent.config import EntryKind
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.settings import Settings, build_settings, effective_values, parse_streams, read_settings
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import Detection


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def settings_of(*argv: str, **environ: str) -> Settings:
    return build_settings(parse(argv, environ), read_environment(environ))


def test_copies_of_snapshots_are_asked_for_by_number_or_by_parity(script: str) -> None:
    assert settings_of(script).snapshot_copies == 0
    assert settings_of("--snapshot-replicas=2", "--snapshot-bandwidth=100", script).snapshot_copies == 2
    assert settings_of("--snapshot-parity=4+1", script).snapshot_parity == (4, 1)


def test_without_options_one_worker_runs_on_one_node_and_restarts_while_it_makes_progress(script: str) -> None:
    settings = settings_of(script, "--lr", "1")
    limits = settings.terms.limits
    assert (limits.min_nodes, limits.max_nodes, settings.local_world_size) == (1, 1, 1)
    assert settings.terms.restarts.max_restarts is None
    assert settings.entry.kind is EntryKind.SCRIPT
    assert settings.entry.args == (b"--lr", b"1")
    assert settings.is_warm
    assert settings.shutdown_timeout == 30.0
    assert settings.node_rank is None
    assert settings.rdzv_id == ""


def test_torchruns_meaning_of_max_restarts_holds_once_it_is_given(script: str) -> None:
    assert settings_of("--max-restarts", "0", script).terms.restarts.max_restarts == 0
    assert settings_of(script, PET_MAX_RESTARTS="3").terms.restarts.max_restarts == 3


@pytest.mark.parametrize(("text", "bounds"), [("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_nnodes(script: str, text: str, bounds: tuple[int, int]) -> None:
    limits = settings_of("--nnodes", text, script).terms.limits
    assert (limits.min_nodes, limits.max_nodes) == bounds


def test_nodes_are_not_checked_unless_somebody_asks(script: str) -> None:
    assert settings_of(script).terms.check is None
    assert settings_of("--precheck", "0", script).terms.check is None
    assert settings_of("--auto-config", script, NODE_NUM="3").terms.check is None


@pytest.mark.parametrize(
    ("argv", "is_perf_test"),
    [
        (["--network-check"], False),
        (["--precheck", "1"], False),
        (["--precheck=2"], True),
        (["--network-check", "--comm-perf-test"], True),
        (["--comm_perf_test"], True),
    ],
)
def test_the_ways_to_ask_for_a_node_check(script: str, argv: list[str], is_perf_test: bool) -> None:
    check = settings_of(*argv, script).terms.check
    assert check is not None
    assert check.is_perf_test == is_perf_test
    assert check.module == "dlrover.trainer.torch.node_check.nvidia_gpu"
    assert (check.straggler_ratio, check.fresh_for, check.excludes_stragglers) == (2.0, 600.0, False)


def test_an_automatic_job_of_four_nodes_is_checked(script: str) -> None:
    assert settings_of("--auto-config", script, NODE_NUM="4").terms.check is not None


def test_the_options_of_the_node_check_arrive(script: str) -> None:
    options = ["--exclude-straggler", "--straggler-ratio", "3", "--check-fresh-for", "0", "--accelerator", "cpu"]
    check = settings_of("--network-check", *options, script).terms.check
    assert check is not None
    assert check.module == "dlrover.trainer.torch.node_check.cpu"
    assert (check.straggler_ratio, check.fresh_for, check.excludes_stragglers) == (3.0, 0.0, True)


def test_an_accelerator_that_nobody_can_check_leaves_a_note_and_no_check(script: str) -> None:
    settings = settings_of("--network-check", "--accelerator", "abacus", script)
    assert settings.terms.check is None
    assert any("--accelerator abacus" in note for note in settings.notes)


def test_excluding_stragglers_without_a_check_leaves_a_note(script: str) -> None:
    settings = settings_of("--exclude-straggler", script)
    assert settings.terms.check is None
    assert any("--exclude-straggler has no effect" in note for note in settings.notes)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--precheck", "3"], "--precheck"),
        (["--network-check", "--straggler-ratio", "0.5"], "--straggler-ratio 0.5"),
        (["--network-check", "--check-fresh-for", "-1"], "--check-fresh-for -1"),
        (["--network-check", "--check-fresh-for", "inf"], "--check-fresh-for inf"),
    ],
)
def test_a_node_check_that_makes_no_sense_is_refused(script: str, argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of(*argv, script)
    assert expected in str(raised.value)


def test_the_last_call_of_rdzv_conf_holds_for_the_first_round_too(script: str) -> None:
    settings = settings_of("--rdzv-conf", "join_timeout=900, lastcall_timeout=7,timeout=5,pend_timeout=60", script)
    limits = settings.terms.limits
    assert (limits.join_timeout, limits.last_call, limits.first_call) == (900, 7, 7)
    assert any("timeout has no effect" in note for note in settings.notes)
    assert limits.pend_timeout == 60.0


@pytest.mark.parametrize(
    "conf",
    [
        "join_timeout='900',last_call_timeout=\"7\"",
        "'join_timeout=900, last_call_timeout=7'",
        "\"join_timeout\"=900,last_call_timeout= '7' ",
    ],
)
def test_quotes_in_rdzv_conf_do_not_count(script: str, conf: str) -> None:
    limits = settings_of("--rdzv-conf", conf, script).terms.limits
    assert (limits.join_timeout, limits.last_call) == (900, 7)


@pytest.mark.peer
@pytest.mark.parametrize(
    "option",
    [
        "--rdzv-conf=timeout=1", "--rdzv-conf=is_host=true", "--rdzv-conf=etcd_prefix=/x,protocol='https'", "--rdzv-conf= a = 1 ",
        "--rdzv-conf=join_timout=1", "--rdzv-conf=a=b=c", "--event-log-handler=console",
        "--event-log-handler=dynamic_rendezvous",
    ],
)  # fmt: skip
def test_what_torchrun_accepts_and_has_no_effect_here_leaves_a_note(script: str, option: str) -> None:
    torch_run = pytest.importorskip("torch.distributed.run")
    torch_run.config_from_args(torch_run.parse_args([option, script]))
    _, settings = read_settings([option, script], {})
    assert settings.notes
    assert all("has no effect" in note for note in settings.notes)
    if "timout" in option:
        assert "Did you mean join_timeout" in settings.notes[0]


@pytest.mark.peer
@pytest.mark.parametrize("option", ["--logs-specs=default", "--monitor-interval=0", "--rdzv-conf="])
def test_what_torchrun_accepts_and_asks_for_nothing_is_accepted_in_silence(script: str, option: str) -> None:
    torch_run = pytest.importorskip("torch.distributed.run")
    torch_run.config_from_args(torch_run.parse_args([option, script]))
    assert not read_settings([option, script], {})[1].notes


@pytest.mark.parametrize(
    ("option", "kind"),
    [("--module", EntryKind.MODULE), ("-m", EntryKind.MODULE), ("--run-path", EntryKind.RUN_PATH)],
)
def test_entry_kinds(script: str, option: str, kind: EntryKind) -> None:
    assert settings_of(option, script).entry.kind is kind


def test_run_path_wins_over_no_python(script: str) -> None:
    assert settings_of("--run-path", "--no-python", script).entry.kind is EntryKind.RUN_PATH


def test_a_program_is_looked_for_on_the_path() -> None:
    assert settings_of("--no-python", "sh", "-c", "true").entry.kind is EntryKind.PROGRAM


def test_a_directory_with_a_main_module_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert settings_of(str(tmp_path)).entry.kind is EntryKind.SCRIPT


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", (0, {})), ("3", (3, {})), ("0:1,1:2", (0, {0: 1, 1: 2})), ("5:3", (0, {5: 3}))],
)
def test_streams(text: str, expected: tuple[int, dict[int, int]]) -> None:
    assert parse_streams("--tee", text) == expected


def test_log_options_keep_torchruns_meaning(script: str, tmp_path: Path) -> None:
    """A directory alone redirects nothing, as under torchrun."""
    log = settings_of("--log-dir", str(tmp_path), "--local-ranks-filter", "2,0", script).log
    assert (log.redirect_default, log.tee_default, log.local_ranks_filter) == (0, 0, (0, 2))
    assert log.log_dir == str(tmp_path)


def test_a_custom_device_is_known_to_torch_alone(script: str) -> None:
    assert settings_of("--nproc-per-node=npu", script).local_world_size == "npu"


def test_nothing_is_kept_in_dev_null(script: str) -> None:
    _, settings = read_settings(["--log-dir", os.devnull, "--tee=3", script], {})
    assert settings.log.log_dir == os.devnull
    with pytest.raises(ConfigError, match="cannot be written to"):
        read_settings(["--log-dir", script, script], {})


def test_cpu_means_the_processors_that_we_may_use(script: str) -> None:
    assert settings_of("--nproc-per-node=cpu", script).local_world_size == len(os.sched_getaffinity(0))
    assert settings_of("--nproc-per-node=auto", script).local_world_size == "auto"


def test_auto_config_never_overrides_what_was_given(script: str) -> None:
    automatic = settings_of("--auto-config", script, NODE_NUM="3")
    assert automatic.terms.limits.max_nodes == 3
    assert automatic.local_world_size == "auto"
    explicit = settings_of("--auto-config", "--nnodes=1:2", "--nproc-per-node=4", script, NODE_NUM="3")
    assert explicit.terms.limits.max_nodes == 2
    assert explicit.local_world_size == 4


def test_node_rank_of_the_platform_wins_and_says_so(script: str) -> None:
    assert settings_of("--nnodes=4", "--node-rank=1", script).node_rank == 1
    assert settings_of("--nnodes=4", script, WORKER_RANK="2").node_rank == 2
    both = settings_of("--nnodes=4", "--node-rank=1", script, NODE_RANK="3", WORKER_RANK="2")
    assert both.node_rank == 3
    assert any("takes precedence" in note for note in both.notes)
    assert settings_of("--standalone", script, NODE_RANK="3").node_rank is None


def test_rank_counts_as_node_rank_only_in_a_pod_and_not_inside_another_launchers_worker(script: str) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "2", "WORLD_SIZE": "4"}
    assert settings_of("--nnodes=4", script, **pod).node_rank == 2
    assert settings_of(script, **pod).node_rank is None
    assert settings_of("--nnodes=4", script, RANK="2", WORLD_SIZE="4").node_rank is None
    assert settings_of("--nnodes=4", script, LOCAL_RANK="0", **pod).node_rank is None
    assert settings_of("--nnodes=4", script, TORCHELASTIC_RUN_ID="x", **pod).node_rank is None


def test_shutdown_timeout_comes_from_the_flag_then_torchs_variable(script: str) -> None:
    assert settings_of(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 7
    assert settings_of("--shutdown-timeout=3", script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 3


def test_signals(script: str) -> None:
    assert settings_of("--signals-to-handle", "SIGTERM, SIGUSR1", script).signals == (signal.SIGTERM, signal.SIGUSR1)


def test_a_standalone_job_has_one_node(script: str) -> None:
    assert settings_of("--standalone", "--nnodes=1:4", script).terms.limits.max_nodes == 1


def test_effective_values_name_their_origin(script: str) -> None:
    text = effective_values(parse(["--nnodes=2", script], {"PET_ROLE": "actor"}))
    assert "nnodes='2'(flag)" in text
    assert "role='actor'(env)" in text


BAD = [
    (["--nnodes=3:2", "{script}"], {}, "--nnodes 3:2"),
    (["--nnodes=0", "{script}"], {}, "--nnodes 0"),
    (["--nnodes=abc", "{script}"], {}, "--nnodes abc"),
    (["--nnodes=1:2:3", "{script}"], {}, "--nnodes 1:2:3"),
    (["--nnodes=3", "--node-unit=2", "{script}"], {}, "--node-unit 2"),
    (["--nproc-per-node=0", "{script}"], {}, "--nproc-per-node 0"),
    (["--nproc-per-node=1.5", "{script}"], {}, "--nproc-per-node 1.5"),
    (["--max-restarts=-1", "{script}"], {}, "--max-restarts -1"),
    (["--standalone", "--nnodes=2", "{script}"], {}, "--standalone"),
    (["--rdzv-conf=a=1,", "{script}"], {}, "KEY=VALUE"),
    (["--rdzv-conf=join_timeout", "{script}"], {}, "KEY=VALUE"),
    (["--rdzv-conf=join_timeout=soon", "{script}"], {}, "number of seconds"),
    (["--rdzv-conf=join_timeout=inf", "{script}"], {}, "finite"),
    (["--redirects=7", "{script}"], {}, "--redirects 7"),
    (["--tee=0:x", "{script}"], {}, "--tee 0:x"),
    (["--local-ranks-filter=a", "{script}"], {}, "--local-ranks-filter a"),
    (["--signals-to-handle=SIGTREM", "{script}"], {}, "Did you mean SIGTERM"),
    (["--signals-to-handle=SIGKILL", "{script}"], {}, "cannot be handled"),
    (["--shutdown-timeout=-1", "{script}"], {}, "--shutdown-timeout"),
    (["--master-port=70000", "{script}"], {}, "--master-port 70000"),
    (["--node-rank=-2", "{script}"], {}, "--node-rank -2"),
    (["--preload=a-b", "{script}"], {}, "--preload a-b"),
    (
        ["--preload=-torch", "{script}"],
        {},
        "a minus can leave out only torch._dynamo and dlrover.trainer.torch.flash_checkpoint",
    ),
    (["--tls-cert=/nowhere/cert.pem", "{script}"], {}, "/nowhere/cert.pem"),
    (["--journal={script}", "{script}"], {}, "Give a directory"),
    (["--journal=/proc/nowhere", "{script}"], {}, "journal directory /proc/nowhere"),
    (["--no-python", "--module", "{script}"], {}, "exclude each other"),
    (["--no-python", "./no-such-program"], {}, "./no-such-program"),
    (["--no-python", "no-such-program"], {}, "not found on the PATH"),
    (["--no-python", "{script}"], {}, "not executable"),
    (["no-such-script.py"], {}, "no-such-script.py"),
    (["{directory}"], {}, "is a directory"),
    (["--log-dir=/proc/nowhere", "{script}"], {}, "/proc/nowhere"),
    (["--log-dir={script}/below", "{script}"], {}, "cannot be written"),
    (["--numa-affinity", "{script}"], {}, "not yet available"),
    (["--standby=-1", "{script}"], {}, "--standby -1"),
    (["--snapshot-replicas=-1", "{script}"], {}, "--snapshot-replicas -1"),
    (["--snapshot-replicas=99", "{script}"], {}, "from 0 to 8"),
    (["--snapshot-parity=4", "{script}"], {}, "--snapshot-parity 4: give K+M"),
    (["--snapshot-parity=0+1", "{script}"], {}, "--snapshot-parity 0+1"),
    (["--snapshot-parity=40+1", "{script}"], {}, "at most 32"),
    (["--snapshot-parity=2+1", "--snapshot-replicas=1", "{script}"], {}, "Give only one of them"),
    (["--snapshot-bandwidth=-5", "{script}"], {}, "--snapshot-bandwidth"),
    (["--node-silence=8", "{script}"], {}, "less than two heartbeats"),
    (["--heartbeat=0", "{script}"], {}, "--heartbeat 0"),
    (["--node-suspicion=50", "{script}"], {}, "--node-suspicion 50"),
    (["--log-patterns=/nowhere/patterns", "{script}"], {}, "--log-patterns /nowhere/patterns: No such file"),
    (["--log-patterns={script}", "{script}"], {}, "with the actions restart, relaunch and abort"),
    (["--scrape=localhost:9400", "{script}"], {}, "--scrape localhost:9400: give addresses such as"),
    (["--pre-check-ops=a.b", "{script}"], {}, "'a.b' does not have the form module::Class"),
    (["{script}"], {"XPU_TIMER_PORT": "many"}, "XPU_TIMER_PORT=many"),
    (["--topology-sorter=mine.Sorter", "{script}"], {}, "module::Class"),
    (["{script}"], {"DLROVER_TOPOLOGY_QUERIER": "a-b::C"}, "module::Class"),
    (["{script}"], {"NODE_RANK": "first"}, "NODE_RANK=first"),
    (["{script}"], {"HOST_PORTS": "1,x"}, "HOST_PORTS=1,x"),
    (["{script}"], {"PET_NNODES": "0"}, "--nnodes 0"),
]


@pytest.mark.parametrize(("argv", "environ", "expected"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_answered_with_one_paragraph_before_anything_starts(
    argv: list[str], environ: dict[str, str], expected: str, script: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = [word.format(script=script, directory=tmp_path) for word in argv]
    with pytest.raises(ConfigError) as raised:
        read_settings(words, environ)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_log_directory_is_created_and_found_writable(script: str, tmp_path: Path) -> None:
    read_settings(["--log-dir", str(tmp_path / "a" / "b"), script], {})
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(("argv", "code"), [(["--bad"], 2), ([], 2), (["--help"], 0), (["--check-env"], 0)])
def test_the_command_gives_the_exit_code_and_no_traceback(argv: list[str], code: int, tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.run", *argv], env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_starts_light(tmp_path: Path) -> None:
    """Everything that it imports delays the first worker."""
    code = (
        "import sys; from dlrover.cli import run; from dlrover.cli.launch import launcher; from dlrover.cli.options import settings, table; import dlrover.master.config; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'torch', 'grpc', 'rich', 'typer', 'asyncio', 'psutil', 'numpy', 'subprocess', 'argparse', 'hashlib'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_what_detection_was_not_given_follows_from_what_was(script: str) -> None:
    usual = settings_of(script).terms.detection
    assert usual == Detection()
    slow = settings_of("--heartbeat", "10", "--node-silence", "100", "--standby", "2", script).terms
    assert (slow.detection.suspicion, slow.detection.lease, slow.standby) == (20, 30, 2)
    quick = settings_of("--heartbeat", "1", "--node-silence", "8", "--node-grace", "0.5", script).terms.detection
    assert (quick.suspicion, quick.lease, quick.break_grace, quick.break_grace_with_spare) == (8, 6, 0.5, 0.5)


def test_variables_name_the_notice_and_the_plug_ins_and_options_win(script: str, tmp_path: Path) -> None:
    environ = {"DLROVER_PREEMPTION_FILE": str(tmp_path / "notice"), "DLROVER_TOPOLOGY_SORTER": "a.b::C"}
    _, settings = read_settings(["--topology-sorter", "mine::Sorter", script], environ)
    assert settings.preemption_file == str(tmp_path / "notice")
    assert (settings.topology_sorter, settings.topology_querier) == ("mine::Sorter", "")


def test_only_what_workers_run_may_be_other_than_valid_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "caf\udce9.py").touch()
    _, settings = read_settings(["caf\udce9.py", "--name", "\udcff"], {})
    assert settings.entry.target == b"caf\xe9.py"
    assert settings.entry.args == (b"--name", b"\xff")
    with pytest.raises(ConfigError, match=r"udce9.*not valid UTF-8"):
        read_settings(["--log-dir", "caf\udce9", "caf\udce9.py"], {})
    assert not (tmp_path / "caf\udce9").exists()


def test_a_script_in_a_pipe_is_not_read_ahead_of_time(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert settings_of(str(pipe)).entry.target == os.fsencode(pipe)  # opening it would wait for a writer
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(end, b"script")
    settings_of(str(pipe))
    assert os.read(end, 100) == b"script"
    os.close(end)
