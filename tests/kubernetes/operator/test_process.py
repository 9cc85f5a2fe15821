"""The operator as a process: killed, doubled, cut off, and started where it cannot work."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from dlrover.platforms.kubernetes.api import (
    CONFIG_MAPS,
    ELASTIC_JOBS,
    LEASES,
    PODS,
    ROLE_BINDINGS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
)
from tests.kubernetes.operator.lab import NAMESPACE, REPOSITORY, Lab, job_body, master, read, taken
from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.faults import Fault
from tests.kubernetes.server.serving import kubeconfig

QUICK_LEASE = (
    *("--leader-elect", "--leader-elect-lease-duration", "8"),
    *("--leader-elect-renew-deadline", "6", "--leader-elect-retry-period", "0.2"),
)
MADE = (
    (SERVICE_ACCOUNTS, 1),
    (ROLE_BINDINGS, 2),
    (SECRETS, 1),
    (CONFIG_MAPS, 1),
    (SERVICES, 2),
    (PODS, 1),
)
OURS = "app.kubernetes.io/name=elasticjob"


@pytest.mark.parametrize("effect", ["hang", "lose"])
@pytest.mark.parametrize(
    ("verb", "plural"),
    [
        ("patch", "elasticjobs"),
        ("create", "serviceaccounts"),
        ("create", "rolebindings"),
        ("create", "roles"),
        ("create", "secrets"),
        ("create", "configmaps"),
        ("create", "services"),
        ("create", "pods"),
    ],
)
async def test_an_operator_that_is_killed_at_any_request_is_followed_by_one_that_goes_on(
    lab: Lab, verb: str, plural: str, effect: str
) -> None:
    """`hang`: the request was not carried out. `lose`: it was, and the operator never got the answer."""
    await lab.define()
    fault = lab.server.faults.inject(
        Fault(effect=effect, verb=verb, plural=plural, times=1 if effect == "hang" else None)
    )  # type: ignore[arg-type]
    first = await lab.start_operator()
    await lab.apply()

    async def struck() -> bool:
        return lab.server.faults.counts[verb, f"{plural}/status" if verb == "patch" else plural] > 0

    await lab.until(struck, f"{verb} of {plural}")
    await first.kill()
    lab.server.faults.withdraw(fault)
    await lab.start_operator()
    await lab.bring_up(master())
    await lab.phase_is("Running")
    for resource, number in MADE:
        found = await lab.names_of(resource, labels=OURS)
        assert len(found) == number, f"{resource.plural}: {found}"
    assert (await lab.job())["status"]["restarts"] == 0


async def test_an_answer_that_is_lost_is_asked_for_again_by_the_same_operator(lab: Lab) -> None:
    await lab.define()
    lab.server.faults.inject(Fault(effect="lose", verb="create", plural="pods", times=2))
    lab.server.faults.inject(Fault(effect="status", verb="patch", plural="elasticjobs", code=503, times=2))
    lab.server.faults.inject(Fault(effect="html", verb="create", plural="secrets", times=1))
    await lab.start_operator()
    await lab.apply()
    await lab.bring_up(master())
    await lab.phase_is("Running")
    assert await lab.names_of(PODS) == [master()]


async def test_of_two_operators_one_acts_and_the_other_follows(lab: Lab) -> None:
    await lab.define()
    operators = [await lab.start_operator(*QUICK_LEASE) for _ in range(2)]

    async def leader() -> Any:
        return next((one for one in operators if "leading lease" in one.log and one.is_running), None)

    first = await lab.until(leader, "a leader")
    (second,) = [one for one in operators if one is not first]
    await lab.until(lambda: _has_line(second, "waiting lease"), "the other waits")
    await lab.apply("one")
    await lab.has_pods(master(job="one"))
    assert "job=default/one" not in second.log
    assert await first.stop() == 0  # it gives the Lease back
    await lab.until(lambda: _has_line(second, "leading lease"), "the other leads")
    await lab.apply("two")
    await lab.has_pods(master(job="one"), master(job="two"))
    lease = read(taken(await lab.api.get(LEASES, "dlrover-elasticjob", namespace=NAMESPACE)))
    assert lease["spec"]["leaseTransitions"] >= 1


async def test_a_leader_that_is_killed_is_followed_after_its_lease(lab: Lab) -> None:
    await lab.define()
    first = await lab.start_operator(*QUICK_LEASE)
    await lab.until(lambda: _has_line(first, "leading lease"), "a leader")
    second = await lab.start_operator(*QUICK_LEASE)
    await lab.until(lambda: _has_line(second, "waiting lease"), "the other waits")
    await first.kill()
    await lab.apply()
    await lab.has_pods(master())
    assert "leading lease" in second.log


async def test_a_leader_that_stood_still_ends_when_it_goes_on(lab: Lab) -> None:
    await lab.define()
    first = await lab.start_operator(*QUICK_LEASE)
    await lab.until(lambda: _has_line(first, "leading lease"), "a leader")
    second = await lab.start_operator(*QUICK_LEASE)
    await lab.until(lambda: _has_line(second, "waiting lease"), "the other waits")
    first.send(signal.SIGSTOP)
    await lab.until(lambda: _has_line(second, "leading lease"), "the other leads")
    await lab.apply()
    await lab.has_pods(master())
    first.send(signal.SIGCONT)
    assert await first.ended() == 1
    assert "was not renewed" in first.log
    assert await lab.names_of(PODS) == [master()]
    assert second.is_running


async def _has_line(operator: Any, text: str) -> bool:
    return text in operator.log


async def test_an_api_server_that_is_away_and_back_finds_everything_as_it_was(lab: Lab) -> None:
    await lab.define()
    operator = await lab.start_operator()
    await lab.apply("one")
    await lab.bring_up(master(job="one"))
    await lab.phase_is("Running", "one")
    before = await lab.pod(master(job="one"))
    num_deletes = lab.server.faults.counts["delete", "pods"]
    await lab.server.stop()
    await lab.until(lambda: _has_line(operator, "the view of the cluster is out of date"), "the operator notices")
    await lab.server.start()
    await lab.apply("two")
    await lab.bring_up(master(job="two"))
    await lab.phase_is("Running", "two")
    after = await lab.pod(master(job="one"))
    assert before is not None
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert lab.server.faults.counts["delete", "pods"] == num_deletes
    assert operator.is_running
    assert await operator.stop() == 0


async def test_an_idle_operator_asks_nothing(lab: Lab) -> None:
    await lab.define()
    await lab.start_operator()
    await lab.apply()
    await lab.bring_up(master())
    await lab.phase_is("Running")

    async def quiet() -> bool:
        before = sum(lab.server.faults.counts.values())
        await asyncio.sleep(0.5)
        return sum(lab.server.faults.counts.values()) == before

    await lab.until(quiet, "half a second without a request")


async def test_only_the_named_namespace_is_looked_after(lab: Lab) -> None:
    await lab.define()
    lab.server.cluster.create("namespaces", "", {"metadata": {"name": "other"}})
    await lab.start_operator("--namespace", NAMESPACE)
    body = job_body("elsewhere")
    body["metadata"]["namespace"] = "other"
    taken(await lab.api.create(ELASTIC_JOBS, body, namespace="other"))
    await lab.apply()
    await lab.bring_up(master())
    await lab.phase_is("Running")
    elsewhere = read(taken(await lab.api.get(ELASTIC_JOBS, "elsewhere", namespace="other")))
    assert "status" not in elsewhere


async def test_health_and_metrics_are_served(lab: Lab) -> None:
    await lab.define()
    ports = _free_ports(2)
    operator = await lab.start_operator(
        *("--metrics-bind-address", f"127.0.0.1:{ports[0]}"),
        *("--health-probe-bind-address", f"127.0.0.1:{ports[1]}"),
    )
    await lab.apply()
    await lab.has_pods(master())
    async with aiohttp.ClientSession() as session:

        async def get(port: int, path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, await response.text()

        assert await get(ports[1], "/healthz") == (200, "ok\n")
        assert await get(ports[1], "/readyz") == (200, "ok\n")
        assert (await get(ports[1], "/metrics"))[0] == 404

        async def counted() -> bool:
            text = (await get(ports[0], "/metrics"))[1]
            return 'dlrover_operator_jobs{phase="Pending"} 1.0' in text

        await lab.until(counted, "the job in the metrics")
        text = (await get(ports[0], "/metrics"))[1]
        assert 'dlrover_operator_actions_total{action="CreateToken",result="done"} 1.0' in text
        assert "dlrover_operator_leader 1.0" in text
        await lab.server.stop()

        async def not_ready() -> bool:
            return (await get(ports[1], "/readyz"))[0] == 503

        await lab.until(not_ready, "an operator that says it is not ready")
        assert (await get(ports[1], "/healthz"))[0] == 200
    assert await operator.stop() == 0


def _free_ports(number: int) -> list[int]:
    seats = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [seat.getsockname()[1] for seat in seats]
    for seat in seats:
        seat.close()
    return ports


async def test_the_published_role_is_enough_for_the_operator(lab: Lab) -> None:
    await lab.define()
    await _bind(lab, yaml.safe_load((REPOSITORY / "deploy" / "roles" / "operator.yaml").read_text()))
    operator = await lab.start_operator(*QUICK_LEASE, kubeconfig=_config_of(lab, "operator-token"))
    await lab.apply(master={"journal": {}}, ttlSecondsAfterFinished=1)
    await lab.bring_up(master())
    await lab.phase_is("Running")
    await lab.end_pod(master(), message='{"stage": "failed", "reason": "CodeError"}')

    async def is_gone() -> bool:
        return await lab.names_of(ELASTIC_JOBS) == []

    await lab.until(is_gone, "the deletion of the job")
    assert "refused" not in operator.log
    assert "could not" not in operator.log


async def _bind(lab: Lab, role: dict[str, Any]) -> None:
    group = "rbac.authorization.k8s.io"
    lab.server.cluster.tokens.add("operator-token", User("operator", ("system:authenticated",)))
    lab.server.cluster.create("clusterroles", "", role, group=group)
    binding = {
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role["metadata"]["name"]},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "operator"}],
    }
    lab.server.cluster.create("clusterrolebindings", "", binding, group=group)
    published = yaml.safe_load_all((REPOSITORY / "deploy" / "operator" / "operator.yaml").read_text())
    [election] = [each for each in published if each["kind"] == "Role"]
    election["metadata"]["namespace"] = NAMESPACE  # the operator of these tests elects there
    lab.server.cluster.create("roles", NAMESPACE, election, group=group)
    holding = {
        "metadata": {"name": "operator", "namespace": NAMESPACE},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": election["metadata"]["name"]},
        "subjects": binding["subjects"],
    }
    lab.server.cluster.create("rolebindings", NAMESPACE, holding, group=group)


def _config_of(lab: Lab, token: str) -> Path:
    path = lab.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig(lab.server.url, token)))
    return path


async def test_a_missing_right_is_named(lab: Lab) -> None:
    await lab.define()
    role = yaml.safe_load((REPOSITORY / "deploy" / "roles" / "operator.yaml").read_text())
    role["rules"] = [rule for rule in role["rules"] if "services" not in rule["resources"]]
    await _bind(lab, role)
    operator = await lab.start_operator(kubeconfig=_config_of(lab, "operator-token"))
    assert await operator.ended() == 2
    assert "may not list services in all namespaces" in operator.log
    assert "Traceback" not in operator.log


async def test_without_the_right_to_see_machines_the_operator_works_and_says_so(lab: Lab) -> None:
    await lab.define()
    role = yaml.safe_load((REPOSITORY / "deploy" / "roles" / "operator.yaml").read_text())
    role["rules"] = [rule for rule in role["rules"] if "nodes" not in rule["resources"]]
    await _bind(lab, role)
    operator = await lab.start_operator(kubeconfig=_config_of(lab, "operator-token"))
    await lab.apply()
    await lab.has_pods(master())
    assert "cannot see the machines" in operator.log


async def test_a_cluster_without_our_resources_is_told(lab: Lab) -> None:
    operator = await lab.start_operator()
    assert await operator.ended() == 2
    assert "has no resource elasticjobs.elastic.iml.github.io" in operator.log
    assert "kubectl apply -f deploy/crds" in operator.log
    assert "Traceback" not in operator.log


async def test_a_cluster_that_does_not_answer_is_told(lab: Lab) -> None:
    await lab.server.stop()
    operator = await lab.start_operator("--start-timeout", "0.5")
    assert await operator.ended() == 2
    assert f"No cluster answers at {lab.server.url}" in operator.log
    assert "Traceback" not in operator.log


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--metrics-bind-address", "8080"), "give HOST:PORT or :PORT"),
        (("--leader-elect-retry-period", "20"), "must ascend in this order"),
        (("--leader-elect-lease-duration", "soon"), "number of seconds above 0"),
        (("--kubeconfig", "/nowhere/config"), "/nowhere/config"),
    ],
)
async def test_a_bad_option_is_told(lab: Lab, options: tuple[str, str], part: str) -> None:
    operator = await lab.start_operator(*options)
    assert await operator.ended() == 2
    assert part in operator.log
    assert "Traceback" not in operator.log


async def test_a_port_that_is_taken_is_told(lab: Lab) -> None:
    await lab.define()
    with socket.create_server(("127.0.0.1", 0)) as seat:
        address = f"127.0.0.1:{seat.getsockname()[1]}"
        operator = await lab.start_operator("--health-probe-bind-address", address)
        assert await operator.ended() == 2
    assert "cannot be opened" in operator.log


async def test_an_operator_that_waits_for_its_cluster_ends_when_asked(lab: Lab) -> None:
    await lab.server.stop()
    operator = await lab.start_operator()
    await lab.until(lambda: _has_line(operator, "no answer"), "a first try")
    assert await operator.stop() == 0


async def test_a_job_that_the_operator_cannot_read_does_not_stop_the_others(lab: Lab) -> None:
    """The definition lets `envs` through that are no variables; nothing of the pod depends on the operator's reading."""
    await lab.define(with_rules=False)
    await lab.start_operator()
    await lab.apply("odd", metadata={"annotations": {"pending_timeout": "-1"}}, envs={"A": {"value": "--x"}})
    await lab.apply("even")
    await lab.has_pods(master(job="even"), master(job="odd"))
    pod = await lab.pod(master(job="odd"))
    assert pod is not None
    assert "--pending_timeout=-1" in pod["spec"]["containers"][0]["command"]
    assert json.dumps(pod).count("--x") == 1
