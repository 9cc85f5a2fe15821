"""The master's pod: whose word counts for which field."""

from __future__ import annotations

from typing import Any

from dlrover.operator.master_pod import master_pod, max_restarts, option_problem
from dlrover.operator.owned import owned_objects
from tests.operator.model import make_job, template


def built(**spec: Any) -> dict[str, Any]:
    return master_pod(make_job(**spec), 0, "master:1")


def main_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in pod["spec"]["containers"] if each["name"] == "main")


def with_template(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"worker": {"template": template()}, "dlrover-master": {"template": given, **more}}


def test_the_default_pod() -> None:
    pod = built()
    main = main_of(pod)
    assert main["image"] == "master:1"
    assert main["imagePullPolicy"] == "Always"
    assert main["command"] == [
        *("python", "-m", "dlrover.python.master.main", "--platform", "pyk8s", "--namespace", "team"),
        *("--job_name", "demo", "--port", "50001", "--host", "0.0.0.0"),
        *("--journal", "/var/lib/dlrover/journal/journal.sqlite", "--token_file", "/var/run/dlrover/token/token"),
    ]
    wanted = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}
    assert main["resources"] == {"requests": wanted, "limits": wanted}
    assert pod["metadata"]["name"] == "elasticjob-demo-dlrover-master-0"
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/name": "elasticjob",
        "elasticjob.dlrover/name": "demo",
        "elasticjob.dlrover/uid": "uid-1",
        "elasticjob.dlrover/replica-type": "dlrover-master",
        "elasticjob.dlrover/replica-index": "0",
    }
    spec = pod["spec"]
    assert spec["restartPolicy"] == "OnFailure"
    assert spec["serviceAccountName"] == "elasticjob-demo-master"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["dlrover-journal"]["emptyDir"] == {}
    assert volumes["dlrover-token"]["secret"]["secretName"] == "elasticjob-demo-token"
    mounts = {mount["name"]: mount for mount in main["volumeMounts"]}
    assert mounts["dlrover-token"]["readOnly"]
    assert {toleration["tolerationSeconds"] for toleration in spec["tolerations"]} == {30}


def test_the_template_is_kept_and_added_to() -> None:
    given = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "restartPolicy": "Never",
            "serviceAccountName": "root",
            "terminationGracePeriodSeconds": 5,
            "tolerations": [],
            "containers": [
                {"name": "log", "image": "log:1"},
                {
                    "name": "main",
                    "image": "mine:2",
                    "imagePullPolicy": "IfNotPresent",
                    "env": [{"name": "A", "value": "template"}, {"name": "POD_IP", "value": "1.2.3.4"}],
                },
            ],
        },
    }
    pod = built(replicaSpecs=with_template(given), envs={"A": {"value": "job"}, "B": {"value": "job"}})
    main, spec = main_of(pod), pod["spec"]
    assert (main["image"], main["imagePullPolicy"]) == ("mine:2", "IfNotPresent")
    assert main["command"][2] == "dlrover.python.master.main"
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["terminationGracePeriodSeconds"] == 5
    assert spec["tolerations"] == []
    assert [each["name"] for each in spec["containers"]] == ["log", "main"]
    assert spec["restartPolicy"] == "OnFailure"  # ours: the kubelet restarts a master that crashes
    assert spec["serviceAccountName"] == "elasticjob-demo-master"  # ours: rights come from spec.master alone
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["note"] == "b"
    variables = {each["name"]: each for each in main["env"]}
    assert variables["A"]["value"] == "template"
    assert variables["B"]["value"] == "job"
    assert variables["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert given["spec"]["containers"][1].keys() == {"name", "image", "imagePullPolicy", "env"}  # not changed


def test_a_template_without_containers_gets_one() -> None:
    pod = built(replicaSpecs=with_template({"spec": {"nodeSelector": {"disk": "ssd"}}}))
    assert main_of(pod)["image"] == "master:1"
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}


def test_a_command_of_the_template_wins_as_a_whole() -> None:
    given = template({"name": "main", "image": "mine:2", "command": ["./run.sh"]})
    assert main_of(built(replicaSpecs=with_template(given)))["command"] == ["./run.sh"]


def test_spec_master_wins_over_the_template() -> None:
    resources = {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}}
    given = template({"name": "main", "resources": {"requests": {"cpu": "9"}}})
    pod = built(replicaSpecs=with_template(given), master={"resources": resources, "serviceAccountName": "special"})
    assert main_of(pod)["resources"] == resources
    assert pod["spec"]["serviceAccountName"] == "special"


def test_resources_of_the_template_win_over_the_default() -> None:
    given = template({"name": "main", "resources": {"requests": {"cpu": "9"}}})
    assert main_of(built(replicaSpecs=with_template(given)))["resources"] == {"requests": {"cpu": "9"}}


def test_annotations_and_options_become_arguments_that_no_shell_sees() -> None:
    pod = built(
        metadata={
            "annotations": {
                "pending_timeout": "60",
                "pre_check_ops": "[('a','b')]; rm -rf /",
                "enable_dashboard": "true",
                "unknown": "x",
                "kubectl.kubernetes.io/last-applied-configuration": "{}",
            }
        },
        master={"options": {"pending-timeout": "90", "hang_detection": "1"}},
    )
    command = main_of(pod)["command"]
    assert command[-4:] == [
        "--pending_timeout=90",
        "--pre_check_ops=[('a','b')]; rm -rf /",
        "--enable_dashboard=true",
        "--hang_detection=1",
    ]
    assert not [word for word in command if "unknown" in word]
    assert "kubectl.kubernetes.io/last-applied-configuration" not in pod["metadata"]["annotations"]
    assert pod["metadata"]["annotations"]["unknown"] == "x"


def test_brain_reaches_the_master_by_its_variable() -> None:
    variables = {each["name"]: each.get("value") for each in main_of(built(brainService="brain:50001"))["env"]}
    assert variables["DLROVER_BRAIN_SERVICE_ADDR"] == "brain:50001"
    assert variables["JOB_UID"] == "uid-1"
    assert "DLROVER_BRAIN_SERVICE_ADDR" not in {each["name"] for each in main_of(built())["env"]}


def test_a_journal_claim_is_mounted() -> None:
    volumes = built(master={"journal": {}})["spec"]["volumes"]
    assert {"name": "dlrover-journal", "persistentVolumeClaim": {"claimName": "elasticjob-demo-journal"}} in volumes


def test_the_limit_of_restarts() -> None:
    assert max_restarts(make_job()) == 20
    assert max_restarts(make_job(replicaSpecs=with_template({}, restartCount=3))) == 3
    assert max_restarts(make_job(replicaSpecs=with_template({}, restartCount=3), master={"maxRestarts": 0})) == 0


def test_the_mode_of_the_master_is_part_of_its_command_and_of_its_rights() -> None:
    job = make_job(master={"options": {"platform": "k8s"}})
    command = main_of(master_pod(job, 0, "m"))["command"]
    assert command[3:5] == ["--platform", "k8s"]
    assert not any(word.startswith("--platform=") for word in command)
    roles = {each.body["roleRef"]["name"] for each in owned_objects(job) if "roleRef" in each.body}  # type: ignore[index,call-overload]
    assert roles == {"dlrover-master-plans", "elasticjob-demo-own"}
    assert option_problem(job) == ""
    assert "sets platform itself" in option_problem(make_job(master={"options": {"platform": "local"}}))
