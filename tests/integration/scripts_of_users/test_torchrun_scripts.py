"""Scripts written for torchrun run unchanged: the same command under real torchrun and under dlrover-run, compared."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until

LAUNCHERS = ("torchrun", "dlrover-run")

ABORT_AT_EXIT = "terminate called without an active exception"
"""torch 2.13 now and then aborts while a DDP process exits, after its work is done (once in some thirty runs here). torchrun then
fails; ours starts the workers again. It is not what these tests compare."""

MAY_DIFFER = {
    "TORCHELASTIC_USE_AGENT_STORE",  # ours is False: the store lives in global rank 0, where it dies with its round
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",  # compared apart: without --max-restarts ours restart as long as there is progress
    "MASTER_PORT",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""The variables whose values may differ from torchrun's; all other names and values are the same."""


def both(
    jobs: JobFactory, tmp_path: Path, *args: str, expect_code: int | None = None, **env: str
) -> dict[str, tuple[Launched, Path]]:
    """Run the same command under both launchers; FOLDER in an argument becomes a folder of each run's own."""
    runs = {}
    for launcher in LAUNCHERS:
        folder = tmp_path / launcher
        folder.mkdir()
        job = jobs.start(launcher, *(arg.replace("FOLDER", str(folder)) for arg in args), cwd=folder, **env)
        runs[launcher] = (job, folder)
        code = job.wait()
        for _ in range(2):
            if launcher == "torchrun" and ABORT_AT_EXIT in job.err:
                job = jobs.start(launcher, *(arg.replace("FOLDER", str(folder)) for arg in args), cwd=folder, **env)
                runs[launcher] = (job, folder)
                code = job.wait()
        if expect_code is not None:
            assert code == expect_code, f"{launcher}: {job.out}\n{job.err}"
    assert runs["torchrun"][0].process.returncode == runs["dlrover-run"][0].process.returncode
    return runs


def files(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob(pattern))}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        pytest.param(["--nproc-per-node=2", f"{SCRIPTS}/ddp.py", "FOLDER"], "ddp-*", id="ddp with gloo"),
        pytest.param(
            ["--standalone", "--nproc_per_node", "2", f"{SCRIPTS}/ddp.py", "FOLDER"],
            "ddp-*",
            id="standalone",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            ["--nproc-per-node=auto", f"{SCRIPTS}/ddp.py", "FOLDER"], "ddp-*", id="nproc auto", marks=pytest.mark.chaos
        ),
        pytest.param(
            ["--nproc-per-node=cpu", f"{SCRIPTS}/ddp.py", "FOLDER"], "ddp-*", id="nproc cpu", marks=pytest.mark.chaos
        ),
        pytest.param(
            ["--nproc-per-node=2", "-m", "pkg.module", "FOLDER", "--lr", "1"], "module-*", id="module with arguments"
        ),
        pytest.param(
            ["--nproc-per-node=2", "--no-python", f"{SCRIPTS}/program.sh", "FOLDER", "x"], "program-*", id="no python"
        ),
    ],
)
def test_same_results(jobs, tmp_path, options, pattern):
    runs = both(jobs, tmp_path, *options, expect_code=0, PYTHONPATH=str(SCRIPTS))
    torchrun, ours = (files(folder, pattern) for _, folder in runs.values())
    assert torchrun == ours
    assert torchrun


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_from_a_pipe(jobs, launcher):
    script = b"import sys; print('here', sys.argv[1:], flush=True); raise SystemExit(3)"
    job = jobs.start(launcher, "--max-restarts=0", "/dev/stdin", "--lr", "1", stdin=script)
    assert job.wait() == 1, job.err
    assert "here ['--lr', '1']" in job.out


@pytest.mark.parametrize("options", [[], ["--run-path"], ["--no-warm"]], ids=["warm", "run path", "cold"])
def test_all_workers_and_restarts_get_the_script_of_a_pipe(jobs, tmp_path, options):
    """Beyond torchrun, whose second worker would find an empty script and succeed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = jobs.start("dlrover-run", "--nproc-per-node=2", "--max-restarts=1", *options, pipe)
    pipe.write_text(
        "import os, pathlib, sys\n"
        "rank, life = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "pathlib.Path(f'ran-{rank}-{life}').touch()\n"
        "sys.exit(rank == '1' and life == '0')\n"
    )
    assert job.wait() == 0, job.err
    assert {path.name for path in tmp_path.glob("ran-*-1")} == {"ran-0-1", "ran-1-1"}


@pytest.mark.parametrize("options", [[], ["--no-warm"]], ids=["warm", "cold"])
def test_arguments_that_are_no_valid_text(jobs, tmp_path, options):
    script = tmp_path / "caf\udce9.py"
    script.write_text("import os, sys; open(sys.argv[1], 'xb').write(os.fsencode(repr(os.fsencode(sys.argv[2]))))")
    args = [script, "FOLDER/found", "caf\udce9 $HOME"]
    if options:
        job = jobs.run(*options, script, tmp_path / "found", args[2])
        assert job.process.returncode == 0, job.err
        found = [tmp_path / "found"]
    else:
        runs = both(jobs, tmp_path, *map(str, args), expect_code=0)
        found = [folder / "found" for _, folder in runs.values()]
    assert {path.read_text() for path in found} == {repr(b"caf\xe9 $HOME")}


def test_a_failure_whose_words_are_no_valid_text(jobs, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("import sys; open(sys.argv[1])")
    job = jobs.run("--max-restarts=0", script, "caf\udce9")
    assert job.process.returncode == 1, job.err
    assert "No such file or directory: 'caf" in job.err
    assert "bug in the agent" not in job.err
    missing = jobs.run("--max-restarts=0", "--no-python", "sh", "-c", 'exec "$0"', "./caf\udce9")
    assert missing.process.returncode == 1, missing.err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_workers_get_the_very_signal_that_was_asked_for(jobs, tmp_path, launcher):
    job = jobs.start(
        launcher, "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1", SCRIPTS / "heard.py", tmp_path
    )
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60, lambda: job.err)
    job.signal(signal.SIGUSR1)
    code = job.wait()
    assert files(tmp_path, "heard-*") == {"heard-0": "SIGUSR1", "heard-1": "SIGUSR1"}
    if launcher == "dlrover-run":
        assert code == 128 + signal.SIGUSR1


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_workers_do_not_find_the_token_of_their_job_in_the_environment(jobs, tmp_path):
    """Nor in that of the processes above them: programs like to log their environment, and their parents'."""
    script = tmp_path / "environments.py"
    script.write_text(
        "import os\n"
        "pid, found = os.getpid(), []\n"
        "for _ in range(2):  # this worker, and its agent\n"
        "    found.append(b'DLROVER_JOB_TOKEN' in open(f'/proc/{pid}/environ', 'rb').read())\n"
        "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "print('found:', 'DLROVER_JOB_TOKEN' in os.environ, *found)\n"
    )
    job = jobs.run("--no-warm", script, DLROVER_JOB_TOKEN="a-secret-of-this-test")
    assert job.process.returncode == 0, job.err
    assert "found: False False False" in job.out


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_in_brackets(jobs, tmp_path):
    with socket.socket(
        socket.AF_INET6
    ) as seat:  # bound and not listening: everybody else binds beside it, or elsewhere
        seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        seat.bind(("::1", 0))
        options = ["--nproc-per-node=2", "--master-addr=[::1]", f"--master-port={seat.getsockname()[1]}"]
        runs = both(jobs, tmp_path, *options, f"{SCRIPTS}/dump_env.py", "FOLDER", expect_code=0)
        ours = jobs.run(*options, SCRIPTS / "ddp.py", tmp_path)
    hosts = [json.loads((folder / "env-1.json").read_text())["MASTER_ADDR"] for _, folder in runs.values()]
    assert hosts == ["::1", "::1"]
    assert ours.process.returncode == 0, ours.err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="defaults", marks=pytest.mark.chaos),
        pytest.param(["--max-restarts=2", "--role=trainer"], id="role and restarts"),
    ],
)
def test_same_environment(jobs, tmp_path, options):
    runs = both(jobs, tmp_path, "--nproc-per-node=2", *options, f"{SCRIPTS}/dump_env.py", "FOLDER", expect_code=0)
    for rank in (0, 1):
        theirs, ours = (json.loads((folder / f"env-{rank}.json").read_text()) for _, folder in runs.values())
        # The launchers inherit DLROVER_ variables from this test as well, so they are left out on both sides.
        theirs, ours = (
            {name: value for name, value in env.items() if not name.startswith("DLROVER_")} for env in (theirs, ours)
        )
        ours.pop("RUNTIME_METRICS_PATH")
        if "--max-restarts=2" in options:
            assert ours["TORCHELASTIC_MAX_RESTARTS"] == theirs["TORCHELASTIC_MAX_RESTARTS"]
        assert set(ours) == set(theirs)
        same = set(theirs) - MAY_DIFFER
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("exception", 1, marks=pytest.mark.chaos),
        pytest.param("exit", 1, marks=pytest.mark.chaos),
        pytest.param("sys-exit", 1, marks=pytest.mark.chaos),
        pytest.param("text", 1, marks=pytest.mark.chaos),
        pytest.param("SIGSEGV", 1, marks=pytest.mark.chaos),
        ("SIGKILL", 1),
    ],
)
def test_same_exit_code(jobs, tmp_path, how, code):
    both(
        jobs, tmp_path, "--nproc-per-node=2", "--max-restarts=0", f"{SCRIPTS}/fail.py", how, "--always", "--folder=FOLDER",
        expect_code=code,
    )  # fmt: skip


def test_a_program_that_fails(jobs, tmp_path):
    both(
        jobs, tmp_path, "--nproc-per-node=2", "--max-restarts=0", "--no-python", f"{SCRIPTS}/program.sh", "FOLDER", "x",
        expect_code=1, EXIT_WITH="7",
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--log-dir=FOLDER/logs"], marks=pytest.mark.chaos, id="log dir alone"),
        pytest.param(["--log-dir=FOLDER/logs", "--redirects=3"], marks=pytest.mark.chaos, id="--redirects=3"),
        pytest.param(["--log-dir=FOLDER/logs", "--tee=3"], marks=pytest.mark.chaos, id="--tee=3"),
        pytest.param(
            ["--log-dir=FOLDER/logs", "--redirects=0:1,1:2"], marks=pytest.mark.chaos, id="--redirects=0:1,1:2"
        ),
        ["--log-dir=FOLDER/logs", "--tee=3", "--local-ranks-filter=1"],
        pytest.param(
            ["--log-dir=FOLDER/logs", "--redirects=3", "--local-ranks-filter=0"],
            marks=pytest.mark.chaos,
            id="--redirects=3 --local-ranks-filter=0",
        ),
    ],
    ids=lambda options: " ".join(options[1:]),
)
def test_same_log_files_and_console(jobs, tmp_path, options):
    runs = both(jobs, tmp_path, "--nproc-per-node=2", *options, f"{SCRIPTS}/dump_env.py", "FOLDER", expect_code=0)
    seen = []
    for job, folder in runs.values():
        logs = {
            re.sub(r"^[^/]*/", "RUN/", str(path.relative_to(folder / "logs"))): path.read_text()
            for path in sorted((folder / "logs").rglob("*"))
            if path.is_file()
        }
        console = [sorted(line for line in text.splitlines() if "of rank" in line) for text in (job.out, job.err)]
        seen.append((logs, console))
    assert seen[0] == seen[1]


def test_logs_that_go_to_dev_null(jobs, tmp_path):
    options = ["--log-dir=/dev/null", "--redirects=3", "--nproc-per-node=2"]
    runs = both(jobs, tmp_path, *options, f"{SCRIPTS}/dump_env.py", "FOLDER", expect_code=0)
    consoles = [sorted(line for line in job.out.splitlines() if "of rank" in line) for job, _ in runs.values()]
    assert consoles[0] == consoles[1]
    wrong = jobs.run("--nproc-per-node=some", SCRIPTS / "dump_env.py", tmp_path)
    assert wrong.process.returncode == 2
    assert "--nproc-per-node=some: torch has no device type some here" in wrong.err
    assert "Traceback" not in wrong.err


def test_recorded_errors_are_shown(jobs, tmp_path):
    runs = both(jobs, tmp_path, "--nproc-per-node=2", "--max-restarts=0", f"{SCRIPTS}/recorded.py", expect_code=1)
    ours = runs["dlrover-run"][0].err
    assert "recorded failure of rank 1" in ours
    assert re.search(r"rank\s+1\b", ours)


def test_two_elastic_nodes_on_one_machine(jobs, tmp_path, reserved_port):
    """--nnodes=1:2 with two launchers on one machine, as under torchrun with c10d."""
    args = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{reserved_port}",
        "--rdzv-id=pair",
        "--rdzv-conf=last_call_timeout=60",
    ]
    nodes = [jobs.start("dlrover-run", *args, SCRIPTS / "ddp.py", tmp_path) for _ in range(2)]
    for node in nodes:
        assert node.wait() == 0, node.err
    sums = {name: text.split()[0] for name, text in files(tmp_path, "ddp-*").items()}
    assert sums == {"ddp-0": "1.0", "ddp-1": "1.0"}


def test_two_static_nodes_by_rank(jobs, tmp_path, reserved_port):
    """The static torchrun form: explicit ranks and a master address, one launcher per node."""
    args = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    nodes = [
        jobs.start("dlrover-run", *args, f"--node-rank={rank}", SCRIPTS / "dump_env.py", tmp_path) for rank in (1, 0)
    ]
    for node in nodes:
        assert node.wait() == 0, node.err
    ranks = [json.loads(text) for text in files(tmp_path, "env-*.json").values()]
    assert [(env["RANK"], env["GROUP_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) for env in ranks] == [
        ("0", "0", "2", "1"),
        ("1", "1", "2", "1"),
    ]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_script_that_names_the_master_port_itself_survives_a_kill(jobs, tmp_path, reserved_port, num_nodes):
    """The port belongs to the script, in every life."""
    args = [f"--nnodes={num_nodes}", f"--nproc-per-node={2 // num_nodes}", "--master-addr=127.0.0.1"]
    args += [f"--master-port={reserved_port}"]
    script = [SCRIPTS / "steps.py", tmp_path, f"tcp://127.0.0.1:{reserved_port}"]
    nodes = [jobs.start("dlrover-run", *args, f"--node-rank={rank}", *script) for rank in range(num_nodes)]

    def steps(life: int) -> bool:
        found = files(tmp_path, "steps-*")
        return len(found) == 2 and all(text.splitlines()[-1].startswith(f"{life} ") for text in found.values())

    told = lambda: "\n".join(node.err for node in nodes)  # noqa: E731
    wait_until(lambda: steps(0), explain=told)
    os.kill(int((tmp_path / "pid-0").read_text().split()[0]), signal.SIGKILL)  # the store lives there
    wait_until(lambda: steps(1), explain=told)
    (tmp_path / "stop").touch()
    for node in nodes:
        assert node.wait() == 0, node.err
    assert "EADDRINUSE" not in told()
