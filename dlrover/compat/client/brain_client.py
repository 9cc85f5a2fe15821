"""
`BrainClient` of the original, for scripts and tools that ask Brain by themselves.

The master of this project speaks with Brain through `dlrover.master.brain`; it does not use this. Nothing is probed at the import: `available()` asks when it is called,
and each call has a deadline. What Brain does not answer is None or an empty plan, with a warning, as it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from dlrover.protocol.addresses import parse_address
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    BrainPlan,
    BrainQuestion,
    BrainReply,
    BrainStored,
    FactsTold,
    JobAsked,
    JobBegan,
    JobEnded,
    JobRecord,
    JobRef,
    JobsAsked,
    JobSettings,
    PlanAsked,
    SettingsAsked,
    stage_of,
)
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import JobFacts, SizePlan

log = logging.getLogger(__name__)

DEFAULT_PORT = 50001
CALL_LIMIT = 10.0
RETRIEVER = "base_config_retriever"


class BrainClient:
    """One Brain. `address` empty: there is none, and every call says so."""

    def __init__(self, address: str = "", token: str = "") -> None:
        self.address = address
        self._token = token

    def available(self) -> bool:
        """Whether Brain answers now."""
        return self._ask(JobsAsked(most=1)) is not None

    def report_metrics(self, job_metrics: Any) -> bool:
        """What is known of a job: an object or a mapping with `job_meta` and the groups of numbers that the original's messages have."""
        return self._tell_facts(_get(job_metrics, "job_meta"), facts_of(job_metrics))

    def report_training_set_metric(self, job_meta: Any, dataset_metric: Any) -> bool:
        return self._tell_facts(job_meta, facts_of({"training_set_feature": dataset_metric}))

    def report_training_hyper_params(self, job_meta: Any, params: Any) -> bool:
        return self._tell_facts(job_meta, facts_of({"training_hyper_params": params}))

    def report_job_exit_reason(self, job_meta: Any, reason: str) -> bool:
        try:
            known = ExitReason(reason)
        except ValueError:
            log.warning("unknown exit reason=%s, reported as %s", reason, ExitReason.UNKNOWN_ERROR)
            known = ExitReason.UNKNOWN_ERROR
        job = self._begin(job_meta)
        return job is not None and isinstance(self._ask(JobEnded(job=job, reason=known)), BrainStored)

    def get_job_metrics(self, job_uuid: str) -> str | None:
        """What Brain knows of a job, as JSON; None: it does not know it."""
        answer = self._ask(JobAsked(uid=job_uuid))
        return msgspec.json.encode(answer).decode() if isinstance(answer, JobRecord) else None

    def get_optimization_plan(
        self, job_uuid: str, stage: str, config_retriever: str = RETRIEVER, config: Mapping[str, str] | None = None
    ) -> SizePlan:
        """What Brain proposes for a job that runs; empty: nothing, or it cannot be asked."""
        return self._plan(job_uuid, stage, config, is_oom=False)

    def get_oom_resource_plan(
        self,
        nodes: Any,
        job_uuid: str,
        stage: str,
        config_retriever: str = RETRIEVER,
        config: Mapping[str, str] | None = None,
    ) -> SizePlan:
        """The same after `nodes` ended without memory."""
        return self._plan(job_uuid, stage, config, is_oom=bool(nodes))

    def get_config(self, config_key: str, job_uuid: str = "") -> str | None:
        """A setting of Brain; None: there is none, or Brain cannot be asked."""
        answer = self._ask(SettingsAsked(job=JobRef(uid=job_uuid or "-")))
        return answer.values.get(config_key) if isinstance(answer, JobSettings) else None

    def _plan(self, job_uuid: str, stage: str, config: Mapping[str, str] | None, *, is_oom: bool) -> SizePlan:
        known = stage_of(stage)
        if known is None:
            raise ValueError(f"invalid event type {stage!r}: give the name of a stage, such as job_stage_running.")
        question = PlanAsked(job=JobRef(uid=job_uuid), stage=known, is_oom=is_oom, options=dict(config or {}))
        answer = self._ask(question)
        return answer.plan if isinstance(answer, BrainPlan) and answer.plan is not None else SizePlan()

    def _begin(self, job_meta: Any) -> JobRef | None:
        uid = str(_get(job_meta, "uuid", "") or "")
        if not uid:
            raise ValueError("The job's meta data has no uuid.")
        job = JobRef(uid=uid)
        name, user, cluster, namespace = (
            str(_get(job_meta, key, "") or "") for key in ("name", "user", "cluster", "namespace")
        )
        question = JobBegan(job=job, name=name, user=user, cluster=cluster, namespace=namespace, wants_plan=False)
        answer = self._ask(question)
        return None if answer is None else job

    def _tell_facts(self, job_meta: Any, facts: JobFacts) -> bool:
        job = self._begin(job_meta)
        return job is not None and isinstance(self._ask(FactsTold(job=job, facts=facts)), BrainStored)

    def _ask(self, question: BrainQuestion) -> BrainReply | None:
        if not self.address:
            log.warning("no Brain: DLROVER_BRAIN_SERVICE_ADDR is not set")
            return None
        try:
            # In a thread, because a script may have an event loop of its own.
            with ThreadPoolExecutor(max_workers=1) as thread:
                return thread.submit(lambda: asyncio.run(self._answer(question))).result()
        except (Unavailable, Rejected) as error:
            log.warning("Brain does not answer question=%s reason=%s", type(question).__name__, error)
            return None

    async def _answer(self, question: BrainQuestion) -> BrainReply:
        from dlrover.protocol.rpc.brain import BrainChannel  # late: imports of old names must not load gRPC

        channel = BrainChannel(self.address, token=self._token)
        try:
            return await channel.ask(question, timeout=CALL_LIMIT)
        finally:
            await channel.close()


class _LazyClient(type):
    """Makes the process's client when it is first asked for."""

    @property
    def BRAIN_CLIENT(cls) -> BrainClient:  # noqa: N802 (the original's name)
        known = cls.__dict__.get("_client")
        if known is None:
            known = build_brain_client()
            type.__setattr__(cls, "_client", known)
        assert isinstance(known, BrainClient)
        return known


class GlobalBrainClient(metaclass=_LazyClient):
    """`GlobalBrainClient.BRAIN_CLIENT`, as scripts of the original write it."""


def build_brain_client() -> BrainClient:
    """As the environment says: `DLROVER_BRAIN_SERVICE_ADDR`, and a token in the file that `DLROVER_BRAIN_TOKEN_FILE` names."""
    text = os.environ.get("DLROVER_BRAIN_SERVICE_ADDR", "").strip()
    protocol = os.environ.get("DLROVER_BRAIN_PROTOCOL", "").strip().lower()
    if protocol not in ("", "grpc"):
        log.warning("DLROVER_BRAIN_PROTOCOL=%s has no effect: Brain is asked over gRPC", protocol)
    if not text:
        return BrainClient()
    address = parse_address(text, default_port=DEFAULT_PORT, shown="The variable DLROVER_BRAIN_SERVICE_ADDR")
    token_file = os.environ.get("DLROVER_BRAIN_TOKEN_FILE", "")
    token = ""
    if token_file:
        try:
            with open(token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            raise ConfigError(f"The token file {token_file} cannot be read: {error.strerror}.") from error
    return BrainClient(str(address), token)


_GROUPS = {
    "training_hyper_params": {"batch_size": "batch_size", "epoch": "num_epochs", "max_steps": "max_steps"},
    "training_set_feature": {
        "dataset_size": "dataset_size",
        "size": "dataset_size",
        "dataset_name": "dataset_name",
        "name": "dataset_name",
    },
    "model_feature": {
        name: name
        for name in (
            "variable_count",
            "total_variable_size",
            "max_variable_size",
            "op_count",
            "update_op_count",
            "read_op_count",
            "recv_op_count",
            "flops",
        )
    },
}
"""Group and key of the original to the field of `JobFacts`."""


def facts_of(metrics: Any) -> JobFacts:
    values: dict[str, Any] = {}
    for group, names in _GROUPS.items():
        part = _get(metrics, group)
        for old, new in names.items():
            value = None if part is None else _get(part, old)
            if value:
                values[new] = value
    job_type = _get(metrics, "type")
    if isinstance(job_type, str):
        values["job_type"] = job_type
    return msgspec.convert(values, JobFacts, strict=False)


def _get(source: Any, name: str, default: Any = None) -> Any:
    return source.get(name, default) if isinstance(source, Mapping) else getattr(source, name, default)
