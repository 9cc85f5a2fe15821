"""
Cuts: what a checkpoint of a parameter-server job has seen of the data.

Updates of such a job land whenever they are ready, so the step of a model does not say which of them it contains. Before the chief saves it takes
a cut: what was reported before it is in the checkpoint, what is reported later is not counted as in it. Consumption is booked under the number
of the running cut, as it is booked under the step of the model elsewhere; so a return to a checkpoint is a return to its cut.
"""

from __future__ import annotations

from dlrover.core.data.checkpoint_text import read_states, write_states
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.restoring import is_other, return_to
from dlrover.core.decision import Decision
from dlrover.core.happenings import CutTaking, ModelReturns
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import FRESH, NO_CUT
from dlrover.protocol.messages.data import NO_STEP, TaskType
from dlrover.protocol.messages.identity import Round

_NOBODY = Round(-1)
"""The round whose leases stay: all processes that held any have ended."""


def on_cut_taken(decision: Decision, taking: CutTaking) -> None:
    datasets = _trained(decision)
    taking.data_state = write_states(datasets, taking.cut) if datasets else ""


def on_cut_counts(decision: Decision, cut: int) -> None:
    """No model will be older than its checkpoint from here on."""
    for dataset in _trained(decision):
        dataset.commit(cut)


def on_model_returns(decision: Decision, model: ModelReturns) -> None:
    """The data goes back with it, unless the user wants it to go on."""
    if model.is_data_kept:
        decision.say("The datasets go on where they are; what was read since the checkpoint is not in the model.")
    elif model.step == FRESH:
        _return_to_beginning(decision)
    elif model.cut == NO_CUT:
        decision.say(
            f"Nothing is stored beside the checkpoint of step {model.step} about the data: the datasets go on where they are."
        )
    else:
        _return_to_cut(decision, model.cut, model.data_state)


def _return_to_beginning(decision: Decision) -> None:
    """There is no checkpoint: nothing that was read is in the model."""
    for dataset in _trained(decision):
        if dataset.num_committed:
            decision.say(
                f"The checkpoint with {dataset.num_committed} records of {dataset.spec.name!r} is not there any more: they are not read "
                "again. Bring it back, or start a new job."
            )
        dataset.restore(NO_STEP)


def _return_to_cut(decision: Decision, cut: int, data_state: str) -> None:
    """The model of this cut is the one that is trained on. What is stored beside it counts where the books differ from it."""
    books = decision.state.data
    told: dict[str, str] = {}
    try:
        told = read_states(data_state).texts if data_state else {}
    except Rejected as error:
        decision.say(f"{error} Instead, the master uses its own journal of what was read.")
    books.awaited = {name: text for name, text in told.items() if name not in books.datasets}
    for dataset in _trained(decision):
        text = told.get(dataset.spec.name)
        if text is not None and is_other(dataset, text, cut) and return_to(decision, dataset, text, _NOBODY):
            continue
        before = dataset.num_consumed
        dataset.restore(cut)
        if dataset.num_consumed != before:
            decision.say(
                f"{before - dataset.num_consumed} records of {dataset.spec.name!r} were read after the checkpoint and are read again."
            )


def _trained(decision: Decision) -> list[Dataset]:
    datasets = decision.state.data.datasets.values()
    return [each for each in datasets if each.spec.task_type is TaskType.TRAINING]
