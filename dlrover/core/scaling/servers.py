"""
How many workers and servers a job with parameter servers should have, and of which size.

In this order: a server whose memory will not last is exchanged before it fails; one that is much busier than the others gets more cores; if all are busy there are
more of them; if one is idle and the job still long, it gets fewer cores. Then the numbers: by the fit if three configurations were seen, else by the rules
of thumb. The user's number of workers is a cap, and the user's size of servers stays where it is one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dlrover.core.scaling import allreduce, brakes, facts, memory, rules
from dlrover.core.scaling.brakes import SERVERS, Held, Promise
from dlrover.core.scaling.evidence import batch_of
from dlrover.core.scaling.facts import Facts
from dlrover.core.scaling.model import Fit, cores_of, fit_servers, median, server_row
from dlrover.core.scaling.rules import NodeSample, Sample
from dlrover.core.scaling.state import Run, Scaling
from dlrover.core.scaling.verdict import TOLERANCE, Verdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job_limits import excess
from dlrover.protocol.messages.scaling import (
    Brake,
    Configuration,
    NodeUse,
    Optimizer,
    Plan,
    PlannedGroup,
    PlannedNode,
    PlanOffered,
    ScaleCandidate,
    ScaleOutcome,
)

HOT = 0.9
HOTTER = 1.5
"""Times the median of the others."""
WATCHED = 180.0
IDLE = 0.4
LEAST_LEFT = 3600.0
IDLE_MARGIN = 4
MOST_EVALUATIONS = 200
_URGENT = (Brake.OFF, Brake.UNDER_WAY, Brake.MANUAL_HOLD, Brake.COOL_DOWN)
"""Brakes that hold even what prevents a failure."""


class Option(NamedTuple):
    workers: int
    servers: int
    server_cpu: float


def decide(state: JobState, known: Facts, offer: PlanOffered | None = None) -> Verdict:
    scaling = state.scaling
    held = brakes.of_job(scaling, known, SERVERS)
    is_changeable = NodeType.PS in scaling.terms.types
    if is_changeable and (held is None or held.brake not in _URGENT):
        repair = _short_memory(state)
        if repair is not None:
            return repair
    if held is not None:
        return _held(held, f"Servers and workers stay: {held.why}.")
    if offer is not None:
        return _judged(state, known, offer.plan, offer.expected_speed / known.speed - 1, offer.sentence)
    for rule in (_hot, _all_hot, _idle) if is_changeable else ():
        found = rule(state, known)
        if found is not None:
            return found
    if scaling.terms.optimizer is Optimizer.NONE:
        return Verdict(outcome=ScaleOutcome.RESTED, sentence="No server is hot, short or idle.", kind=SERVERS)
    return _numbers(state, known)


def back_of(state: JobState, plan: Plan) -> Plan:
    """What takes a plan back: the numbers as they are now. An exchanged node stays exchanged."""
    fleet = state.fleet
    groups = []
    for group in plan.groups:
        replicas = None if fleet is None else fleet.replicas.get(group.node_type)
        if replicas is not None and group.count is not None:
            groups.append(PlannedGroup(node_type=group.node_type, count=replicas.target))
    return Plan(groups=tuple(groups))


def _servers(state: JobState) -> list[NodeUse]:
    """Those of the newest run that are still there."""
    newest, fleet = state.scaling.newest, state.fleet
    if newest is None or fleet is None:
        return []
    there = {node.id: None for node in fleet.live_nodes(NodeType.PS) if node.id not in fleet.migrations}
    return [node for node in newest.nodes if node.node_type is NodeType.PS and node.platform_node in there]


def _cpu(state: JobState, node: NodeUse) -> float:
    assert state.fleet is not None, "servers are of a fleet"
    return state.fleet.nodes[node.platform_node].resource.cpu


def _short_memory(state: JobState) -> Verdict | None:
    scaling = state.scaling
    found = memory.forecast_of(scaling, NodeType.PS, facts.seconds_left(scaling))
    nodes = _servers(state)
    if found is None or not nodes or state.fleet is None:
        return None
    node = max(nodes, key=lambda each: each.memory_mb)
    had = state.fleet.nodes[node.platform_node].resource.memory_mb
    if not memory.is_danger(found, had):
        return None
    more = memory.more_for_server(found, had, scaling.terms.largest.memory_mb)
    plan = Plan(nodes=(PlannedNode(platform_node=node.platform_node, memory_mb=more),))
    if more <= had or _excess(state, plan):
        scaling.warnings["server-memory"] = (
            f"A server uses {found.now_mb:.0f} of {had} MiB and will use {found.then_mb:.0f} MiB in {found.seconds / 60:.0f} min, "
            "and it cannot get more."
        )
        return None
    why = (
        f"it uses {found.now_mb:.0f} of {had} MiB and would use {found.then_mb:.0f} MiB in {found.seconds / 60:.0f} min"
    )
    return _repair(f"Server {node.rank} gets {more} MiB: {why}.", plan)


def _hot(state: JobState, known: Facts) -> Verdict | None:
    nodes = [node for node in _servers(state) if _cpu(state, node) > 0]
    if len(nodes) < 2:
        return None
    for node in nodes:
        had = _cpu(state, node)
        others = [each.cpu / _cpu(state, each) for each in nodes if each is not node]
        use = node.cpu / had
        if node.seconds < WATCHED or use < HOT or use < HOTTER * median(others):
            continue
        most = state.scaling.terms.largest.cpu
        cpu = min(most, 2 * had)
        plan = Plan(nodes=(PlannedNode(platform_node=node.platform_node, cpu=cpu),))
        if cpu > had and not _excess(state, plan):
            return _repair(
                f"Server {node.rank} gets {cpu:g} cores instead of {had:g}: it uses {use:.0%} of them, the others "
                f"{median(others):.0%}; its memory stays.",
                plan,
            )
    return None


def _all_hot(state: JobState, known: Facts) -> Verdict | None:
    nodes = [node for node in _servers(state) if _cpu(state, node) > 0]
    is_hot = nodes and all(node.seconds >= WATCHED and node.cpu >= HOT * _cpu(state, node) for node in nodes)
    if not is_hot or state.fleet is None:
        return None
    count = state.fleet.replicas[NodeType.PS].target
    more = min(state.scaling.terms.most_servers, count + max(1, count // 2))
    plan = Plan(groups=(PlannedGroup(node_type=NodeType.PS, count=more),))
    if more <= count or _excess(state, plan):
        return None
    sentence = f"{more} servers instead of {count}: all of them use more than {HOT:.0%} of their cores."
    return _watched(state, known, plan, sentence, direction=1)


def _idle(state: JobState, known: Facts) -> Verdict | None:
    left = facts.seconds_left(state.scaling)
    if left is None or left <= LEAST_LEFT:
        return None
    planned = []
    for node in _servers(state):
        had, fewer = _cpu(state, node), float(math.ceil(node.cpu_max) + IDLE_MARGIN)
        if node.seconds >= WATCHED and node.cpu_max < IDLE * had and max(fewer, state.scaling.terms.smallest.cpu) < had:
            planned.append(
                PlannedNode(platform_node=node.platform_node, cpu=max(fewer, state.scaling.terms.smallest.cpu))
            )
    if not planned:
        return None
    return _repair(
        f"{len(planned)} servers get fewer cores: they use less than {IDLE:.0%} of them.", Plan(nodes=tuple(planned))
    )


def _numbers(state: JobState, known: Facts) -> Verdict:
    scaling, configuration = state.scaling, known.configuration
    assert configuration is not None, "a brake holds what was not seen"
    fit = fit_servers(scaling.runs)
    if scaling.terms.optimizer is Optimizer.FITTED and fit is not None and not fit.why_unused:
        return _fitted(state, known, configuration, fit)
    plan = _by_rules(state, configuration)
    if plan is None:
        sentence = "The servers bear no more workers, or the user's numbers are reached."
        return Verdict(outcome=ScaleOutcome.RESTED, sentence=sentence, kind=SERVERS, fit=fit)
    count = plan.groups[0].count or 1
    present = max(1, configuration.count(NodeType.WORKER))
    return _judged(state, known, plan, count / present - 1, "the servers have cores to spare")


def _by_rules(state: JobState, configuration: Configuration) -> Plan | None:
    """§8.3 within the user's number of workers."""
    fleet, newest = state.fleet, state.scaling.newest
    if fleet is None or newest is None or NodeType.WORKER not in state.scaling.terms.types:
        return None
    wanted = rules.workers([_sample(state, configuration)], fleet.spec.limits)
    workers = fleet.replicas.get(NodeType.WORKER)
    if wanted is None or workers is None:
        return None
    count = min(
        wanted.count - configuration.count(NodeType.CHIEF), workers.spec.count, state.scaling.terms.most_workers
    )
    if count <= workers.target:
        return None
    return Plan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=count),))


def _sample(state: JobState, configuration: Configuration) -> Sample:
    newest = state.scaling.newest
    assert newest is not None, "a configuration was seen"
    servers = tuple(
        NodeSample(node.platform_node, node.cpu, _cpu(state, node), node.memory_mb) for node in _servers(state)
    )
    use = next((each for each in newest.types if each.node_type is NodeType.WORKER), None)
    group = configuration.group(NodeType.WORKER)
    each = NodeSample(
        -1, 0.0 if use is None else use.cpu, 0.0 if group is None else group.cpu, 0.0 if use is None else use.memory_mb
    )
    return Sample(servers, (each,) * configuration.num_workers)


def _fitted(state: JobState, known: Facts, configuration: Configuration, fit: Fit) -> Verdict:
    scaling = state.scaling
    run = next(run for run in reversed(scaling.runs) if run.configuration == configuration)
    now = Option(configuration.num_workers, configuration.count(NodeType.PS), cores_of(run, NodeType.PS))
    found = [(ratio, option) for option, ratio in _search(state, fit, run, now).items() if option != now]
    shown, waits = [], []
    for ratio, option in sorted(found, key=lambda each: (-each[0], each[1]))[:5]:
        plan = _plan_of(state, configuration, now, option)
        promise = _promise(state, known, plan, ratio - 1, now, option)
        held = brakes.of_plan(scaling, known, promise)
        shown.append(_candidate(plan, option, known, ratio, promise, held))
        waits.append((held, plan, option, ratio))
    for held, plan, option, ratio in waits:
        if held is None:
            sentence = f"{_text(option)} instead of {_text(now)}: {ratio - 1:+.0%} speed is expected."
            found_plan = _watched(state, known, plan, sentence, direction=1 if _cores(option) > _cores(now) else -1)
            return _with(found_plan, tuple(shown), fit)
    sentence = f"{_text(now)} fit the job: nothing that was looked at pays."
    return Verdict(outcome=ScaleOutcome.RESTED, sentence=sentence, kind=SERVERS, candidates=tuple(shown), fit=fit)


def _search(state: JobState, fit: Fit, run: Run, now: Option) -> dict[Option, float]:
    """From what runs, the best first, steps of one to half more or less; speed over present speed."""
    fleet, scaling = state.fleet, state.scaling
    assert fleet is not None, "servers are of a fleet"
    batch = batch_of(run.configuration) / max(1, now.workers)
    worker_cpu = cores_of(run, NodeType.WORKER)
    cap = _user_workers(state)
    present = fit.step_time(server_row(now.workers, now.servers, worker_cpu, now.server_cpu, batch))
    seen: dict[Option, float] = {now: 1.0}
    frontier = [now]
    while frontier and len(seen) < MOST_EVALUATIONS:
        best = max(frontier, key=lambda option: (seen[option], option))
        frontier.remove(best)
        for option in _steps(best, scaling, cap, is_size_free=not _is_size_users(state)):
            if option in seen or len(seen) >= MOST_EVALUATIONS:
                continue
            time = fit.step_time(server_row(option.workers, option.servers, worker_cpu, option.server_cpu, batch))
            if time > 0 and present > 0:
                seen[option] = option.workers / now.workers * present / time
                frontier.append(option)
    return seen


def _steps(one: Option, scaling: Scaling, cap: int, *, is_size_free: bool) -> list[Option]:
    terms, found = scaling.terms, []
    if NodeType.WORKER in terms.types:
        found += [one._replace(workers=count) for count in _around(one.workers) if 1 <= count <= cap]
    if NodeType.PS in terms.types:
        found += [one._replace(servers=count) for count in _around(one.servers) if 1 <= count <= terms.most_servers]
        cores = _around(round(one.server_cpu)) if is_size_free else []
        found += [
            one._replace(server_cpu=float(cpu)) for cpu in cores if terms.smallest.cpu <= cpu <= terms.largest.cpu
        ]
    return found


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


def _is_size_users(state: JobState) -> bool:
    assert state.fleet is not None, "servers are of a fleet"
    replica = state.fleet.spec.replicas.get(NodeType.PS)
    return replica is not None and replica.resource.cpu >= rules.LEAST_VALID_CPU


def _plan_of(state: JobState, configuration: Configuration, now: Option, option: Option) -> Plan:
    groups: list[PlannedGroup] = []
    nodes: tuple[PlannedNode, ...] = ()
    if option.workers != now.workers:
        workers = option.workers - configuration.count(NodeType.CHIEF)
        groups.append(PlannedGroup(node_type=NodeType.WORKER, count=max(1, workers)))
    cpu = option.server_cpu if option.server_cpu != now.server_cpu else None
    if option.servers != now.servers or cpu is not None:
        count = option.servers if option.servers != now.servers else None
        groups.append(PlannedGroup(node_type=NodeType.PS, count=count, cpu=cpu))
    if cpu is not None:
        nodes = tuple(PlannedNode(platform_node=node.platform_node, cpu=cpu) for node in _servers(state))
    return Plan(groups=tuple(groups), nodes=nodes)


def _promise(state: JobState, known: Facts, plan: Plan, gain: float, now: Option, option: Option) -> Promise:
    resources = _cores(option) / _cores(now)
    share = allreduce.SHARE[state.scaling.terms.scale_for]
    demanded = share * (resources - 1) * (1 if resources > 1 else allreduce.SHRINK)
    objective = "" if gain >= demanded else f"it promises {gain:+.1%} speed and {resources - 1:+.0%} cores"
    return Promise(
        plan, SERVERS, 1 if resources > 1 else -1, gain, max(0.0, 1 - resources), _excess(state, plan), objective
    )


def _cores(option: Option) -> float:
    return option.workers + option.servers * option.server_cpu


def _judged(state: JobState, known: Facts, plan: Plan, gain: float, why: str) -> Verdict:
    promise = Promise(plan, SERVERS, 1, gain, 0.0, _excess(state, plan))
    held = brakes.of_plan(state.scaling, known, promise)
    text = ", ".join(f"{group.count or 'other'} {group.node_type.value}" for group in plan.groups) or "other servers"
    if held is not None:
        return _held(held, f"{text} would be next ({why}), but {held.why}.")
    return _watched(state, known, plan, f"The job gets {text}: {why or 'somebody proposes it'}.", direction=1)


def _watched(state: JobState, known: Facts, plan: Plan, sentence: str, *, direction: int) -> Verdict:
    group = plan.group(NodeType.WORKER)
    fleet = state.fleet
    change = 0
    if group is not None and group.count is not None and fleet is not None:
        change = group.count - fleet.replicas[NodeType.WORKER].target
    return Verdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=sentence,
        plan=plan,
        kind=SERVERS,
        direction=direction,
        nodes=known.nodes + change,
        least_ratio=TOLERANCE,
    )


def _repair(sentence: str, plan: Plan) -> Verdict:
    """An exchange that is not judged by speed."""
    return Verdict(outcome=ScaleOutcome.PLANNED, sentence=sentence, plan=plan, kind=SERVERS, least_ratio=0.0)


def _held(held: Held, sentence: str) -> Verdict:
    return Verdict(outcome=ScaleOutcome.HELD, sentence=sentence, brake=held.brake, opens_at=held.opens_at, kind=SERVERS)


def _with(verdict: Verdict, candidates: tuple[ScaleCandidate, ...], fit: Fit) -> Verdict:
    return Verdict(
        outcome=verdict.outcome,
        sentence=verdict.sentence,
        plan=verdict.plan,
        kind=verdict.kind,
        direction=verdict.direction,
        nodes=verdict.nodes,
        least_ratio=verdict.least_ratio,
        candidates=candidates,
        fit=fit,
    )


def _candidate(
    plan: Plan, option: Option, known: Facts, ratio: float, promise: Promise, held: Held | None
) -> ScaleCandidate:
    return ScaleCandidate(
        plan=plan,
        text=_text(option),
        nodes=option.workers,
        speed=known.speed * ratio,
        gain=promise.gain,
        resources=1 - promise.saving if promise.saving else 1.0,
        cost=known.cost,
        brake=Brake.NONE if held is None else held.brake,
        why="" if held is None else held.why,
    )


def _excess(state: JobState, plan: Plan) -> str:
    """Which limit of the job the plan breaks; empty: none."""
    fleet = state.fleet
    if fleet is None:
        return ""
    sizes = {node.platform_node: node for node in plan.nodes}
    wanted = []
    for kind, replicas in fleet.replicas.items():
        group = plan.group(kind)
        count = replicas.target if group is None or group.count is None else group.count
        for id_ in replicas.holders.values():
            node, other = fleet.nodes[id_], sizes.get(id_)
            cpu = node.resource.cpu if other is None or other.cpu is None else other.cpu
            mib = node.resource.memory_mb if other is None or other.memory_mb is None else other.memory_mb
            wanted.append((1, type(node.resource)(cpu=cpu, memory_mb=mib, gpus=node.resource.gpus)))
        wanted.append((count - len(replicas.holders), replicas.spec.resource))
    return excess(fleet.spec.limits, wanted)


def _text(option: Option) -> str:
    return f"{option.workers} workers, {option.servers} servers of {option.server_cpu:g} cores"
