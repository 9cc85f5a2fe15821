"""Decisions about whole lives of jobs, on the model of a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlrover.operator.actions import ApplyStatus, CheckTemplates, CreateObject, DeleteObject, ObjectKind
from dlrover.operator.decide import CONTROLLER
from dlrover.platforms.kubernetes import names
from tests.operator.model import MACHINE, START, ModelCluster, job_body, template

DONE = json.dumps({"stage": "succeeded", "reason": "Completed", "sentence": "All workers ended well."})
BAD = json.dumps({"stage": "failed", "reason": "CodeError", "sentence": "train.py raised KeyError at step 7."})


def running(**spec: Any) -> ModelCluster:
    cluster = ModelCluster(job_body(**spec))
    cluster.run()
    cluster.start(cluster.master())
    cluster.run()
    return cluster


def test_a_new_job_gets_its_objects_and_its_master() -> None:
    cluster = ModelCluster()
    cluster.run()
    assert cluster.created == ["elasticjob-demo-dlrover-master-0"]
    assert {(kind.value, name) for kind, name in cluster.others} == {
        ("ServiceAccount", "elasticjob-demo-master"),
        ("RoleBinding", "elasticjob-demo-master"),
        ("Role", "elasticjob-demo-own"),
        ("RoleBinding", "elasticjob-demo-own"),
        ("Secret", "elasticjob-demo-token"),
        ("ConfigMap", "elasticjob-demo-ledger"),
        ("Service", "elasticjob-demo-dlrover-master"),
        ("Service", "elasticjob-demo-nodes"),
        ("PodDisruptionBudget", "elasticjob-demo-workers"),
    }
    owners = [each["metadata"]["ownerReferences"][0] for each in (*cluster.others.values(), *cluster.pods.values())]
    assert all(owner["uid"] == "uid-1" and owner["controller"] and owner["blockOwnerDeletion"] for owner in owners)
    assert cluster.status.phase == "Pending"
    assert cluster.condition("Valid").status == "True"
    assert cluster.condition("MasterReady").status == "False"


def test_fields_without_effect_are_named_in_the_status() -> None:
    worker = {"replicas": 1, "restartTimeout": 30, "autoScale": "no", "template": template()}
    cluster = ModelCluster(job_body(replicaSpecs={"worker": worker}, enableDynamicSharding=False))
    cluster.run()
    valid = cluster.condition("Valid")
    fields = "enableDynamicSharding, replicaSpecs.worker.restartTimeout"
    assert (valid.status, valid.message) == ("True", f"These fields have no effect in this version: {fields}.")
    cluster = ModelCluster()
    cluster.run()
    assert cluster.condition("Valid").message == ""


def test_relaunches_beyond_the_most_are_told_in_the_status() -> None:
    def message(count: int) -> str:
        worker = {"replicas": 1, "restartCount": count, "template": template()}
        masters = {"restartCount": 30, "template": template()}
        cluster = ModelCluster(job_body(replicaSpecs={"worker": worker, "dlrover-master": masters}))
        cluster.run()
        assert cluster.condition("Valid").status == "True"
        return cluster.condition("Valid").message

    assert message(10) == "replicaSpecs.worker.restartCount is 10; 5, the largest possible value, is used."
    assert message(5) == ""


def test_the_api_server_judges_the_templates_before_anything_is_made() -> None:
    decision = ModelCluster().decide()
    assert [type(action) for action in decision.actions] == [CheckTemplates]
    (check,) = decision.actions
    assert isinstance(check, CheckTemplates)
    assert [pod["metadata"]["name"] for pod in check.pods] == ["demo-edljob-worker-0"]  # type: ignore[index]


def test_a_refused_template_makes_no_object_and_is_checked_again() -> None:
    cluster = ModelCluster(problem="worker: no PriorityClass with name urgent was found")
    cluster.run()
    assert (cluster.pods, cluster.others) == ({}, {})
    valid = cluster.condition("Valid")
    assert (valid.status, valid.reason) == ("False", "InvalidTemplate")
    assert valid.message == "worker: no PriorityClass with name urgent was found"
    assert [event.is_warning for event in cluster.events.values() if event.reason == "InvalidTemplate"] == [True]
    cluster.problem = ""
    cluster.settle()
    assert cluster.condition("Valid").status == "True"
    assert cluster.status.phase == "Running"


@pytest.mark.parametrize(
    ("body", "reason", "part"),
    [
        (job_body("x" * 38), "NameTooLong", "at most 37"),
        (
            job_body(replicaSpecs={"wroker": {"replicas": 1, "template": template()}}),
            "UnknownReplicaType",
            "Did you mean worker?",
        ),
        (
            job_body(replicaSpecs={"worker": {"template": template({"name": "a"}, {"name": "b"})}}),
            "InvalidTemplate",
            "Give the container that trains the name `main`",
        ),
        (job_body(replicaSpecs={"worker": {"template": {"spec": {}}}}), "InvalidTemplate", "at least one container"),
        (job_body(replicaSpecs={"ps": {"replicas": 1}}), "InvalidTemplate", "spec.replicaSpecs.ps.template is missing"),
        (job_body(replicaSpecs={}), "NoReplicas", "Give at least `worker`"),
        (
            job_body(
                resourceLimits={"cpu": "3"},
                replicaSpecs={"worker": {"replicas": 2, "template": template({"resources": {"requests": {"cpu": 2}}})}},
            ),
            "LimitsExceeded",
            "its nodes ask for 4 cores, and the job's limit is 3",
        ),
        (
            job_body(
                replicaSpecs={
                    "worker": {"template": template()},
                    "dlrover-master": {"template": template({"name": "a"}, {"name": "b"})},
                }
            ),
            "InvalidTemplate",
            "spec.replicaSpecs.dlrover-master.template",
        ),
        (
            job_body(replicaSpecs={"worker": {"template": template()}, "dlrover-master": {"replicas": 2}}),
            "TooManyMasters",
            "A job has one master",
        ),
        (
            job_body(replicaSpecs={"worker": {"replicas": 2, "minReplicas": 3, "template": template()}}),
            "InvalidReplicas",
            "minReplicas 3",
        ),
        (
            job_body(replicaSpecs={"worker": {"replicas": 2, "maxReplicas": 1, "template": template()}}),
            "InvalidReplicas",
            "maxReplicas 1",
        ),
        (job_body(master={"options": {"port": "1"}}), "InvalidOption", "the operator sets port itself"),
        (job_body(master={"options": {"--x y": "1"}}), "InvalidOption", "not the name of an option"),
        (job_body(master={"serviceAccountName": "root"}), "ServiceAccountNotAllowed", "root"),
        (job_body(faultyHosts="Cordon"), "CordonNotAllowed", "--allow-cordon"),
    ],
)
def test_an_impossible_job_gets_a_sentence_and_no_object(body: dict[str, Any], reason: str, part: str) -> None:
    cluster = ModelCluster(body)
    cluster.run()
    assert (cluster.pods, cluster.others) == ({}, {})
    assert cluster.status.phase == "Created"
    assert cluster.status.reason == reason
    valid = cluster.condition("Valid")
    assert (valid.status, valid.reason, valid.observed_generation) == ("False", reason, 1)
    assert part in valid.message


def test_a_chief_takes_the_template_of_the_workers() -> None:
    cluster = ModelCluster(job_body(replicaSpecs={"worker": {"template": template()}, "chief": {"replicas": 1}}))
    cluster.run()
    assert cluster.created == [cluster.master()]


def test_a_job_of_another_controller_and_a_job_in_deletion_are_left_alone() -> None:
    for body in (
        job_body(managedBy="kueue.x-k8s.io/multikueue"),
        job_body(metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"}),
    ):
        assert ModelCluster(body).decide().actions == ()
    assert ModelCluster(job_body(managedBy=CONTROLLER)).decide().actions != ()


def test_a_job_that_is_suspended_from_the_start_waits_and_then_starts() -> None:
    cluster = ModelCluster(job_body(suspend=True))
    cluster.run()
    assert (cluster.pods, cluster.others) == ({}, {})
    assert cluster.status.phase == "Suspended"
    assert cluster.condition("Suspended").status == "True"
    cluster.body["spec"]["suspend"] = False
    cluster.body["metadata"]["generation"] = 2
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert cluster.condition("Suspended").status == "False"


def test_a_running_job_is_suspended_and_resumed_without_a_restart_counted() -> None:
    cluster = running()
    worker = cluster.add_worker(0)
    cluster.body["spec"]["suspend"] = True
    cluster.body["metadata"]["generation"] = 2
    cluster.run()
    assert cluster.condition("Suspended").reason == "Suspending", "the master lets its nodes save and leave"
    assert set(cluster.pods) == {cluster.master(0), worker}
    del cluster.pods[worker]
    cluster.run()
    for name in list(cluster.pods):
        cluster.finish_deletion(name)
    cluster.run()
    assert cluster.pods == {}
    assert cluster.status.phase == "Suspended"
    assert cluster.condition("Suspended").status == "True"
    cluster.body["spec"]["suspend"] = False
    cluster.body["metadata"]["generation"] = 3
    cluster.settle()
    assert set(cluster.pods) == {cluster.master(1)}
    assert cluster.status.master.restarts == 0
    assert cluster.condition("Suspended").status == "False"


def test_without_an_able_master_the_operator_ends_the_pods_of_a_suspended_job() -> None:
    cluster = running()
    worker = cluster.add_worker(0)
    del cluster.pods[cluster.master(0)]
    cluster.body["spec"]["suspend"] = True
    cluster.run()
    assert "deletionTimestamp" in cluster.pods[worker]["metadata"]
    for name in list(cluster.pods):
        cluster.finish_deletion(name)
    cluster.run()
    assert (cluster.pods, cluster.status.phase) == ({}, "Suspended")


def test_a_suspended_job_keeps_its_master_if_its_policy_says_so() -> None:
    cluster = ModelCluster(job_body(suspend=True, suspendPolicy="KeepMaster"))
    cluster.settle()
    assert set(cluster.pods) == {cluster.master(0)}
    assert cluster.status.phase == "Suspended"
    cluster.body["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.status.phase == "Running"


def test_a_suspended_job_can_be_stopped_although_it_has_no_master() -> None:
    cluster = ModelCluster(job_body(suspend=True, metadata={"annotations": {names.STOP: "not needed"}}))
    cluster.run()
    assert (cluster.status.phase, cluster.condition("Failed").reason) == ("Failed", "StoppedByUser")


@pytest.mark.parametrize(
    ("worker", "bound"),
    [
        ({"replicas": 4}, {"maxUnavailable": 1}),
        ({"replicas": 4, "minReplicas": 4}, {"maxUnavailable": 1}),
        ({"replicas": 4, "minReplicas": 2, "maxReplicas": 6}, {"minAvailable": 2}),
    ],
)
def test_a_drain_takes_no_more_pods_than_the_job_can_do_without(worker: dict[str, int], bound: dict[str, int]) -> None:
    cluster = ModelCluster(job_body(replicaSpecs={"worker": {**worker, "template": template()}}))
    cluster.run()
    budget = cluster.others[ObjectKind.DISRUPTION_BUDGET, "elasticjob-demo-workers"]["spec"]
    labels = {"elasticjob.dlrover/uid": "uid-1", "elasticjob.dlrover/replica-type": "worker"}
    assert budget == {**bound, "selector": {"matchLabels": labels}}
    without = ModelCluster(job_body(disruptionBudget=False))
    without.run()
    assert (ObjectKind.DISRUPTION_BUDGET, "elasticjob-demo-workers") not in without.others


def test_a_network_policy_is_made_on_request_and_admits_the_job_and_the_operator() -> None:
    cluster = ModelCluster(job_body(network={"policy": True}))
    cluster.run()
    spec = cluster.others[ObjectKind.NETWORK_POLICY, "elasticjob-demo"]["spec"]
    own = {"matchLabels": {"elasticjob.dlrover/uid": "uid-1"}}
    operator = {"matchLabels": {"app.kubernetes.io/name": "dlrover"}}
    assert spec["podSelector"] == own
    assert spec["ingress"] == [
        {"from": [{"podSelector": own}, {"podSelector": operator, "namespaceSelector": {}}]},
    ]


def test_the_phase_follows_the_master() -> None:
    cluster = running()
    assert cluster.status.phase == "Running"
    assert cluster.condition("MasterReady").status == "True"
    assert cluster.condition("Running").status == "True"
    assert cluster.condition("JournalKept").status == "True"
    assert cluster.status.master.uid == cluster.pods[cluster.master()]["metadata"]["uid"]
    assert cluster.status.start_time == "2030-01-01T00:00:00Z"
    cluster.crash(cluster.master())
    cluster.run()
    assert cluster.status.phase == "Restarting"
    ready = cluster.condition("MasterReady")
    assert ready.reason == "CrashLoopBackOff"
    assert "exited with code 1" in ready.message
    assert "no such option" in ready.message


def test_a_verdict_ends_the_job_and_its_pods() -> None:
    for message, phase, reason in ((DONE, "Succeeded", "Completed"), (BAD, "Failed", "CodeError")):
        cluster = running()
        running_worker, ended_worker = cluster.add_worker(0), cluster.add_worker(1, "Failed")
        cluster.end(cluster.master(), message=message)
        cluster.run()
        assert (cluster.status.phase, cluster.status.reason) == (phase, reason)
        assert cluster.condition(phase).message == json.loads(message)["sentence"]
        assert cluster.condition("Running").status == "False"
        assert cluster.status.completion_time
        assert "deletionTimestamp" in cluster.pods[running_worker]["metadata"]
        assert "deletionTimestamp" not in cluster.pods[ended_worker]["metadata"]
        cluster.finish_deletion(running_worker)
        cluster.settle()
        assert cluster.created == [cluster.master()]  # no further master


@pytest.mark.parametrize(
    ("policy", "left"), [("All", []), ("None", ["demo-edljob-worker-0", "elasticjob-demo-dlrover-master-0"])]
)
def test_the_policy_says_which_pods_stay(policy: str, left: list[str]) -> None:
    cluster = running(cleanPodPolicy=policy)
    cluster.add_worker(0)
    cluster.end(cluster.master(), message=DONE)
    cluster.settle()
    assert sorted(cluster.pods) == left


def test_an_exit_without_a_verdict_is_a_crash() -> None:
    for exit_code, message in ((0, ""), (0, "bye"), (1, DONE), (137, "")):
        cluster = running()
        cluster.end(cluster.master(), exit_code=exit_code, message=message, pod_reason="Evicted" if exit_code else "")
        cluster.run()
        assert cluster.status.phase == "Restarting"
        assert cluster.created == [cluster.master(0), cluster.master(1)]  # at once: its process has ended
        assert cluster.status.restarts == 1


def test_a_terminating_master_goes_first_and_the_next_one_is_told_when() -> None:
    cluster = running()
    cluster.pods[cluster.master()]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:30Z"
    (removal,) = [action for action in cluster.decide().actions if isinstance(action, DeleteObject)]
    assert (removal.grace, removal.uid) == (0, cluster.pods[cluster.master()]["metadata"]["uid"])
    assert not [action for action in cluster.decide().actions if isinstance(action, CreateObject)]
    cluster.wait(1)
    cluster.run()
    assert cluster.masters() == [cluster.master(1)]
    assert cluster.status.master.gone_at == "2030-01-01T00:00:01Z"
    kept = cluster.condition("JournalKept")
    assert (kept.status, kept.reason) == ("False", "MasterMoved")


def test_a_masters_wait_for_the_former_token_is_not_forgotten_with_the_next_pod() -> None:
    """Master 1 is rejected by its machine at once; master 2 must still wait for the token of master 0."""
    cluster = running()
    cluster.vanish(cluster.master())
    cluster.run()
    cluster.wait(1)
    cluster.pods[cluster.master(1)]["status"] = {"phase": "Failed", "reason": "OutOfcpu"}
    cluster.run()
    assert cluster.masters() == [cluster.master(1), cluster.master(2)]
    assert cluster.status.master.gone_at == "2030-01-01T00:00:00Z"


def test_with_a_journal_claim_the_next_master_need_not_wait() -> None:
    cluster = running(master={"journal": {"size": "2Gi", "storageClassName": "fast"}})
    claim = cluster.others[ObjectKind.CLAIM, "elasticjob-demo-journal"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOncePod"],
        "resources": {"requests": {"storage": "2Gi"}},
        "storageClassName": "fast",
    }
    cluster.vanish(cluster.master())
    cluster.run()
    assert cluster.masters() == [cluster.master(1)]
    assert cluster.status.master.gone_at == ""
    assert cluster.condition("JournalKept").status == "True"


def test_a_master_on_a_machine_that_is_not_ready_is_replaced_after_some_patience() -> None:
    cluster = running()
    cluster.not_ready[MACHINE] = cluster.now
    cluster.run()
    assert cluster.masters() == [cluster.master()]
    assert cluster.decide().wake_at == START + 5
    cluster.wait(5)
    cluster.run()
    assert cluster.masters() == [cluster.master(1)]
    cluster.settle()
    assert cluster.status.phase == "Running"


def test_a_failed_pod_whose_process_may_still_run_is_removed_first() -> None:
    """As the garbage collector of pods leaves it: Failed, with a container that was running when last seen."""
    cluster = running()
    status = cluster.pods[cluster.master()]["status"]
    status["phase"] = "Failed"
    cluster.run()
    assert cluster.masters() == [cluster.master(1)]
    assert cluster.status.master.gone_at


def test_too_many_restarts_fail_the_job_and_an_hour_of_quiet_forgives_them() -> None:
    cluster = running(master={"maxRestarts": 2})
    for index in range(2):
        cluster.end(cluster.master(index), exit_code=1)
        cluster.settle()
        assert cluster.status.phase == "Running"
    cluster.wait(3601)
    for index in range(2, 4):
        cluster.end(cluster.master(index), exit_code=1)
        cluster.settle()
        assert cluster.status.phase == "Running"
    cluster.end(cluster.master(4), exit_code=1)
    cluster.settle()
    assert (cluster.status.phase, cluster.status.reason) == ("Failed", "MasterRestartsExhausted")
    assert "more than 2 times" in cluster.condition("Failed").message
    assert cluster.masters() == [cluster.master(index) for index in range(5)]  # ended pods stay for their logs


def test_the_newest_ended_masters_stay_for_their_logs() -> None:
    cluster = running()
    for index in range(13):
        cluster.end(cluster.master(index), exit_code=1)
        cluster.settle()
    assert cluster.masters() == [cluster.master(index) for index in range(3, 14)]
    assert cluster.status.phase == "Running"


def test_a_container_that_crashes_for_ever_fails_the_job_too() -> None:
    cluster = running(replicaSpecs={"worker": {"template": template()}, "dlrover-master": {"restartCount": 3}})
    cluster.crash(cluster.master(), 3)
    cluster.settle()
    assert cluster.status.phase == "Restarting"
    cluster.crash(cluster.master())
    cluster.run()
    assert (cluster.status.phase, cluster.status.reason) == ("Failed", "MasterRestartsExhausted")
    assert "no such option" in cluster.condition("Failed").message


def test_crashes_before_an_hour_of_quiet_no_longer_count() -> None:
    cluster = running(master={"maxRestarts": 3})
    cluster.crash(cluster.master(), 3)
    cluster.run()
    status = cluster.pods[cluster.master()]["status"]
    status["containerStatuses"][0]["state"] = {"running": {"startedAt": "2030-01-01T00:00:00Z"}}
    assert cluster.decide().wake_at == START + 3600
    cluster.wait(3600)
    cluster.run()
    cluster.crash(cluster.master(), 3)
    cluster.run()
    assert cluster.status.phase == "Restarting"


def test_a_job_that_runs_too_long_fails() -> None:
    cluster = running(activeDeadlineSeconds=60)
    assert cluster.decide().wake_at == START + 60
    worker = cluster.add_worker(0)
    cluster.wait(60)
    cluster.run()
    assert (cluster.status.phase, cluster.status.reason) == ("Failed", "DeadlineExceeded")
    assert "deletionTimestamp" in cluster.pods[worker]["metadata"]
    assert "deletionTimestamp" in cluster.pods[cluster.master()]["metadata"]


def test_an_ended_job_is_deleted_after_its_time() -> None:
    cluster = running(ttlSecondsAfterFinished=100)
    cluster.end(cluster.master(), message=DONE)
    cluster.run()
    assert cluster.decide().wake_at == START + 100
    cluster.wait(100)
    cluster.run()
    assert not cluster.is_job_there


def test_objects_of_a_former_job_of_this_name_are_waited_for() -> None:
    old = running()
    cluster = ModelCluster(job_body(uid="uid-2"))
    cluster.others = dict(old.others)
    cluster.run()
    assert cluster.created == []
    ready = cluster.condition("MasterReady")
    assert ready.reason == "FormerJobIsDeleted"
    assert "ServiceAccount elasticjob-demo-master" in ready.message
    assert cluster.decide().wake_at is not None
    cluster.others.clear()
    cluster.run()
    assert cluster.created == [cluster.master()]


def test_a_terminating_master_of_a_former_job_is_never_taken_for_ours() -> None:
    old = running()
    old.pods[old.master()]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:30Z"
    cluster = ModelCluster(job_body(uid="uid-2"))
    cluster.pods = dict(old.pods)
    cluster.run()
    assert cluster.created == []
    assert cluster.status.master.uid == ""
    assert "already exists" in cluster.condition("MasterReady").message
    cluster.vanish(cluster.master())
    cluster.settle()
    assert cluster.created == [cluster.master()]
    assert cluster.status.phase == "Running"


def test_a_refused_master_is_told_in_the_status_and_tried_again() -> None:
    cluster = ModelCluster()
    cluster.refused[cluster.master()] = "exceeded quota: compute"
    cluster.run()
    ready = cluster.condition("MasterReady")
    assert ready.message == f"The operator could not create Pod {cluster.master()}: exceeded quota: compute"
    assert [event for event in cluster.events.values() if event.is_warning]
    cluster.refused.clear()
    cluster.settle()
    assert cluster.status.phase == "Running"
    assert cluster.status.restarts == 0


def test_an_edit_that_the_api_server_refuses_does_not_stop_a_running_job() -> None:
    cluster = running()
    cluster.problem = "worker: spec.containers[0].image: Required value"
    cluster.body["metadata"]["generation"] = 2
    cluster.run()
    assert cluster.status.phase == "Running"
    assert cluster.condition("Valid").status == "False"
    assert cluster.masters() == [cluster.master()]
    assert cluster.status.observed_generation == 2


def test_numbers_of_pods_are_written_seldom_and_everything_else_at_once() -> None:
    cluster = running()
    cluster.add_worker(0)
    decision = cluster.decide()
    assert decision.actions == ()
    assert decision.wake_at == START + 2
    cluster.wait(2)
    cluster.run()
    assert cluster.status.ready == "1/2"
    assert cluster.status.worker_replicas == 1
    assert cluster.status.replica_statuses["worker"].active == 1
    cluster.crash(cluster.master())
    assert [type(action) for action in cluster.decide().actions][-1] is ApplyStatus


def test_the_status_counts_the_pods_of_each_type_by_phase() -> None:
    cluster = running()
    for index, phase in enumerate(("Pending", "Running", "Running", "Succeeded", "Failed")):
        cluster.add_worker(index, phase)
    leaving = cluster.pods[cluster.add_worker(5)]
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.wait(2)
    cluster.run()
    counts = cluster.status.replica_statuses
    assert set(counts) == {"worker", names.MASTER_TYPE}
    worker = counts["worker"]
    assert (worker.pending, worker.active, worker.succeeded, worker.failed) == (1, 2, 1, 1), (
        "without the one that leaves"
    )
    assert counts[names.MASTER_TYPE].active == 1
    assert cluster.status.status.replica_statuses == counts, "where old readers look"


def test_a_status_that_was_lost_is_read_back_from_the_pods() -> None:
    cluster = running()
    cluster.end(cluster.master(), exit_code=1)
    cluster.settle()
    del cluster.body["status"]
    cluster.restart_operator()
    cluster.settle()
    assert cluster.masters() == [cluster.master(0), cluster.master(1)]
    assert cluster.status.phase == "Running"
    assert cluster.status.restarts == 1


def test_an_older_master_that_still_acts_is_removed_before_a_next_one_is_made() -> None:
    """Left by a backup that was restored, or by a person."""
    cluster = running()
    cluster.end(cluster.master(), exit_code=1)
    cluster.run()
    cluster.start(cluster.master())
    cluster.vanish(cluster.master(1))
    cluster.wait(60)
    removals = [action.name for action in cluster.decide().actions if isinstance(action, DeleteObject)]
    assert removals == [cluster.master()]
    assert not [action for action in cluster.decide().actions if getattr(action, "kind", None) is ObjectKind.POD][1:]
    cluster.settle()
    assert cluster.masters() == [cluster.master(2)]


def test_the_masters_fields_are_not_written_by_the_operator() -> None:
    cluster = running()
    cluster.body["status"] |= {"round": 3, "goodput": "0.98", "lastStep": 70}
    cluster.crash(cluster.master())
    cluster.run()
    assert cluster.body["status"]["round"] == 3
    assert cluster.body["status"]["lastStep"] == 70
