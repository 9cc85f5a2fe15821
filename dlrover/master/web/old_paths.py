"""The paths that the original's dashboard answered, for scripts that ask them. With the job's own data, and behind the same token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dlrover.master.view.gatherer import Gatherer
from dlrover.protocol.messages.job import JobStatus
from dlrover.protocol.units import in_mib


class OldPaths:
    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    def handlers(self) -> list[tuple[str, Callable[[Request], Awaitable[Response]]]]:
        return [("/api/job", self._job), ("/api/nodes", self._nodes), ("/api/metrics", self._metrics)]

    async def _status(self) -> JobStatus | None:
        await self._gatherer.fresh()
        return self._gatherer.status

    async def _job(self, request: Request) -> Response:
        status = await self._status()
        if status is None:
            return _json({})
        phases = [node.phase.value for node in status.fleet if not node.is_released]
        return _json(
            {
                "job_name": status.job_name,
                "job_stage": status.stage.value,
                "total_nodes": max(len(phases), len(status.nodes)),
                "pending_nodes": sum(phase in ("Initial", "Pending") for phase in phases) + status.num_pending,
                "running_nodes": sum(node.status in ("alive", "standby") for node in status.nodes),
                "failed_nodes": phases.count("Failed"),
                "succeeded_nodes": phases.count("Succeeded") + sum(node.status == "finished" for node in status.nodes),
            }
        )

    async def _nodes(self, request: Request) -> Response:
        status = await self._status()
        by_type: dict[str, list[dict[str, object]]] = {"worker": [], "ps": [], "chief": [], "evaluator": []}
        for node in () if status is None else status.fleet:
            by_type[node.node_type.value].append(
                {
                    "id": node.id,
                    "type": node.node_type.value,
                    "status": node.phase.value,
                    "name": node.name,
                    "rank_index": node.rank,
                    "exit_reason": node.exit_reason.value,
                    "relaunch_count": node.num_relaunches,
                    "max_relaunch_count": node.max_relaunches,
                    "critical": node.is_critical,
                    "hostname": node.host,
                }
            )
        if status is not None and not status.fleet:
            by_type["worker"] = [
                {
                    "id": node.node,
                    "type": "worker",
                    "status": node.status,
                    "name": f"node-{node.node}",
                    "rank_index": node.node_rank,
                    "hostname": node.host,
                }
                for node in status.nodes
            ]
        return _json(by_type)

    async def _metrics(self, request: Request) -> Response:
        status = await self._status()
        usage = self._gatherer.resources.values()
        speed = self._gatherer.steps_per_second
        return _json(
            {
                "timestamp": 0.0 if status is None else status.now / 1e6,
                "resource_usage": {
                    "total_cpu": round(sum(each.cpu for each in usage), 2),
                    "total_memory": round(in_mib(sum(each.memory_bytes for each in usage))),
                    "total_gpu": sum(len(each.devices) for each in usage),
                },
                "training_stats": {
                    "running_workers": 0 if status is None else status.world_size,
                    "global_step": -1 if self._gatherer.step is None else self._gatherer.step,
                    "training_speed": -1 if speed is None else round(speed, 3),
                },
            }
        )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
