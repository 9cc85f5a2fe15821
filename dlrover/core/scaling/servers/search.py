"""
Numbers and sizes of a job with parameter servers: by the fit if three configurations were seen, else by the rules of thumb.

The search begins at what runs and goes the best first, in steps of one to half more or less in workers, servers and the cores of each. Cores count only as far as they
are used: a node that leaves some idle would not be faster with more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dlrover.core.scaling import allreduce, brakes, rules
from dlrover.core.scaling.brakes import SERVERS, Promise
from dlrover.core.scaling.evidence import batch_of
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit, cores_of, fit_servers, server_row
from dlrover.core.scaling.rules import NodeSample, UseSample
from dlrover.core.scaling.servers.plans import (
    cores_given,
    excess_of,
    is_small_change,
    judged,
    measured_servers,
    total_cores,
    watched,
)
from dlrover.core.scaling.state import MeasuredRun, Scaling
from dlrover.core.scaling.verdict import ScaleVerdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodePhase, NodeType
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.scaling import (
    Brake,
    Configuration,
    Optimizer,
    PlannedGroup,
    PlannedNode,
    ScaleCandidate,
    ScaleOutcome,
    SizePlan,
)

MOST_EVALUATIONS = 200
MOST_SHOWN = 5
MOST_GROWTH = 2
"""Times what runs: a forecast does not reach further."""
BUSY = 0.9
"""Share of its cores that a node must use for more of them to count."""


class ServerOption(NamedTuple):
    workers: int
    servers: int
    worker_cpu: float
    """Cores of each; 0: not limited."""
    server_cpu: float


class _Demand(NamedTuple):
    """Cores that a node would use if it had them."""

    worker: float
    server: float


def decide_numbers(state: JobState, known: ScaleFacts) -> ScaleVerdict:
    scaling, configuration = state.scaling, known.configuration
    assert configuration is not None, "a brake holds what was not seen"
    fit = fit_servers(scaling.runs)
    if scaling.terms.optimizer is Optimizer.FITTED and fit is not None and not fit.why_unused:
        return _fitted(state, known, configuration, fit)
    return _by_rules(state, known, configuration, fit)


# Rules of thumb.


def _by_rules(state: JobState, known: ScaleFacts, configuration: Configuration, fit: Fit | None) -> ScaleVerdict:
    scaling = state.scaling
    plan = _more_servers(state, known, configuration)
    if plan is not None:
        group = plan.group(NodeType.PS)
        assert group is not None, "the rule is about servers"
        gain = (group.count or 1) / max(1, configuration.count(NodeType.PS)) - 1
        why = "the most workers that the limits allow will need them"
        least = _least_gain(scaling, configuration, NodeType.PS, group.count or 1)
        return judged(state, known, plan, gain, why, fit, least_gain=least)
    plan = _more_workers(state, configuration)
    if plan is not None:
        count = plan.groups[0].count or 1
        gain = count / max(1, configuration.count(NodeType.WORKER)) - 1
        least = _least_gain(scaling, configuration, NodeType.WORKER, count)
        return judged(state, known, plan, gain, "the servers have cores to spare", fit, least_gain=least)
    sentence = "The servers bear no more workers, or the user's numbers are reached."
    if known.slow_start:
        sentence = f"The servers stay, because {known.slow_start}; they bear no more workers."
    return ScaleVerdict(outcome=ScaleOutcome.RESTED, sentence=sentence, kind=SERVERS, fit=fit)


def _least_gain(scaling: Scaling, configuration: Configuration, kind: NodeType, count: int) -> float:
    """What the objective demands of so many nodes of the type; the rules alone demand nothing."""
    if scaling.terms.optimizer is not Optimizer.FITTED:
        return 0.0
    now = _option_of(configuration)
    more = count - configuration.count(kind)
    wanted = now._replace(servers=count) if kind is NodeType.PS else now._replace(workers=now.workers + more)
    return demanded(scaling, _cores(wanted) / _cores(now))


def _more_servers(state: JobState, known: ScaleFacts, configuration: Configuration) -> SizePlan | None:
    """§8.2, once in the life of a configuration that has never had more: what the limits allow, and worth a change (§8.6)."""
    fleet, scaling = state.fleet, state.scaling
    is_changeable = NodeType.PS in scaling.terms.types and not known.slow_start
    if fleet is None or not is_changeable or not fleet.spec.limits.cpu:
        return None
    wanted = rules.first_servers([_sample(state, configuration)], fleet.spec.limits.cpu)
    replicas = fleet.replicas[NodeType.PS]
    if wanted is None or any(run.configuration.count(NodeType.PS) > replicas.target for run in scaling.runs):
        return None
    count = min(wanted.count, scaling.terms.most_servers)
    while count > replicas.target:
        plan = SizePlan(groups=(PlannedGroup(node_type=NodeType.PS, count=count),))
        if not excess_of(state, plan):
            return None if is_small_change(state, count * wanted.cpu) else plan
        count -= 1
    return None


def _more_workers(state: JobState, configuration: Configuration) -> SizePlan | None:
    """§8.3 within the user's number of workers."""
    fleet = state.fleet
    if fleet is None or NodeType.WORKER not in state.scaling.terms.types:
        return None
    wanted = rules.workers([_sample(state, configuration)], fleet.spec.limits)
    workers = fleet.replicas.get(NodeType.WORKER)
    if wanted is None or workers is None:
        return None
    count = wanted.count - configuration.count(NodeType.CHIEF)
    count = min(count, workers.spec.count, state.scaling.terms.most_workers)
    return SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=count),)) if count > workers.target else None


def sample_of(state: JobState) -> UseSample | None:
    """The newest run as the rules want it; None: there is none."""
    newest = state.scaling.newest
    return None if newest is None else _sample(state, newest.configuration)


def _sample(state: JobState, configuration: Configuration) -> UseSample:
    newest = state.scaling.newest
    assert newest is not None, "a configuration was seen"
    servers = tuple(
        NodeSample(node.platform_node, node.cpu, cores_given(state, node), node.memory_mb)
        for node in measured_servers(state)
    )
    use = next((each for each in newest.types if each.node_type is NodeType.WORKER), None)
    group = configuration.group(NodeType.WORKER)
    each = NodeSample(
        -1, 0.0 if use is None else use.cpu, 0.0 if group is None else group.cpu, 0.0 if use is None else use.memory_mb
    )
    return UseSample(servers, (each,) * configuration.num_workers)


# The fit.


def _fitted(state: JobState, known: ScaleFacts, configuration: Configuration, fit: Fit) -> ScaleVerdict:
    scaling = state.scaling
    run = next(run for run in reversed(scaling.runs) if run.configuration == configuration)
    now = _option_of(configuration)
    found = [(ratio, option) for option, ratio in search(state, known, fit, run, now).items() if option != now]
    ranked = sorted(found, key=lambda each: (-each[0], _cores(each[1]), each[1]))
    shown: list[ScaleCandidate] = []
    for ratio, option in ranked:
        if len(shown) >= MOST_SHOWN and not _may_pay(scaling, ratio - 1, now, option):
            continue  # a brake would hold it, and no one sees it: its plan and the limits are not looked at
        plan = _plan_of(state, configuration, now, option)
        promise = _promise(state, plan, ratio - 1, now, option)
        brake = brakes.of_plan(scaling, known, promise)
        if len(shown) < MOST_SHOWN:
            shown.append(
                ScaleCandidate(
                    plan=plan,
                    text=text_of(option),
                    nodes=option.workers,
                    speed=known.speed * ratio,
                    gain=promise.gain,
                    resources=_cores(option) / _cores(now),
                    cost=known.cost,
                    brake=Brake.NONE if brake is None else brake.brake,
                    why="" if brake is None else brake.why,
                )
            )
        if brake is None:
            return watched(
                state,
                known,
                plan,
                f"{text_of(option)} instead of {text_of(now)}: {ratio - 1:+.0%} speed is expected.",
                direction=promise.direction,
                candidates=tuple(shown),
                fit=fit,
                expected_speed=known.speed * ratio,
                least_gain=demanded(scaling, _cores(option) / _cores(now)),
            )
    sentence = f"{text_of(now)} fit the job: nothing that was looked at pays."
    return ScaleVerdict(outcome=ScaleOutcome.RESTED, sentence=sentence, kind=SERVERS, candidates=tuple(shown), fit=fit)


def search(
    state: JobState, known: ScaleFacts, fit: Fit, run: MeasuredRun, now: ServerOption
) -> dict[ServerOption, float]:
    """Speed over present speed, of what was looked at."""
    batch = batch_of(run.configuration) / max(1, now.workers)
    demand = (
        _Demand(math.inf, math.inf)
        if fit.is_by_given
        else _Demand(_demand(run, NodeType.WORKER, now.worker_cpu), _demand(run, NodeType.PS, now.server_cpu))
    )

    def step_time(option: ServerOption) -> float:
        worker_cpu = min(option.worker_cpu or math.inf, demand.worker)
        server_cpu = min(option.server_cpu or math.inf, demand.server)
        return fit.step_time(server_row(option.workers, option.servers, worker_cpu, server_cpu, batch))

    present = step_time(now)
    seen: dict[ServerOption, float] = {now: 1.0}
    frontier, cores_now = [now], total_cores(state)
    while frontier and len(seen) < MOST_EVALUATIONS:
        best = max(frontier, key=lambda option: (seen[option], option))
        frontier.remove(best)
        for option in _steps(state, known, best, now, cores_now):
            if option in seen or len(seen) >= MOST_EVALUATIONS:
                continue
            time = step_time(option)
            if time > 0 and present > 0:
                seen[option] = option.workers / now.workers * present / time
                frontier.append(option)
    return seen


def _demand(run: MeasuredRun, node_type: NodeType, given: float) -> float:
    """What a node of this type uses, if it leaves cores idle; all that it could get, if it does not."""
    used = cores_of(run, node_type)
    return used if not given or used < BUSY * given else math.inf


def _option_of(configuration: Configuration) -> ServerOption:
    return ServerOption(
        configuration.num_workers,
        configuration.count(NodeType.PS),
        _given(configuration, NodeType.WORKER) or _given(configuration, NodeType.CHIEF),
        _given(configuration, NodeType.PS),
    )


def cores_of_all(known: ScaleFacts) -> float:
    """Of workers and servers together; 0: not seen yet."""
    return 0.0 if known.configuration is None else _cores(_option_of(known.configuration))


def _given(configuration: Configuration, node_type: NodeType) -> float:
    group = configuration.group(node_type)
    return 0.0 if group is None else group.cpu


def _steps(
    state: JobState, known: ScaleFacts, one: ServerOption, now: ServerOption, cores_now: float
) -> list[ServerOption]:
    terms, found = state.scaling.terms, []
    if NodeType.WORKER in terms.types:
        cap = _user_workers(state)
        found += [one._replace(workers=count) for count in _around(one.workers) if 1 <= count <= cap]
        if one.worker_cpu and len(_movable_workers(state)) > _num_workers(state) // 2:
            found += [
                one._replace(worker_cpu=cpu) for cpu in _cores_around(state.scaling, one.worker_cpu, now.worker_cpu)
            ]
    if NodeType.PS in terms.types and not known.slow_start:
        most = min(terms.most_servers, MOST_GROWTH * now.servers)
        found += [one._replace(servers=count) for count in _around(one.servers) if 1 <= count <= most]
        if one.server_cpu and not _is_size_users(state):
            found += [
                one._replace(server_cpu=cpu) for cpu in _cores_around(state.scaling, one.server_cpu, now.server_cpu)
            ]
    return [each for each in found if _is_server_part_worth_it(each, now, cores_now)]


def _is_server_part_worth_it(option: ServerOption, now: ServerOption, cores_now: float) -> bool:
    """Servers stay as they are, or change by so much that it is worth a switch (§8.6)."""
    is_same = (option.servers, option.server_cpu) == (now.servers, now.server_cpu)
    wanted = option.servers * option.server_cpu
    return is_same or not wanted or not (cores_now > 0 and rules.is_in_dead_band(wanted, cores_now))


def _cores_around(scaling: Scaling, cores: float, now: float) -> list[float]:
    terms = scaling.terms
    most = min(terms.largest.cpu, MOST_GROWTH * now)
    return [float(cpu) for cpu in _around(round(cores)) if terms.smallest.cpu <= cpu <= most]


def _around(count: int) -> list[int]:
    half = max(1, count // 2)
    return sorted({count - half, count - 1, count + 1, count + half})


def _user_workers(state: JobState) -> int:
    assert state.fleet is not None, "servers are of a fleet"
    kinds = [
        state.fleet.replicas[kind].spec.count
        for kind in (NodeType.CHIEF, NodeType.WORKER)
        if kind in state.fleet.replicas
    ]
    return min(sum(kinds), state.scaling.terms.most_workers)


def _num_workers(state: JobState) -> int:
    assert state.fleet is not None, "servers are of a fleet"
    workers = state.fleet.replicas.get(NodeType.WORKER)
    return 0 if workers is None else workers.num_live


def _movable_workers(state: JobState) -> list[PlatformId]:
    """Critical ones are never exchanged."""
    assert state.fleet is not None, "servers are of a fleet"
    return [
        node.id
        for node in state.fleet.live_nodes(NodeType.WORKER)
        if node.phase is NodePhase.RUNNING and not node.is_critical and not node.is_finished
    ]


def _is_size_users(state: JobState) -> bool:
    assert state.fleet is not None, "servers are of a fleet"
    replica = state.fleet.spec.replicas.get(NodeType.PS)
    return replica is not None and replica.resource.cpu >= rules.LEAST_VALID_CPU


def _plan_of(state: JobState, configuration: Configuration, now: ServerOption, option: ServerOption) -> SizePlan:
    groups: list[PlannedGroup] = []
    nodes: list[PlannedNode] = []
    worker_cpu = option.worker_cpu if option.worker_cpu != now.worker_cpu else None
    if option.workers != now.workers or worker_cpu is not None:
        count = max(1, option.workers - configuration.count(NodeType.CHIEF)) if option.workers != now.workers else None
        groups.append(PlannedGroup(node_type=NodeType.WORKER, count=count, cpu=worker_cpu))
    if worker_cpu is not None:
        kept = sorted(_movable_workers(state))[: max(0, option.workers)]
        nodes += [PlannedNode(platform_node=node, cpu=worker_cpu) for node in kept]
    server_cpu = option.server_cpu if option.server_cpu != now.server_cpu else None
    if option.servers != now.servers or server_cpu is not None:
        count = option.servers if option.servers != now.servers else None
        groups.append(PlannedGroup(node_type=NodeType.PS, count=count, cpu=server_cpu))
    if server_cpu is not None:
        nodes += [PlannedNode(platform_node=node.platform_node, cpu=server_cpu) for node in measured_servers(state)]
    return SizePlan(groups=tuple(groups), nodes=tuple(nodes))


def _promise(state: JobState, plan: SizePlan, gain: float, now: ServerOption, option: ServerOption) -> Promise:
    resources = _cores(option) / _cores(now)
    objective = (
        ""
        if gain >= demanded(state.scaling, resources)
        else f"it promises {gain:+.1%} speed and {resources - 1:+.0%} cores"
    )
    return Promise(
        plan,
        SERVERS,
        1 if resources > 1 else -1,
        gain,
        max(0.0, 1 - resources),
        excess_of(state, plan),
        objective,
    )


def _may_pay(scaling: Scaling, gain: float, now: ServerOption, option: ServerOption) -> bool:
    """False: its objective, or that it brings too little, is enough to hold it."""
    resources = _cores(option) / _cores(now)
    is_enough = gain >= allreduce.LEAST_GAIN or max(0.0, 1 - resources) >= allreduce.LEAST_SAVING
    return is_enough and gain >= demanded(scaling, resources)


def demanded(scaling: Scaling, resources: float) -> float:
    """Gain that the objective demands of so many times the present cores."""
    share = allreduce.SHARE[scaling.terms.scale_for]
    return share * (resources - 1) * (1 if resources > 1 else allreduce.SHRINK)


def _cores(option: ServerOption) -> float:
    return option.workers * (option.worker_cpu or 1.0) + option.servers * (option.server_cpu or 1.0)


def text_of(option: ServerOption) -> str:
    workers = f"{option.workers} workers" + (f" of {option.worker_cpu:g} cores" if option.worker_cpu else "")
    servers = f"{option.servers} servers" + (f" of {option.server_cpu:g} cores" if option.server_cpu else "")
    return f"{workers}, {servers}"
