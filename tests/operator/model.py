"""
A cluster as the operator's decisions meet it: objects in a dictionary, a clock that tests move, a kubelet on command.

It keeps the rules that matter to `decide`: names are unique, a delete names a uid, a status is merged, a graceful deletion
leaves the object until the kubelet is done. `run` decides and carries out; with `stop_after` the operator is killed.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from dlrover.operator.actions import (
    Action,
    AdjustObject,
    ApplyStatus,
    CheckTemplates,
    CordonMachine,
    CreateObject,
    CreateToken,
    DeleteObject,
    EmitEvent,
    ObjectKind,
    OperatorDecision,
)
from dlrover.operator.decide import decide
from dlrover.operator.observations import FailedAction, JobObjects, OperatorSettings, TemplateCheck
from dlrover.operator.owned import kind_of
from dlrover.operator.status import status_body
from dlrover.operator.timestamps import instant_of, text_of
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.objects import Metadata, Pod, decode

Json = dict[str, Any]
START = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
SETTINGS = OperatorSettings(master_image="master:1", gang_schedulers=frozenset({"volcano", "coscheduling"}))
MACHINE = "machine-0"
LAPSE = 11.0
"""Seconds that a master without a journal waits after `goneAt`."""


def template(*containers: Json, **spec: Any) -> Json:
    return {"spec": {"containers": list(containers) or [{"name": "main", "image": "worker:1"}], **spec}}


def job_body(name: str = "demo", *, uid: str = "uid-1", metadata: Json | None = None, **spec: Any) -> Json:
    spec.setdefault("distributionStrategy", "AllreduceStrategy")
    spec.setdefault("replicaSpecs", {"worker": {"replicas": 2, "template": template()}})
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name, "namespace": "team", "uid": uid, "generation": 1, **(metadata or {})},
        "spec": spec,
    }


def make_job(name: str = "demo", **spec: Any) -> ElasticJob:
    return decode(ElasticJob, json.dumps(job_body(name, **spec)).encode())


class ModelCluster:
    def __init__(self, body: Json | None = None, *, problem: str = "", settings: OperatorSettings = SETTINGS) -> None:
        self.body = body or job_body()
        self.settings = settings
        self.now = START
        self.problem = problem
        """What the API server says of the templates."""
        self.pods: dict[str, Json] = {}
        self.others: dict[tuple[ObjectKind, str], Json] = {}
        self.not_ready: dict[str, float] = {}
        self.cordoned: list[str] = []
        self.events: dict[str, EmitEvent] = {}
        self.created: list[str] = []
        """Names of pods in the order of their creation."""
        self.acts_from: list[float] = []
        """For each of them, when its master may act: it waits until its predecessor's token has lapsed."""
        self.gone_at: dict[str, float] = {}
        """When the object of a pod whose process may have run was gone."""
        self.refused: dict[str, str] = {}
        """What the API server refuses to create, by name, and its sentence."""
        self.is_job_there = True
        self._check: TemplateCheck | None = None
        self._failure: FailedAction | None = None
        self._num_uids = 0

    @property
    def job(self) -> ElasticJob:
        return decode(ElasticJob, json.dumps(self.body).encode())

    @property
    def status(self) -> Any:
        return self.job.status

    def seen(self) -> JobObjects:
        return JobObjects(
            pods=tuple(
                decode(Pod, json.dumps(pod).encode())
                for pod in self.pods.values()
                if pod["metadata"]["labels"].get(names.JOB_UID) == self.body["metadata"]["uid"]
            ),
            others={key: decode(Metadata, json.dumps(body["metadata"]).encode()) for key, body in self.others.items()},
            not_ready=dict(self.not_ready),
            uncordoned=frozenset(pod["spec"].get("nodeName", "") for pod in self.pods.values()) - set(self.cordoned),
            check=self._check,
            failure=self._failure,
        )

    def decide(self) -> OperatorDecision:
        return decide(self.job, self.seen(), self.now, self.settings)

    def restart_operator(self) -> None:
        """What only the process knew is lost."""
        self._check = None
        self._failure = None

    def run(self, *, stop_after: int | None = None, passes: int = 30) -> int:
        """Pass after pass until nothing is left to do now. Returns how many actions were carried out."""
        num_done = 0
        for _ in range(passes):
            decision = self.decide()
            if self._failure is not None and self.now >= self._failure.retry_at:
                self._failure = None
            for action in decision.actions:
                if stop_after is not None and num_done >= stop_after:
                    self.restart_operator()
                    return num_done
                num_done += 1
                if not self.carry_out(action):
                    break
            if not self.is_job_there or not decision.actions:
                return num_done
        raise AssertionError(f"no rest after {passes} passes; the last actions were {decision.actions}")

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def settle(self, *, hours: float = 1.0) -> None:
        """Let the operator run, and start each pod that exists, until nothing changes any more."""
        end = self.now + hours * 3600
        while self.now < end:
            self.run()
            if not self.is_job_there:
                return
            for name, pod in list(self.pods.items()):
                if pod["metadata"].get("deletionTimestamp"):
                    self.finish_deletion(name)
                elif pod["status"]["phase"] == "Pending":
                    self.start(name)
            decision = self.decide()
            if not decision.actions:
                if decision.wake_at is None or decision.wake_at >= end:
                    return
                self.now = max(self.now, decision.wake_at)
        raise AssertionError("no rest in time")

    # The API server.

    def carry_out(self, action: Action) -> bool:
        """False: the API server refused it."""
        match action:
            case CheckTemplates(generation=generation):
                self._check = TemplateCheck(generation=generation, problem=self.problem, at=self.now)
            case ApplyStatus(status=status):
                self._merge(self.body.setdefault("status", {}), status_body(self.job, status)["status"])
            case EmitEvent():
                self.events.setdefault(action.name, action)
            case DeleteObject():
                self._delete(action)
            case CreateObject() | CreateToken():
                return self._create(action)
            case AdjustObject():
                self._adjust(action)
            case CordonMachine(name=name):
                self.cordoned.append(name)
        return True

    def _create(self, action: CreateObject | CreateToken) -> bool:
        kind, name = kind_of(action), action.name
        assert action.body["metadata"]["name"] == name  # type: ignore[index]
        refusal = self.refused.get(name)
        taken = self.pods if kind is ObjectKind.POD else {key[1] for key in self.others if key[0] is kind}
        if refusal is None and name in taken:
            assert kind is ObjectKind.POD, f"{kind} {name} was created although it could be seen"
            refusal = "already exists"
        if refusal is not None:
            what = f"create {kind.value} {name}"
            self._failure = FailedAction(what=what, reason="Refused", message=refusal, retry_at=self.now + 5)
            return False
        body = json.loads(json.dumps(action.body))
        self._num_uids += 1
        body["metadata"]["uid"] = f"object-{self._num_uids}"
        if kind is ObjectKind.POD:
            body["status"] = {"phase": "Pending"}
            self.pods[name] = body
            self.created.append(name)
            gone_at = instant_of(self.status.master.gone_at)
            self.acts_from.append(self.now if gone_at is None else max(self.now, gone_at + LAPSE))
        else:
            self.others[kind, name] = body
        return True

    def _adjust(self, action: AdjustObject) -> None:
        body, patch = self.others[action.kind, action.name], action.patch
        assert patch["metadata"]["uid"] == body["metadata"]["uid"]  # type: ignore[index]
        body["metadata"]["annotations"] |= patch["metadata"]["annotations"]  # type: ignore[index]
        for field, value in patch["spec"].items():  # type: ignore[attr-defined]
            body["spec"].pop(field, None)
            if value is not None:
                body["spec"][field] = value

    def _delete(self, action: DeleteObject) -> None:
        if action.kind is ObjectKind.ELASTIC_JOB:
            assert action.uid == self.body["metadata"]["uid"]
            self.is_job_there = False
            return
        pod = self.pods.get(action.name)
        if pod is None or pod["metadata"]["uid"] != action.uid:
            return
        if action.grace == 0:
            self.vanish(action.name)
        else:
            pod["metadata"].setdefault("deletionTimestamp", text_of(self.now + 30))

    def _merge(self, old: Json, new: Json) -> None:
        """Server-side apply of the only manager: its maps and its lists replace what it wrote before."""
        keep = {name: old[name] for name in ("round", "goodput", "lastStep", "scalePlan", "cordonHosts") if name in old}
        old.clear()
        old.update(json.loads(msgspec.json.encode(new)), **keep)

    # The kubelet, users and disasters.

    def start(self, name: str) -> None:
        pod = self.pods[name]
        pod["spec"]["nodeName"] = MACHINE if MACHINE not in self.not_ready else "machine-1"
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {"name": "main", "ready": True, "state": {"running": {"startedAt": text_of(self.now)}}}
            ],
        }

    def end(self, name: str, *, exit_code: int = 0, message: str = "", reason: str = "", pod_reason: str = "") -> None:
        """The container ends and is not started again."""
        terminated = {
            "exitCode": exit_code,
            "reason": reason or ("Completed" if exit_code == 0 else "Error"),
            "message": message,
        }
        self.pods[name]["status"] = {
            "phase": "Succeeded" if exit_code == 0 else "Failed",
            "reason": pod_reason,
            "containerStatuses": [{"name": "main", "state": {"terminated": terminated}}],
        }

    def crash(self, name: str, times: int = 1) -> None:
        """The container crashes and waits for the kubelet to start it again."""
        status = self.pods[name]["status"]
        old = status["containerStatuses"][0].get("restartCount", 0)
        status["conditions"] = [{"type": "Ready", "status": "False"}]
        status["containerStatuses"] = [
            {
                "name": "main",
                "restartCount": old + times,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such option"}},
            }
        ]

    def vanish(self, name: str) -> None:
        pod = self.pods.pop(name)
        if is_acting(pod):
            self.gone_at[name] = self.now

    def finish_deletion(self, name: str) -> None:
        self.vanish(name)

    def add_worker(self, index: int, phase: str = "Running") -> str:
        name = names.pod_name(self.body["metadata"]["name"], "worker", index)
        labels = {names.JOB_UID: self.body["metadata"]["uid"], names.REPLICA_TYPE: "worker"}
        metadata = {"name": name, "uid": f"worker-{index}", "labels": labels}
        self.pods[name] = {"metadata": metadata, "spec": {}, "status": {"phase": phase}}
        return name

    def master(self, index: int = 0) -> str:
        return names.master_pod(self.body["metadata"]["name"], index)

    def masters(self) -> list[str]:
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"].get(names.REPLICA_TYPE) == names.MASTER_TYPE
        ]

    def condition(self, kind: str) -> Any:
        return next((each for each in self.status.conditions if each.type == kind), None)


def is_acting(pod: Json) -> bool:
    """A process of it may run."""
    return pod["status"]["phase"] not in ("Succeeded", "Failed")
