"""
The real Estimator (TensorFlow 2.15 and older) inside a cluster: the only module that knows `tf.estimator`.

The user's Estimator is neither changed nor subclassed. A second one calls its model function and puts our hooks and scaffold into what comes back:
that is all TensorFlow needs to wait for the chief, to save with a cut, and to park.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.cluster import ClusterPhase, VersionView
from dlrover.trainer.tensorflow.conf import CONTINUE, Conf
from dlrover.trainer.tensorflow.config import CHIEF, VARIABLE, WORKER, task_config
from dlrover.trainer.tensorflow.graph.checkpoints import ModelCheckpoints, newest_checkpoint
from dlrover.trainer.tensorflow.graph.hooks import Parking, SavingHook, TrainingHook
from dlrover.trainer.tensorflow.graph.input import TrainingInput, evaluation_input, serving_input
from dlrover.trainer.tensorflow.graph.scaffold import WaitingScaffold
from dlrover.trainer.tensorflow.graph.session import TaskServer, session_config
from dlrover.trainer.tensorflow.link import ClusterLink, VersionOver

log = logging.getLogger("dlrover.trainer.tensorflow")

_ATTACHED_CHIEF = 1000
"""Task number, among workers, of a chief that comes to living variables: TensorFlow's own chief would restore them under the workers' feet."""
_FINAL_FLUSH = 60.0

if hasattr(tf, "estimator"):
    tf.estimator.Estimator  # noqa: B018  TensorFlow loads it at the first use; in a zygote that is now


def check_estimator() -> None:
    """Raises `ConfigError` where TensorFlow has no Estimator."""
    if not hasattr(tf, "estimator"):
        raise ConfigError(
            f"TensorFlow {tf.__version__} has no tf.estimator: it was removed in 2.16. Install the extra dlrover[tensorflow-estimator] "
            "(TensorFlow 2.15, Python 3.11)."
        )


def train(conf: Conf, link: ClusterLink, server: TaskServer) -> None:
    """One process of a version, as chief or worker, to the end of the data, the last step, or the end of its version."""
    where = link.where
    is_chief = where.task_type == CHIEF
    view = link.wait_for(lambda view: bool(view.servers) and view.phase is not ClusterPhase.GATHERING)
    # A chief beside living variables takes them as they are.
    is_attaching = is_chief and view.restored_step is not None
    task, rank = (WORKER, _ATTACHED_CHIEF) if is_attaching else (where.task_type, where.task_rank)
    training = _Training(conf, link, view, is_chief=is_chief, is_attaching=is_attaching)
    config = task_config(task, rank, view.servers, own_address=server.address, target=server.target)
    os.environ[VARIABLE] = config.to_text()
    session = session_config(task, rank, server.address, view.servers, conf.session_config)
    estimator = training.build(run_config(conf, session))
    who = f"{where.task_type}-{where.task_rank}"
    log.info("%s trains in version %d with %d servers (pid %d)", who, view.version, len(view.servers), os.getpid())
    estimator.train(training.source.build, max_steps=conf.max_steps)
    training.finish()


def run_config(conf: Conf, session: Any) -> Any:
    """Without saves of TensorFlow's own: ours take a cut."""
    return tf.estimator.RunConfig(
        model_dir=conf.model_dir,
        session_config=session,
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        save_summary_steps=conf.log_steps,
        keep_checkpoint_max=conf.keep_checkpoint_max,
        log_step_count_steps=conf.log_steps,
    )


class _Training:
    def __init__(self, conf: Conf, link: ClusterLink, view: VersionView, *, is_chief: bool, is_attaching: bool) -> None:
        self._conf = conf
        self._link = link
        self._is_chief, self._is_attaching = is_chief, is_attaching
        self._is_stopped_early = False
        self._saving: SavingHook | None = None
        self._parking = Parking(link, flush=self.flush, save=self._save if is_chief else None)
        self.source = TrainingInput(conf.train_set, self._parking)
        if is_chief:
            os.makedirs(conf.model_dir, exist_ok=True)
            self._saving = SavingHook(
                ModelCheckpoints(conf.model_dir, link),
                newest=newest_checkpoint(conf.model_dir),
                is_attaching=is_attaching,
                is_data_kept=conf.data_on_restore == CONTINUE,
                flush=self.flush,
                wait_for_workers=self._wait_for_workers,
                save_steps=None if conf.save_secs else conf.save_steps,
                save_secs=conf.save_secs,
            )

    def build(self, config: Any) -> Any:
        users = build_users_estimator(self._conf, config)

        def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
            spec = users.model_fn(features=features, labels=labels, mode=mode, config=config)
            if mode != tf.estimator.ModeKeys.TRAIN:
                return spec
            ours = [TrainingHook(self.source, self._parking)] if self._saving is None else [
                self._saving, TrainingHook(self.source, self._parking)
            ]  # fmt: skip
            # Those of a chief that attaches would be left out: TensorFlow does not take it for one.
            of_chief = [*(spec.training_chief_hooks or ()), *self._conf.training_chief_hooks] if self._is_chief else []
            hooks = [*(spec.training_hooks or ()), *self._conf.training_hooks, *of_chief, *ours]
            scaffold = WaitingScaffold(self._wait, self._link.await_end, spec.scaffold)
            return spec._replace(training_hooks=_unique(hooks), training_chief_hooks=(), scaffold=scaffold)

        return tf.estimator.Estimator(model_fn, model_dir=self._conf.model_dir, config=config)

    def flush(self) -> None:
        client = self.source.client
        if client is not None:
            client.flush(_FINAL_FLUSH)

    def finish(self) -> None:
        """The training of this process is over, and all that it read is reported."""
        client = self.source.client
        if client is not None and not self.source.is_exhausted and not self._is_stopped_early:
            self._is_stopped_early = True
            client.stop_early("the last step or a hook of the user ended the training")
        self.flush()

    def _wait_for_workers(self) -> None:
        self.finish()
        self._parking.no_more_steps()
        try:
            self._link.wait_for(lambda view: view.num_workers == 0)
        except VersionOver:
            self._link.await_end()

    def _wait(self) -> None:
        if not self._is_chief:
            self._link.wait_for(lambda view: view.restored_step is not None)

    def _save(self) -> None:
        assert self._saving is not None, "only a chief saves"
        self._saving.save()


def evaluate(conf: Conf, link: ClusterLink) -> None:
    """Each new checkpoint, as long as there is training; the last one in any case. The best is exported."""
    if conf.eval_set is None:
        link.wait_for_training_end()
        return
    os.environ.pop(VARIABLE, None)
    session = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    estimator = build_users_estimator(conf, run_config(conf, session))
    exporter = tf.estimator.BestExporter("best", serving_input(list(conf.eval_set.columns)))
    source = evaluation_input(conf.eval_set)
    seen = None
    number = 0
    while True:
        view = link.wait_for_newer(number)
        number = view.number
        newest = newest_checkpoint(conf.model_dir)
        if newest is not None and newest != seen:
            result = estimator.evaluate(
                source, steps=conf.eval_steps, hooks=list(conf.evaluation_hooks), checkpoint_path=newest
            )
            seen = newest
            path = os.path.join(conf.model_dir, "export", exporter.name)
            exporter.export(estimator, path, newest, result, view.is_over)
            log.info("evaluated %s: %s", os.path.basename(newest), result)
        if view.is_over and seen == newest_checkpoint(conf.model_dir):
            return


def build_users_estimator(conf: Conf, config: Any) -> Any:
    found = conf.classifier_class
    if isinstance(found, str):
        module, _, name = found.rpartition(".")
        found = getattr(tf.compat.v1.estimator if not module else __import__(module, fromlist=[name]), name)
    params = conf.params.to_dict() if isinstance(conf.params, Conf) else conf.params
    return found(model_dir=conf.model_dir, config=config, params=params)


def _unique(hooks: list[Any]) -> list[Any]:
    """A hook of a class that the user names twice runs once."""
    return list({id(hook): hook for hook in hooks}.values())
