"""`dlrover job`: what people type, what they read, and the exit codes that scripts rely on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml

from dlrover.platforms.kubernetes.api import ELASTIC_JOBS, PODS, PatchKind
from tests.kubernetes.commands.conftest import Terminal
from tests.kubernetes.operator.lab import DEADLINE, REPOSITORY, job_body, master, read, taken
from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.serving import kubeconfig


def job_file(folder: Path, **spec: object) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_body("demo", **spec)))
    return str(path)


async def tell(terminal: Terminal, **status: object) -> None:
    body = {"status": status}
    taken(
        await terminal.lab.api.patch(
            ELASTIC_JOBS, "demo", body, namespace="default", kind=PatchKind.MERGE, subresource="status"
        )
    )


async def line_with(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"{text!r} was not said")


class TestSubmit:
    async def test_wait_shows_progress_and_exits_as_the_job_does(self, terminal: Terminal, tmp_path: Path) -> None:
        process = await terminal.start("job", "submit", job_file(tmp_path), "--wait")
        await line_with(process, "Job demo is submitted to default.")
        await tell(terminal, phase="Running", ready="1/2", round=1, lastStep=7)
        assert await line_with(process, "Running") == "Running, ready 1/2, round 1, step 7\n"
        ended = [{"type": "Succeeded", "status": "True", "reason": "Completed", "message": "All is done."}]
        await tell(terminal, phase="Succeeded", conditions=ended)
        await line_with(process, "All is done.")
        assert await process.wait() == 0

    async def test_a_failed_job_is_exit_code_1(self, terminal: Terminal, tmp_path: Path) -> None:
        process = await terminal.start("job", "submit", job_file(tmp_path), "--wait")
        await line_with(process, "submitted")
        ended = [{"type": "Failed", "status": "True", "reason": "WorkerError", "message": "It broke."}]
        await tell(terminal, phase="Failed", conditions=ended)
        await line_with(process, "It broke.")
        assert await process.wait() == 1

    async def test_ctrl_c_leaves_the_job_and_says_how_to_stop_it(self, terminal: Terminal, tmp_path: Path) -> None:
        process = await terminal.start("job", "submit", job_file(tmp_path), "--wait")
        await line_with(process, "submitted")
        await tell(terminal, phase="Running", ready="2/2")
        await line_with(process, "Running")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE):
            _, err = await process.communicate()
        assert process.returncode == 130
        assert "The job demo keeps running. Stop it with: dlrover job stop demo -n default" in err.decode()
        assert (await terminal.lab.job())["status"]["phase"] == "Running"

    async def test_a_command_line_becomes_a_job(self, terminal: Terminal) -> None:
        words = ["job", "submit", "--name", "points", "--image", "img:1", "--nodes", "2:4", "--memory", "2Gi"]
        shown = yaml.safe_load(await terminal.says(*words, "--dry-run", "--", "dlrover-run", "--nnodes=2:4", "a.py"))
        worker = shown["spec"]["replicaSpecs"]["worker"]
        assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (4, 2, 4)
        assert worker["template"]["spec"]["containers"][0]["command"] == ["dlrover-run", "--nnodes=2:4", "a.py"]
        assert "No jobs." in await terminal.says("job", "list", "-n", "default"), "a dry run creates nothing"
        await terminal.says(*words, "--", "dlrover-run", "--nnodes=2:4", "a.py")
        assert (await terminal.lab.job("points"))["spec"] == shown["spec"]

    async def test_what_the_job_needs_is_made_before_it(self, terminal: Terminal, tmp_path: Path) -> None:
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "program"}, "data": {"a.py": "pass"}}
        path = tmp_path / "both.yaml"
        path.write_text(yaml.safe_dump_all([job_body("demo"), config]))
        await terminal.says("job", "submit", str(path))
        assert (await terminal.lab.job())["metadata"]["name"] == "demo"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("spec: {", "is not valid YAML"),
            ("kind: Pod\nmetadata: {name: a}\n", "holds 0 ElasticJobs"),
            (yaml.safe_dump(job_body("a" * 40)), "The API server rejected ElasticJob"),
            (yaml.safe_dump(job_body("a", replicaSpecs={"wurker": {"replicas": 1}})), "The API server rejected"),
        ],
    )
    async def test_a_file_with_a_mistake_is_exit_code_2(
        self, terminal: Terminal, tmp_path: Path, text: str, said: str
    ) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        code, _, err = await terminal.run("job", "submit", str(path))
        assert code == 2
        assert said in err
        assert len(err.splitlines()) == 1, "a sentence, no traceback"

    async def test_a_name_that_is_taken_is_said(self, terminal: Terminal, tmp_path: Path) -> None:
        await terminal.says("job", "submit", job_file(tmp_path))
        code, _, err = await terminal.run("job", "submit", job_file(tmp_path))
        assert (code, "already exists in default" in err) == (2, True)


class TestTrouble:
    async def test_no_cluster_no_definitions_and_no_rights_are_exit_code_2(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        code, _, err = await terminal.run("job", "list", "-n", "a", KUBECONFIG=str(tmp_path / "none"))
        assert (code, len(err.splitlines())) == (2, 1)
        away = yaml.safe_load(terminal.lab.server.kubeconfig.read_text())
        away["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
        (tmp_path / "away").write_text(yaml.safe_dump(away))
        code, _, err = await terminal.run("job", "list", "-n", "a", KUBECONFIG=str(tmp_path / "away"))
        assert (code, "No cluster answers at http://127.0.0.1:1" in err) == (2, True)

    async def test_without_rights_each_command_says_which_is_missing(self, terminal: Terminal, tmp_path: Path) -> None:
        terminal.lab.server.cluster.tokens.add("of-bob", User("bob", ("system:authenticated",)))
        path = tmp_path / "bob"
        path.write_text(yaml.safe_dump(kubeconfig(terminal.lab.server.url, "of-bob")))
        for words in (
            ("list", "-n", "default"),
            ("describe", "demo", "-n", "default"),
            ("stop", "demo", "-n", "default"),
            ("suspend", "demo", "-n", "default"),
            ("submit", job_file(tmp_path), "--wait"),
        ):
            code, _, err = await terminal.run("job", *words, KUBECONFIG=str(path))
            assert code == 2, words
            assert "You may not " in err, words
            assert 'User "bob" cannot' in err, words
            assert len(err.splitlines()) == 1, "a sentence, no traceback"

    async def test_a_cluster_without_the_definitions_says_what_to_install(self, tmp_path: Path) -> None:
        from tests.kubernetes.operator.lab import open_lab

        async with open_lab(tmp_path) as lab:
            code, _, err = await Terminal(lab, tmp_path).run("job", "list", "-n", "default")
        assert (code, "has no ElasticJob resource" in err) == (2, True)

    async def test_a_job_that_is_not_there_is_named_with_those_that_are(self, terminal: Terminal) -> None:
        await terminal.lab.apply("other")
        for verb in ("describe", "logs", "stop", "suspend", "resume"):
            code, _, err = await terminal.run("job", verb, "demo", "-n", "default")
            assert code == 2, verb
            assert "There is no job demo in the namespace default. Jobs there: other." in err, verb


class TestSteering:
    async def test_suspend_resume_scale_and_stop_change_the_object(self, terminal: Terminal) -> None:
        await terminal.lab.apply()
        await terminal.says("job", "suspend", "demo")
        assert (await terminal.lab.job())["spec"]["suspend"] is True
        await terminal.says("job", "resume", "demo")
        assert (await terminal.lab.job())["spec"]["suspend"] is False
        await terminal.says("job", "scale", "demo", "5")
        assert (await terminal.lab.job())["spec"]["replicaSpecs"]["worker"]["replicas"] == 5
        await terminal.says("job", "scale", "demo", "6", "--min", "4", "--max", "8")
        worker = (await terminal.lab.job())["spec"]["replicaSpecs"]["worker"]
        assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (6, 4, 8)
        await terminal.says("job", "scale", "demo", "3")
        worker = (await terminal.lab.job())["spec"]["replicaSpecs"]["worker"]
        assert (worker["replicas"], worker["minReplicas"], worker["maxReplicas"]) == (3, 3, 8), "it lay outside"
        code, _, err = await terminal.run("job", "scale", "demo", "9", "--max", "8")
        assert (code, "lie outside" in err) == (2, True)
        code, _, err = await terminal.run("job", "scale", "demo", "5", "--type", "ps")
        assert (code, "has no nodes of type ps" in err) == (2, True)
        await terminal.says("job", "stop", "demo", "--reason", "enough")
        assert (await terminal.lab.job())["metadata"]["annotations"]["elasticjob.dlrover/stop"] == "enough"
        await terminal.says("job", "stop", "demo", "--delete")
        assert await terminal.lab.names_of(ELASTIC_JOBS) == []

    async def test_a_suspension_that_loses_the_journal_is_warned_about(self, terminal: Terminal) -> None:
        await terminal.lab.apply("lost")
        _, _, before = await terminal.run("job", "suspend", "lost")
        assert "journal" not in before, "a job that never ran loses nothing"
        for name, journal in (("kept", {"size": "1Gi"}), ("lost", None)):
            if journal:
                await terminal.lab.apply(name, master={"journal": journal})
            status = {"status": {"phase": "Running", "master": {"index": 0}}}
            answer = await terminal.lab.api.patch(
                ELASTIC_JOBS, name, status, namespace="default", kind=PatchKind.MERGE, subresource="status"
            )
            taken(answer)
            code, _, said = await terminal.run("job", "suspend", name)
            assert (code, "The journal goes with the master's pod" in said) == (0, name == "lost"), said

    async def test_list_and_describe_tell_what_is(self, terminal: Terminal) -> None:
        await terminal.lab.start_operator()
        await terminal.lab.apply()
        await terminal.lab.has_pods(master())
        await terminal.lab.bring_up(master())
        await terminal.lab.phase_is("Running")
        listed = (await terminal.says("job", "list", "-n", "default")).splitlines()
        assert listed[1].split()[:4] == ["demo", "default", "Running", "0/2"]
        told = await terminal.says("job", "describe", "demo")
        assert "Job demo in default: Running, ready 0/2" in told
        assert f"master  {master()}  Running" in told
        assert "JobRunning" in told
        assert (await terminal.says("ls", "-n", "default")).splitlines()[1].split()[0] == "demo", "short forms"
        assert "Job demo in default" in await terminal.says("describe", "demo", "-n", "default")

    async def test_logs_of_a_rank_are_printed(self, terminal: Terminal) -> None:
        uid = read(taken(await terminal.lab.try_to_apply()))["metadata"]["uid"]
        labels = {
            "elasticjob.dlrover/uid": uid,
            "elasticjob.dlrover/replica-type": "worker",
            "elasticjob.dlrover/rank-index": "1",
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "demo-edljob-worker-1", "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "x"}]},
        }
        taken(await terminal.lab.api.create(PODS, body, namespace="default"))
        url = f"{terminal.lab.server.url}/test/logs/default/demo-edljob-worker-1"
        headers = {"Authorization": f"Bearer {terminal.lab.server.token}"}
        request = urllib.request.Request(url, data=b"step 1\nstep 2\n", method="PUT", headers=headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request).close())
        assert await terminal.says("job", "logs", "demo", "--node", "1") == "step 1\nstep 2\n"
        assert await terminal.says("job", "logs", "demo", "--node", "worker-1", "--tail", "1") == "step 2\n"
        code, out, err = await terminal.run("job", "logs", "demo", "--rank", "1")
        assert (code, out, err) == (0, "step 1\nstep 2\n", "dlrover: notice: --rank is called --node now.\n")
        code, _, err = await terminal.run("job", "logs", "demo")
        assert (code, "has no pod of worker-0. It has: worker-1." in err) == (2, True)


class TestPlugin:
    async def test_kubectl_finds_the_program_under_its_name(self, terminal: Terminal, tmp_path: Path) -> None:
        """kubectl runs `kubectl-dlrover job list` for `kubectl dlrover job list`; without a kubectl we run it ourselves."""
        scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
        assert scripts["kubectl-dlrover"] == scripts["dlrover"] == "dlrover.cli.main:main"
        plugin = tmp_path / "bin" / "kubectl-dlrover"
        plugin.parent.mkdir()
        plugin.write_text(f'#!/bin/sh\ncd {REPOSITORY} && exec {sys.executable} -m dlrover.cli.main "$@"\n')
        plugin.chmod(0o755)
        await terminal.lab.apply()
        environ = os.environ | {
            "PATH": f"{plugin.parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(terminal.lab.server.kubeconfig),
        }
        kubectl = shutil.which("kubectl")
        words = [kubectl, "dlrover"] if kubectl else [str(plugin)]
        process = await asyncio.create_subprocess_exec(
            *words, "job", "list", "-n", "default", env=environ, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DEADLINE):
            out, _ = await process.communicate()
        assert (process.returncode, b"demo" in out) == (0, True)
