"""The operator's copy of the pods, by job."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from dlrover.operator.cluster_view import PodsByJob
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.objects import Pod, decode


def pod(key: str, job: str) -> Pod:
    body = {"metadata": {"name": key, "labels": {names.JOB_UID: job} if job else {}}}
    return decode(Pod, json.dumps(body).encode())


STEPS = st.tuples(
    st.sampled_from(["set", "pop", "update", "clear"]), st.sampled_from("abcde"), st.sampled_from(["", "1", "2"])
)


@given(st.lists(STEPS))
def test_the_pods_of_a_job_are_those_that_a_look_at_all_of_them_finds(steps: list[tuple[str, str, str]]) -> None:
    """Through every way in which an informer changes its copy; a pod may also change its label."""
    pods = PodsByJob()
    for what, key, job in steps:
        match what:
            case "set":
                pods[key] = pod(key, job)
            case "pop":
                pods.pop(key, None)
            case "update":
                pods.clear()
                pods.update({key: pod(key, job)})
            case _:
                pods.clear()
        for uid in ("", "1", "2"):
            assert pods.of(uid) == {
                key for key, each in pods.items() if each.metadata.labels.get(names.JOB_UID, "") == uid
            }
