"""What a person at the page may do to the job. Each is a command that others can give as well; the page knows no special way."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from dlrover.protocol.codec import Question
from dlrover.protocol.messages.checkpoint import RequestSave
from dlrover.protocol.messages.job import NodeId, StopJob
from dlrover.protocol.messages.requests import RelaunchNode, RestartWorkers

MAX_REASON = 200


class ActionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an action."""

    confirm: str
    """The action's own name: what a person confirmed, and no stray request."""
    node: int | None = None
    reason: str = ""


class BadWish(ValueError):
    """What is wrong with it, for the person."""


class Action(Struct, frozen=True):
    make: Callable[[str, NodeId], Question]
    done: str
    """Said when the master has accepted it."""
    needs_node: bool = False


ACTIONS = {
    "restart-workers": Action(
        lambda reason, _: RestartWorkers(reason=reason), "The workers stop and start again in the next round."
    ),
    "relaunch-node": Action(
        lambda reason, node: RelaunchNode(node=node, reason=reason),
        "The node is replaced by a new one.",
        needs_node=True,
    ),
    "cordon-node": Action(
        lambda reason, node: RelaunchNode(node=node, reason=reason, is_cordoned=True),
        "The node is replaced, and this job uses its machine no more.",
        needs_node=True,
    ),
    "save": Action(lambda reason, _: RequestSave(reason=reason), "The next save of the trainers goes to storage."),
    "stop": Action(lambda reason, _: StopJob(message=reason), "The job is stopping."),
}


def read_wish(name: str, body: bytes) -> tuple[Action, Question]:
    """Raises `BadWish`, or KeyError for an action that there is not."""
    action = ACTIONS[name]
    try:
        wish = msgspec.json.decode(body, type=ActionRequest)
    except msgspec.MsgspecError as error:
        raise BadWish(f"The request cannot be read: {error}.") from error
    if wish.confirm != name:
        raise BadWish(f'The request is not confirmed. Give "confirm": "{name}".')
    if action.needs_node and wish.node is None:
        raise BadWish('"node" is missing. Give the node.')
    reason = f"dashboard: {wish.reason[:MAX_REASON]}" if wish.reason else "dashboard"
    return action, action.make(reason, NodeId(-1 if wish.node is None else wish.node))
