"""
Models that come back, and the data with them.

The ranks of a round say which model they go on with. The books know by themselves what a model of the running job had read; the text of its
checkpoint counts where they do not, or where the user named that checkpoint.
"""

from __future__ import annotations

from dlrover.core.data.checkpoint_text import ToldStates, read_checkpoint, read_states, write_checkpoint
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.progress import state_of
from dlrover.core.data.rules import LARGEST, check_sender
from dlrover.core.decision import Decision, Handlers
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.data import MAX_STATE_BYTES, RestoreAgreed, RestoreDataset, TaskType
from dlrover.protocol.messages.identity import Round
from dlrover.protocol.messages.job import Done, LookAgain, Reply


def _restore_agreed(command: RestoreAgreed, decision: Decision) -> Reply:
    state = decision.state
    state.nodes.current(command.node, command.incarnation)
    if command.round != state.rendezvous.round:
        raise Rejected(
            f"A worker of round {command.round} restored a model, but the newest round is {state.rendezvous.round}. The master rejects "
            "the report. Do nothing: workers of other rounds stop.",
            code=ErrorCode.STALE_ROUND,
        )
    known = state.data.restored.get(command.round)
    if known is not None and known != command.step:
        raise Rejected(
            f"The ranks of round {command.round} agreed on step {known} before, and now on step {command.step}.",
            code=ErrorCode.RESTORE_DIFFERS,
        )
    if not -1 <= command.step < LARGEST:
        raise malformed(f"`step` of a restored model must be from -1 to {LARGEST - 1} (got {command.step}).")
    if len(command.data_state) > MAX_STATE_BYTES:
        raise malformed(f"A data state has at most {MAX_STATE_BYTES} bytes.")
    if known is not None:
        return Done()

    books = state.data
    books.note_restored(command.round, command.step)
    states = _told_states(command, decision)
    told, is_older = states.texts, states.step < command.step
    is_behind = command.step < books.folded
    books.folded = min(books.folded, command.step)
    books.awaited = {name: text for name, text in told.items() if name not in books.datasets}
    for name in books.awaited if is_older else ():
        _say_what_is_repeated(decision, name, states.step, command.step)
    for name, dataset in list(books.datasets.items()):
        if dataset.spec.task_type is not TaskType.TRAINING:
            continue
        dataset.restored_round = command.round
        if name in told and is_older:
            # All that is left of a lost journal. Books that know anything know more than that.
            if not dataset.has_history and return_to(decision, dataset, told[name], command.round):
                books.history_from = command.round
                dataset = books.datasets[name]
                _say_what_is_repeated(decision, name, states.step, command.step)
        elif name in told and (command.is_explicit or is_other(dataset, told[name], command.step)):
            if return_to(decision, dataset, told[name], command.round):
                books.history_from = command.round
                continue
        elif is_behind and name not in told:
            decision.say(
                f"The model of step {command.step} is older than a checkpoint in storage, and no record says what it had read of {name!r}. "
                "What was read up to that checkpoint is not read again."
            )
        elif name not in told and not command.claims:
            say_if_unread(decision, dataset, command.step)
        strange = dataset.restore(command.step, command.claims.get(name, ()), round_=command.round)
        if strange:
            decision.say(
                f"The model of step {command.step} says that it has seen {len(strange)} ranges of {name!r} that this job never gave out. "
                "They may be read again."
            )
    books.fold()
    decision.announce(decision.on.model_restored)
    decision.effects.append(LookAgain((restore_topic(command.round),)))
    return Done()


def restore_topic(round_: Round) -> str:
    return f"restore/{round_}"


def say_if_unread(decision: Decision, dataset: Dataset, step: int) -> None:
    """A trained model and books of which nothing was ever read: the model is older than the books."""
    if step > 0 and not dataset.has_history:
        decision.say(
            f"Neither its checkpoint nor the journal says what the model of step {step} had read of {dataset.spec.name!r}. It is read "
            "from its beginning."
        )


def _say_what_is_repeated(decision: Decision, name: str, stored: int, step: int) -> None:
    decision.say(
        f"The master's journal does not say what was read of {name!r}. The checkpoint of step {stored} says it, but the restored model is "
        f"of step {step}. Data read between these steps is read again."
    )


def _told_states(command: RestoreAgreed, decision: Decision) -> ToldStates:
    """A state that cannot be read must not keep the job from training: the sentence says what it means."""
    try:
        if command.data_state:
            return read_states(command.data_state)
    except Rejected as error:
        decision.say(f"{error} Instead, the master uses its own journal of what was read.")
    return ToldStates(command.step, {})


def is_other(dataset: Dataset, told: str, step: int) -> bool:
    """Whether the books, taken back to the step, would differ from what its checkpoint says."""
    try:
        said = read_checkpoint(told, dataset)
        ours = read_checkpoint(write_checkpoint(dataset, step, most_listed=0), dataset)
    except Rejected:
        return True
    if not said.advance_to(ours.epoch, ours.cursor, ours.offsets):
        return True
    if not ours.advance_to(said.epoch, said.cursor, said.offsets):
        return True
    return said.num_consumed != ours.num_consumed or said.places_left() != ours.places_left()


def return_to(decision: Decision, known: Dataset, content: str, round_: Round) -> bool:
    """
    Let the dataset be as the text says; False, with the reason, if that is not possible. Workers of this round keep what they hold, unless the
    model has seen it.
    """
    try:
        restored = read_checkpoint(content, known)
    except Rejected as error:
        decision.say(f"{error} Dataset {known.spec.name!r} goes on from the master's journal of what was read.")
        return False
    restored.take_over_leases(known, round_)
    _replace(decision, known, restored, known.restored_round)
    decision.say(
        f"Dataset {known.spec.name!r} goes back to where the restored model had read: {restored.num_consumed} records are in it, "
        f"{known.num_consumed} were read in the books."
    )
    return True


def _restore_dataset(command: RestoreDataset, decision: Decision) -> Reply:
    check_sender(command, decision)
    known = decision.state.data.find(command.dataset)
    restored = read_checkpoint(command.content, known)

    _replace(decision, known, restored, command.round)
    return state_of(restored)


def _replace(decision: Decision, known: Dataset, restored: Dataset, restored_round: Round) -> None:
    """Numbers are never used again: late words must not fit."""
    restored.number, restored.last_id = known.number, known.last_id
    restored.restored_round, restored.num_returns = restored_round, known.num_returns + 1
    restored.is_stepped = known.is_stepped
    decision.state.data.datasets[known.spec.name] = restored


HANDLERS: Handlers = {
    RestoreAgreed: _restore_agreed,
    RestoreDataset: _restore_dataset,
}
