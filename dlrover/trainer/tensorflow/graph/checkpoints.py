"""
Checkpoints of the chief, and what they have seen of the data.

Before a save the chief takes a cut from the master. The cut and the state of all datasets lie beside the checkpoint, in `<prefix>.dlrover.json`,
before the checkpoint counts; `data_shard_checkpoint.json` names the newest. A restore returns the data to the cut of exactly that checkpoint.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import time
from typing import Any

import msgspec
import tensorflow as tf
from msgspec import Struct

from dlrover.protocol.messages.cluster import FRESH, NO_CUT, CutTaken, ModelRestored, ModelSaved, TakeCut
from dlrover.trainer.tensorflow.link import ClusterLink

log = logging.getLogger("dlrover.trainer.tensorflow")

SUFFIX = ".dlrover.json"
POINTER = "data_shard_checkpoint.json"
BASE_NAME = "model.ckpt"


class SeenData(Struct, kw_only=True):
    """Content of the file beside a checkpoint."""

    version: int = 1
    step: int
    cut: int
    data_state: str = ""


class ModelCheckpoints:
    """Of one model directory. Used by the chief alone."""

    def __init__(self, model_dir: str, link: ClusterLink) -> None:
        self._model_dir = model_dir
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
        # Before the checkpoint itself: one that counts is never without it.
        _write(f"{self._prefix}-{step}{SUFFIX}", msgspec.json.encode(seen))
        if step == self._saved_step:
            self._link.tell(ModelSaved(step=step, cut=taken.cut))  # nothing was trained since; more of it is known now
            return step
        with session.graph.as_default():  # the thread that parks has another one
            path = saver.save(session, self._prefix, global_step=step)
        _write(
            os.path.join(self._model_dir, POINTER),
            msgspec.json.encode({"checkpoint": os.path.basename(path), "step": step}),
        )
        self._saved_step = step
        self._link.tell(ModelSaved(step=step, cut=taken.cut))
        log.info("saved step %d with cut %d in %.2f s", step, taken.cut, time.monotonic() - began_at)
        self._remove_orphans()
        return step

    def _remove_orphans(self) -> None:
        """Beside checkpoints that TensorFlow has removed."""
        for path in glob.glob(f"{glob.escape(self._prefix)}-*{SUFFIX}"):
            if not os.path.exists(f"{path.removesuffix(SUFFIX)}.index"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def newest_checkpoint(model_dir: str) -> str | None:
    """Prefix of the newest complete checkpoint; None: there is none."""
    found = tf.train.latest_checkpoint(model_dir)
    return None if found is None else str(found)


_SEEN_DECODER = msgspec.json.Decoder(SeenData)


def read_seen(prefix: str) -> SeenData | None:
    """None: the checkpoint is not of this system, or what lies beside it cannot be read."""
    try:
        with open(f"{prefix}{SUFFIX}", "rb") as file:
            return _SEEN_DECODER.decode(file.read())
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write(path: str, content: bytes) -> None:
    """Whole or not at all."""
    partial = f"{path}.part"
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
