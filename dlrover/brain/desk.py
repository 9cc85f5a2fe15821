"""
Answers each message of `protocol.messages.brain`: who may ask it, what is stored, what is read.

In the event loop; everything that takes time happens in the threads of the store. A message that brings facts is answered when they are durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import assert_never

from msgspec.structs import replace
from sqlalchemy import Connection, RowMapping

from dlrover.brain import sanity
from dlrover.brain.planning import plan_running, plan_start, settings_for, settings_of
from dlrover.brain.rates import SendRates
from dlrover.brain.room import ROOM_KEY, Rooms
from dlrover.brain.store import writing
from dlrover.brain.store.reading import (
    bounds_of,
    find_job,
    find_jobs,
    find_machines,
    find_node_ends,
    find_plans,
    find_runs,
    find_settings,
    shown_job,
    shown_node_end,
    shown_plan,
)
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import ALL_TENANTS, TokenHolder, check_right
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.brain import (
    AllowanceAsked,
    BrainPlan,
    BrainQuestion,
    BrainReply,
    BrainStored,
    ClusterSeen,
    DecisionsTold,
    FactsTold,
    JobAsked,
    JobBegan,
    JobEnded,
    JobList,
    JobRecord,
    JobsAsked,
    JobSettings,
    MachinesSeen,
    NodeEnded,
    PlanAsked,
    PlanList,
    PlansAsked,
    RunsTold,
    SettingsAsked,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.rpc.rarely import Rarely

log = logging.getLogger(__name__)

MACHINES_AGE = 600.0
"""Seconds for which the news of a monitor counts."""


class BrainDesk:
    def __init__(self, store: BrainStore, rates: SendRates, *, start_patience: float = 0.5) -> None:
        self._store = store
        self._start_patience = start_patience
        self._rates = rates
        self._rooms = Rooms(store.clock)
        self._rarely = Rarely()
        self.num_absurd: Counter[str] = Counter()
        """Ignored reports, by what they are."""

    async def answer(self, caller: TokenHolder, question: BrainQuestion, size_bytes: int) -> BrainReply:
        """Raises Rejected or Unavailable."""
        check_right(caller, question)
        job = getattr(question, "job", None)
        self._rates.check((caller.tenant, "" if job is None else job.uid), size_bytes)
        if "\0" in ("" if job is None else job.uid):
            raise Rejected("The uid of a job may not contain a zero byte.", ErrorCode.MALFORMED)
        match question:
            case JobBegan():
                return await self._begin(caller.tenant, question)
            case RunsTold() | FactsTold() | DecisionsTold() | NodeEnded() | JobEnded() | ClusterSeen():
                return await self._store_facts(caller.tenant, question)
            case PlanAsked():
                return await self._plan(caller.tenant, question)
            case SettingsAsked():
                return await self._store.read(lambda connection: _settings(connection, caller.tenant, question))
            case AllowanceAsked():
                return await self._allow(caller.tenant, question)
            case JobsAsked() | JobAsked() | PlansAsked():
                return await self._store.read(lambda connection: _look_up(connection, caller.tenant, question))
            case _:
                assert_never(question)

    async def _begin(self, tenant: str, began: JobBegan) -> StartPlan:
        """The plan waits for a slow disk only so long: a job whose beginning was lost tells it again."""
        sanity.check_beginning(began)
        now = self._store.clock()

        def look(connection: Connection) -> StartPlan:
            known = find_job(connection, tenant, began.job.uid)
            if known is not None:
                writing.check_secret(known, began.job)
            plan = plan_start(connection, tenant, began, now) if began.wants_plan else StartPlan()
            return replace(plan, newest_run=0 if known is None else known["newest_run"])

        start = await self._store.read(look)
        storing = asyncio.wrap_future(
            self._store.put(lambda connection: writing.store_beginning(connection, tenant, began, now))
        )
        if start.plan is not None:
            self._propose(tenant, began.job.uid, start.algorithm, start, now)
        done, _ = await asyncio.wait({storing}, timeout=self._start_patience)
        return replace(start, newest_run=storing.result()) if done else start

    async def _plan(self, tenant: str, asked: PlanAsked) -> BrainPlan:
        now = self._store.clock()

        def look(connection: Connection) -> BrainPlan:
            known = find_job(connection, tenant, asked.job.uid)
            if known is not None:
                writing.check_secret(known, asked.job)
            return plan_running(connection, tenant, asked, now)

        found = await self._store.read(look)
        if found.plan is not None:
            self._propose(tenant, asked.job.uid, found.algorithm, found, now)
        return found

    def _propose(self, tenant: str, uid: str, algorithm: str, made: StartPlan | BrainPlan, now: float) -> None:
        assert made.plan is not None, "something is proposed"
        proposal = writing.Proposal(
            algorithm=algorithm, plan=made.plan, sentence=made.sentence, expected_speed=made.expected_speed
        )
        self._store.put(lambda connection: writing.store_proposal(connection, tenant, uid, proposal, now))

    async def _store_facts(
        self, tenant: str, told: RunsTold | FactsTold | DecisionsTold | NodeEnded | JobEnded | ClusterSeen
    ) -> BrainStored:
        now = self._store.clock()
        match told:
            case RunsTold():
                runs = [run for run in told.runs if sanity.is_sane_run(run)]
                self._note_absurd("run", len(told.runs) - len(runs), told.job.uid)
                newest = max((run.number for run in runs), default=0)
                return await self._store.write(
                    lambda connection: writing.store_runs(connection, tenant, told.job, runs, newest=newest, now=now)
                )
            case FactsTold():
                return await self._store.write(
                    lambda connection: writing.store_facts(connection, tenant, told.job, told.facts, told.recipe, now)
                )
            case DecisionsTold():
                made = [each for each in told.decisions if sanity.is_sane_decision(each)]
                self._note_absurd("decision", len(told.decisions) - len(made), told.job.uid)
                newest = max((each.number for each in made), default=0)
                return await self._store.write(
                    lambda connection: writing.store_decisions(
                        connection, tenant, told.job, made, newest=newest, now=now
                    )
                )
            case NodeEnded():
                if not sanity.is_sane_node_end(told):
                    self._note_absurd("node end", 1, told.job.uid)
                    return await self._store.write(
                        lambda connection: writing.store_runs(connection, tenant, told.job, (), newest=0, now=now)
                    )
                return await self._store.write(lambda connection: writing.store_node_end(connection, tenant, told, now))
            case JobEnded():
                stored = await self._store.write(lambda connection: writing.store_end(connection, tenant, told, now))
                self._rooms.forget(tenant, told.job.uid)
                return stored
            case ClusterSeen():
                pods = tuple(pod for pod in told.pods if sanity.is_sane_resource(pod.resource))
                self._note_absurd("pod", len(told.pods) - len(pods), told.cluster)
                seen = replace(told, pods=pods)
                return await self._store.write(lambda connection: writing.store_cluster(connection, tenant, seen, now))

    async def _allow(self, tenant: str, asked: AllowanceAsked) -> BrainReply:
        if asked.min_nodes > asked.max_nodes:
            raise Rejected("min_nodes must be at most max_nodes.", ErrorCode.MALFORMED)
        now = self._store.clock()

        def look(connection: Connection) -> tuple[RowMapping, JobSettings, MachinesSeen | None]:
            row = writing.job_to_write(connection, tenant, asked.job)
            machines = find_machines(connection, tenant, row["cluster"], since=now - MACHINES_AGE)
            return row, settings_for(connection, row), machines

        row, settings, machines = await self._store.read(look)
        cluster = row["cluster"]
        room = _whole(settings.values.get(ROOM_KEY, ""))
        if room is None and machines is not None:
            room = self._rooms.free_room(tenant, cluster, asked, machines, _node_size(row))
        return self._rooms.share(tenant, cluster, asked, room)

    def _note_absurd(self, what: str, count: int, job: str) -> None:
        if count:
            self.num_absurd[what] += count
            if self._rarely.now():
                log.warning("reports with impossible values ignored kind=%s num=%d job=%s", what, count, job)


def _settings(connection: Connection, tenant: str, asked: SettingsAsked) -> JobSettings:
    row = find_job(connection, tenant, asked.job.uid)
    if row is None:
        return settings_of(find_settings(connection), {"tenant": tenant})
    writing.check_secret(row, asked.job)
    return settings_for(connection, row)


def _look_up(connection: Connection, own: str, question: JobsAsked | JobAsked | PlansAsked) -> BrainReply:
    wanted = question.tenant or own
    tenant = None if wanted == ALL_TENANTS else wanted
    match question:
        case JobsAsked():
            rows = find_jobs(connection, tenant, name=question.name, most=question.most)
            return JobList(jobs=tuple(shown_job(connection, row) for row in rows))
        case PlansAsked():
            plans = find_plans(connection, None, question.most, tenant=tenant)
            return PlanList(plans=tuple(shown_plan(row) for row in plans))
        case JobAsked():
            row = find_job(connection, own if tenant is None else tenant, question.uid)
            if row is None:
                raise Rejected(f"Brain knows no job {question.uid!r} of this tenant. `dlrover brain jobs` lists them.")
            plans = find_plans(connection, (row["id"],), question.most)
            return JobRecord(
                job=shown_job(connection, row),
                runs=tuple(find_runs(connection, row["id"], question.most)),
                plans=tuple(shown_plan(each) for each in reversed(plans)),
                node_ends=tuple(shown_node_end(each) for each in find_node_ends(connection, (row["id"],))),
            )


def _node_size(row: RowMapping) -> Resource:
    """Of a worker, as the job asked for it."""
    _, asked = bounds_of(row)
    return next((group.resource for group in asked if group.node_type is NodeType.WORKER), Resource())


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
