"""Ways to start a job on Ray, and the sentences for those that cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import ray

from dlrover.cli.ray.driver import SubmittedJob
from dlrover.cli.ray.host import RayHost
from dlrover.cli.ray.messages import HOST, RayJobPlan
from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.starter import RayNodes
from dlrover.platforms.ray.store import JobStore, Registered, Registry
from dlrover.unified import RayJob
from tests.ray.jobs import TRAINED_STEPS, dlrover, run_dlrover
from tests.ray.lab import RayLab, until

SAYS = "import os; os.write(1, 'rank {RANK} of {WORLD_SIZE} {COLOUR}\\n'.format(**{'COLOUR': '', **os.environ}).encode())\n"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    return str(path)


def test_a_job_from_python(lab: RayLab, script: str):
    job = RayJob(script, nodes=2, env={"COLOUR": "green"}, name="from-python").submit()
    assert job.wait(timeout=180) == 0
    lab.await_nothing_left(script)


def test_a_job_from_python_shows_its_output_and_its_status_and_is_stopped(lab: RayLab, tmp_path: Path):
    job = RayJob(TRAINED_STEPS, args=[str(tmp_path)], nodes=(1, 2), name="watched").submit()
    until(lambda: list(tmp_path.glob("steps-*")))
    assert job.status().job_name == "watched"
    job.stop()
    assert job.wait(timeout=180) == 143
    lab.await_nothing_left(TRAINED_STEPS)


def test_logs_of_a_job_come_from_all_nodes(lab: RayLab, script: str):
    job = RayJob(script, nodes=2, nproc_per_node=2, env={"COLOUR": "blue"}).submit()
    lines = list(job.logs(follow=True))
    assert sorted(line.partition("] ")[2].strip() for line in lines if "rank" in line) == [
        f"rank {rank} of 4 blue" for rank in range(4)
    ]
    assert job.wait(timeout=60) == 0


def test_logs_are_printed_by_the_command_until_now_and_to_the_end(lab: RayLab, tmp_path: Path):
    script = tmp_path / "talks.py"
    script.write_text(
        "import pathlib, sys, time\nprint('first line', flush=True)\n"
        "while not pathlib.Path(sys.argv[1], 'stop').exists():\n    time.sleep(0.05)\n"
        "print('last line', flush=True)\n"
    )
    job = RayJob(str(script), args=[str(tmp_path)], name="talker").submit()
    logs = ("ray", "logs", "talker", "--address", lab.address)
    until(lambda: "] first line" in (shown := run_dlrover(*logs)).stdout and shown.returncode == 0)
    with subprocess.Popen(dlrover(*logs, "-f"), stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert any("] first line" in line for line in iter(following.stdout.readline, ""))
        (tmp_path / "stop").touch()
        assert "] last line" in following.stdout.read()
        assert following.wait(60) == 0
    assert job.wait(timeout=60) == 0
    unknown = run_dlrover("ray", "logs", "no-such-job", "--address", lab.address)
    assert unknown.returncode != 0
    assert "no-such-job" in unknown.stderr
    lab.await_nothing_left(str(script))


def test_the_launcher_runs_a_whole_job_on_ray(lab: RayLab, script: str):
    environ = {**os.environ, "RAY_ADDRESS": lab.address, "DLROVER_RAY_OPTIONS": "--cpus 0.5 --env COLOUR=red"}
    words = ["--platform", "ray", "--nnodes", "2", "--nproc-per-node", "1", "--job-name", "launched", script]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "dlrover.cli.run", *words],
        capture_output=True,
        text=True,
        timeout=180,
        env=environ,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert "rank 1 of 2 red" in ended.stdout
    assert "job launched: 2 nodes of 0.5 CPU" in ended.stderr
    lab.await_nothing_left(script)


def test_a_job_file_of_the_original(lab: RayLab, script: str, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "spec:\n  distributionStrategy: AllreduceStrategy\n  replicaSpecs:\n    worker:\n      replicas: 2\n"
        f"      restartCount: 1\n      resource: {{cpu: 500m, memory: 256Mi}}\n      command: dlrover-run {script}\n"
    )
    ended = run_dlrover(
        "master", "--platform", "ray", "--job_name", "filed", "--job_spec", str(file), RAY_ADDRESS=lab.address
    )
    assert ended.returncode == 0, ended
    assert "job filed: 2 nodes of 0.5 CPU, 256 MiB memory" in ended.stderr
    assert "rank 0 of 2" in ended.stdout
    lab.await_nothing_left(script)


def test_the_working_directory_travels_along(lab: RayLab, tmp_path: Path):
    code = tmp_path / "code"
    code.mkdir()
    script = f"train-{os.getpid()}.py"  # of all processes of this machine, only ours name it
    (code / script).write_text("import helper\n")
    (code / "helper.py").write_text("import os; print('helped from', os.getcwd())\n")
    ended = run_dlrover("ray", "run", "--address", lab.address, "--working-dir", str(code), "--", script)
    assert ended.returncode == 0, ended
    assert "helped from" in ended.stdout
    assert str(code) not in ended.stdout
    lab.await_nothing_left(script)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--cpus", "-1"), "--cpus -1: give a number of 0 or more"),
        (("--cpus", "nan"), "--cpus nan: give a number of 0 or more"),
        (("--gpus", "1.5"), "--gpus 1.5: give a whole number"),
        (
            ("--cpus", "64"),
            "No machine of this cluster is large enough: a node asks for 64 CPU, and the most that a machine has is 1 CPU",
        ),
        (("--gpus", "8"), "a node asks for 1 CPU, 8 GPU, and the most that a machine has is 0 GPU"),
        (("--resource", "CPU=3"), "Use --cpus for processors"),
        (("--placement", "everywhere"), "give spread, strict-spread, pack"),
        (("--working-dir", "/nowhere"), "there is no such directory"),
        (("--nodes", "3:2"), "--nodes"),
        (("--env", "NO_SUCH_VARIABLE"), "this variable is not set on this machine"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    lab: RayLab, script: str, options: tuple[str, ...], sentence: str
):
    ended = run_dlrover("ray", "run", "--address", lab.address, *options, "--", script)
    assert ended.returncode == 2, ended
    assert sentence in ended.stderr
    assert lab.leftovers(script) == []


def test_no_cluster_at_all(script: str, tmp_path: Path):
    """In a pid namespace of its own: without an address Ray joins any cluster whose processes it sees."""
    alone = ("unshare", "--pid", "--fork", "--mount-proc")
    if os.getuid() != 0 or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the test needs root, to hide the clusters of this machine")
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [*alone, *dlrover("ray", "run", "--", script)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**environ, "RAY_TMPDIR": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert ended.returncode == 2, ended
    assert "No Ray cluster answers at auto" in ended.stderr
    assert "ray start --head" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_cluster_and_a_wrong_address(script: str):
    ended = run_dlrover("ray", "run", "--address", "127.0.0.1:1", "--", script)
    assert ended.returncode == 2
    assert "127.0.0.1:1" in ended.stderr
    assert "--address" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_script_that_is_not_on_the_machines(lab: RayLab):
    ended = run_dlrover("ray", "run", "--address", lab.address, "--job-name", "lost", "--", "/no/such/train.py")
    assert ended.returncode == 2, ended
    assert "/no/such/train.py does not exist on the machine" in ended.stderr
    assert "--working-dir" in ended.stderr
    lab.await_nothing_left("/no/such/train.py")


def test_another_version_of_ray(lab: RayLab, script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A driver that says it has another Ray: its first lines pretend so."""
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.59.1'\n")
    ended = run_dlrover("ray", "run", "--address", lab.address, "--", script, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2, ended
    assert "another version of Ray or Python" in ended.stderr
    assert lab.leftovers(script) == []


def test_a_job_whose_host_was_lost_for_good_is_cleaned_up(lab: RayLab, tmp_path: Path):
    job = RayJob(TRAINED_STEPS, args=[str(tmp_path)], name="orphan").submit()
    until(lambda: list(tmp_path.glob("steps-*")))
    ray.kill(ray.get_actor(HOST, namespace=namespace_of(job._job.job_uid)), no_restart=True)
    until(lambda: lab.actors() == [f"{namespace_of(job._job.job_uid)}:node-0"])
    cleaned = run_dlrover("ray", "clean", "--address", lab.address)
    assert "removed: job orphan" in cleaned.stdout, cleaned
    lab.await_nothing_left(TRAINED_STEPS)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_host_whose_driver_died_before_the_job_began_goes(lab: RayLab, is_stopped: bool):
    """Its name is free then, and the reason is kept."""

    class Host(RayHost):
        begin_timeout = 1000.0 if is_stopped else 0.1

    uid, name = "abandoned-uid", "abandoned"
    nodes = RayNodes(job_uid=uid, job_name=name, argv=("-c", "pass"))
    JobStore(uid).write_plan(msgspec.json.encode(RayJobPlan(job_uid=uid, job_name=name, nodes=nodes, master=None)))
    assert Registry().add(name, Registered(job_uid=uid))
    options = {"name": HOST, "namespace": namespace_of(uid), "lifetime": "detached", "num_cpus": 0}
    host = ray.remote(Host).options(**options).remote(uid)
    if is_stopped:
        SubmittedJob(ray, name, uid).stop()
    result = until(lambda: Registry().result(name))
    assert result.exit_code == (143 if is_stopped else 1)
    assert is_stopped or "The program that submitted the job ended before the job began" in result.report
    Registry().forget_result(name)
    lab.await_nothing_left()
    del host
