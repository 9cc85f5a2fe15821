"""What a host that was started again asks the nodes for: the secrets that no store may hold."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.messages import ACCOUNT, JobSecrets
from dlrover.platforms.ray.starter import NODE_PREFIX
from dlrover.platforms.ray.store import JobStore

PATIENCE = 10.0
"""Seconds for the first answer. A node that waits for room gives none."""


async def find_secrets(job_uid: str, store: JobStore, host_epoch: int) -> JobSecrets | None:
    """None: no node lives that would know."""
    import ray

    stones = store.tombstones()
    questions = []
    for intent in store.nodes():
        if intent.id not in stones:
            with contextlib.suppress(ValueError):  # dead, or never made
                actor = ray.get_actor(f"{NODE_PREFIX}{intent.id}", namespace=namespace_of(job_uid))
                questions.append(asyncio.ensure_future(_ask(actor, host_epoch)))
    try:
        async with asyncio.timeout(PATIENCE):
            for answer in asyncio.as_completed(questions):
                secrets = await answer
                if secrets is not None:
                    return secrets
    except TimeoutError:
        pass
    finally:
        for question in questions:
            question.cancel()
    return None


async def _ask(actor: Any, host_epoch: int) -> JobSecrets | None:
    import ray.exceptions

    try:
        account = ACCOUNT.decode(await actor.describe.remote(host_epoch))
    except ray.exceptions.RayError:
        return None
    return None if account.order is None else account.order.secrets
