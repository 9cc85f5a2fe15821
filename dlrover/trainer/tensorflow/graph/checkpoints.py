"""
Checkpoints of the chief, and what they have seen of the data.

Before a save the chief takes a cut from the master. The cut and the state of all datasets lie beside the checkpoint before it counts. A restore returns
the data to the cut of exactly that checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import tensorflow as tf

from dlrover.protocol.messages.cluster import FRESH, NO_CUT, CutTaken, ModelRestored, ModelSaved, TakeCut
from dlrover.trainer.tensorflow.link import ClusterLink
from dlrover.trainer.tensorflow.seen_data import BASE_NAME, SeenData, point_to, read_seen, write_seen

log = logging.getLogger("dlrover.trainer.tensorflow")


class ModelCheckpoints:
    """Of one model directory. Used by the chief alone."""

    def __init__(self, model_dir: str, link: ClusterLink) -> None:
        self._link = link
        self._prefix = os.path.join(model_dir, BASE_NAME)
        self._saved_step: int | None = None
        """Of the newest checkpoint that this process knows: its own, or the one that it restored."""

    def restored(self, session: Any, step_tensor: Any, newest: str | None, *, is_data_kept: bool) -> None:
        """Tell the master what the session began with. `newest`: prefix of the checkpoint that it was restored from; None: there was none."""
        step = int(session.run(step_tensor))
        seen = None if newest is None else read_seen(newest)
        self._saved_step = None if seen is None else step  # the very same model need not be written again
        self._link.tell(
            ModelRestored(
                step=FRESH if newest is None else step,
                cut=NO_CUT if seen is None else seen.cut,
                data_state="" if seen is None else seen.data_state,
                is_data_kept=is_data_kept,
            )
        )

    def save(self, session: Any, saver: Any, step_tensor: Any) -> int:
        """One whole checkpoint. Everything that this process has read must be reported. Returns its step."""
        began_at = time.monotonic()
        taken = self._link.tell(TakeCut())
        assert isinstance(taken, CutTaken), taken
        step = int(session.run(step_tensor))  # after the cut: whatever was reported before it is in this step
        seen = SeenData(step=step, cut=taken.cut, data_state=taken.data_state)
        write_seen(f"{self._prefix}-{step}", seen)
        if step == self._saved_step:
            self._link.tell(ModelSaved(step=step, cut=taken.cut))  # nothing was trained since; more of it is known now
            return step
        with session.graph.as_default():  # the thread that parks has another one
            saver.save(session, self._prefix, global_step=step)
        point_to(f"{self._prefix}-{step}", step)
        self._saved_step = step
        self._link.tell(ModelSaved(step=step, cut=taken.cut))
        log.info("saved step %d with cut %d in %.2f s", step, taken.cut, time.monotonic() - began_at)
        return step


def newest_checkpoint(model_dir: str) -> str | None:
    """Prefix of the newest complete checkpoint; None: there is none."""
    found = tf.train.latest_checkpoint(model_dir)
    return None if found is None else str(found)
