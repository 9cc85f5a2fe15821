"""An operator that is killed between any two actions: the next one goes on, and no object is ever made twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.operator.model import MACHINE, ModelCluster, is_acting, job_body
from tests.operator.test_decide import DONE, running


def started() -> ModelCluster:
    return ModelCluster()


def lost() -> ModelCluster:
    cluster = running()
    cluster.vanish(cluster.master())
    cluster.wait(1)
    return cluster


def terminating() -> ModelCluster:
    cluster = running()
    cluster.pods[cluster.master()]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:30Z"
    return cluster


def evicted() -> ModelCluster:
    cluster = running()
    cluster.end(cluster.master(), exit_code=137, pod_reason="Evicted")
    return cluster


def ended() -> ModelCluster:
    cluster = running(cleanPodPolicy="All")
    for index in range(3):
        cluster.add_worker(index)
    cluster.end(cluster.master(), message=DONE)
    return cluster


def shape(cluster: ModelCluster) -> dict[str, Any]:
    """What must be the same whether or not an operator was killed on the way."""
    return {
        "pods": sorted(cluster.pods),
        "others": sorted((kind.value, name) for kind, name in cluster.others),
        "phase": cluster.status.phase,
        "reason": cluster.status.reason,
        "conditions": [(each.type, each.status, each.reason) for each in cluster.status.conditions],
        "restarts": (cluster.status.restarts, cluster.status.master.restarts),
        "events": sorted(event.reason for event in cluster.events.values()),
    }


@pytest.mark.parametrize("scene", [started, lost, terminating, evicted, ended])
def test_a_kill_after_any_number_of_actions_leads_to_the_same_end(scene: Any) -> None:
    undisturbed = scene()
    undisturbed.settle()
    expected, num_actions = shape(undisturbed), scene().run()
    assert num_actions > 1
    for stop_after in range(num_actions):
        cluster = scene()
        cluster.run(stop_after=stop_after)
        cluster.settle()
        assert shape(cluster) == expected, f"killed after {stop_after} actions"


class KilledOperator(RuleBasedStateMachine):
    """Kills, disasters and time in any order. Then peace, and the job must have one running master."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = ModelCluster(job_body(master={"maxRestarts": 1000}))

    @rule(stop_after=st.integers(0, 14))
    def operator_runs_and_is_killed(self, stop_after: int) -> None:
        self.cluster.run(stop_after=stop_after)

    @rule()
    def operator_runs(self) -> None:
        self.cluster.run()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0, 60.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.wait(seconds)

    @rule()
    def kubelet_starts_pods(self) -> None:
        for name, pod in self.cluster.pods.items():
            if pod["status"]["phase"] == "Pending":
                self.cluster.start(name)

    @rule()
    def kubelet_finishes_deletions(self) -> None:
        for name, pod in list(self.cluster.pods.items()):
            if pod["metadata"].get("deletionTimestamp"):
                self.cluster.finish_deletion(name)

    @precondition(lambda self: self.cluster.masters())
    @rule(data=st.data(), how=st.sampled_from(["vanish", "delete", "evict", "exit", "crash"]))
    def disaster(self, data: st.DataObject, how: str) -> None:
        cluster = self.cluster
        name = data.draw(st.sampled_from(sorted(cluster.masters())))
        pod = cluster.pods[name]
        if how == "vanish":
            cluster.vanish(name)
        elif how == "delete":
            pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:30Z"
        elif how == "evict" and is_acting(pod):
            cluster.end(name, exit_code=137, pod_reason="Evicted")
        elif how == "exit" and is_acting(pod):
            cluster.end(name, exit_code=0)
        elif how == "crash" and pod["status"]["phase"] == "Running":
            cluster.crash(name)

    @rule()
    def machine_is_lost(self) -> None:
        self.cluster.not_ready.setdefault(MACHINE, self.cluster.now)

    @rule()
    def machine_is_back(self) -> None:
        self.cluster.not_ready.clear()

    @rule(data=st.data())
    def person_deletes_an_object(self, data: st.DataObject) -> None:
        if self.cluster.others:
            del self.cluster.others[data.draw(st.sampled_from(sorted(self.cluster.others)))]

    @rule(suspend=st.booleans())
    def person_suspends_or_resumes(self, suspend: bool) -> None:
        if bool(self.cluster.body["spec"].get("suspend")) != suspend:
            self.cluster.body["spec"]["suspend"] = suspend
            self.cluster.body["metadata"]["generation"] += 1

    @rule()
    def api_server_refuses_the_next_master(self) -> None:
        self.cluster.refused = {self.cluster.master(index): "exceeded quota" for index in range(200)}

    @rule()
    def api_server_takes_masters_again(self) -> None:
        self.cluster.refused = {}

    @invariant()
    def at_most_one_master_may_act(self) -> None:
        acting = [name for name in self.cluster.masters() if is_acting(self.cluster.pods[name])]
        assert len(acting) <= 1, f"{acting} may act at once"

    @invariant()
    def numbers_of_masters_grow(self) -> None:
        """A name comes twice only if the operator never learnt of the first pod."""
        numbers = [int(name.rpartition("-")[2]) for name in self.cluster.created]
        assert numbers == sorted(numbers)

    @invariant()
    def a_master_acts_after_the_former_tokens_have_lapsed(self) -> None:
        """But for a pod whose name came twice: the operator never learnt of the first, so it cannot know of its token."""
        cluster = self.cluster
        if not cluster.created:
            return
        name, acts_from = cluster.created[-1], cluster.acts_from[-1]
        for former, gone_at in cluster.gone_at.items():
            if former != name and cluster.created.count(former) == 1:
                assert acts_from >= gone_at + 10.0, f"{name} acts {acts_from - gone_at} s after {former} is gone"

    def teardown(self) -> None:
        cluster = self.cluster
        cluster.refused = {}
        cluster.not_ready = {}
        cluster.body["spec"]["suspend"] = False
        cluster.restart_operator()
        cluster.settle(hours=24)
        acting = [name for name in cluster.masters() if is_acting(cluster.pods[name])]
        assert len(acting) == 1
        cluster.start(acting[0])  # its container may have waited after a crash
        cluster.settle(hours=24)
        assert cluster.status.phase == "Running"
        assert len(cluster.others) == 9
        assert cluster.decide().actions == ()


KilledOperator.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestKilledOperator = KilledOperator.TestCase
