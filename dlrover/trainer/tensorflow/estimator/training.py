"""
An Estimator inside a cluster: TensorFlow's own (2.15 and older) or, where it has none, ours.

The user's Estimator is neither changed nor subclassed. A second one calls its model function and puts our hooks and scaffold into what comes back:
that is all TensorFlow needs to wait for the chief, to save with a cut, and to park.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf
from msgspec import Struct

from dlrover.protocol.messages.cluster import ClusterPhase, VersionView
from dlrover.trainer.tensorflow.conf import CONTINUE, Conf
from dlrover.trainer.tensorflow.config import CHIEF, VARIABLE, WORKER, task_config
from dlrover.trainer.tensorflow.estimator.layer.api import offer
from dlrover.trainer.tensorflow.graph.checkpoints import ModelCheckpoints, newest_checkpoint
from dlrover.trainer.tensorflow.graph.hooks import ExactSaves, Parking, SavingHook, TrainingHook
from dlrover.trainer.tensorflow.graph.input import TrainingInput, evaluation_input, serving_input
from dlrover.trainer.tensorflow.graph.scaffold import WaitingScaffold
from dlrover.trainer.tensorflow.graph.session import session_config
from dlrover.trainer.tensorflow.hooks.model_info_hook import ReportModelInfoHook
from dlrover.trainer.tensorflow.link import ClusterLink, VersionOver
from dlrover.trainer.tensorflow.server import TaskServer

log = logging.getLogger("dlrover.trainer.tensorflow")

_ATTACHED_CHIEF = 1000
"""Task number, among workers, of a chief that comes to living variables: TensorFlow's own chief would restore them under the workers' feet."""
_FINAL_FLUSH = 60.0

offer()
tf.estimator.Estimator  # noqa: B018  TensorFlow loads its own at the first use; in a zygote that is now


def train(conf: Conf, link: ClusterLink, server: TaskServer) -> None:
    """One process of a version, as chief or worker, to the end of the data, the last step, or the end of its version."""
    view = wait_for_servers(link)
    training = TaskTraining(terms_of(conf), link, view, conf.train_set)
    assert training.source is not None, "read by us"
    session = join(training, link, view, server, conf.session_config)
    config = run_config(conf, session)
    estimator = training.build(build_users_estimator(conf, config), config)
    estimator.train(training.source.build, max_steps=conf.max_steps)
    training.finish()


def wait_for_servers(link: ClusterLink) -> VersionView:
    return link.wait_for(lambda view: bool(view.servers) and view.phase is not ClusterPhase.GATHERING)


def join(training: TaskTraining, link: ClusterLink, view: VersionView, server: TaskServer, given: Any) -> Any:
    """Tell TensorFlow what this process is. Returns the configuration of its session; `given`: the user's."""
    task, rank = training.task
    config = task_config(task, rank, view.servers, own_address=server.address, target=server.target)
    os.environ[VARIABLE] = config.to_text()
    who = f"{link.where.task_type}-{link.where.task_rank}"
    log.info("%s trains in version %d with %d servers (pid %d)", who, view.version, len(view.servers), os.getpid())
    return session_config(task, rank, server.address, view.servers, given)


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


class TrainingTerms(Struct, frozen=True, kw_only=True):
    """How a model is trained and saved, as told by a conf class, or by a script with a `RunConfig` of its own."""

    model_dir: str
    save_steps: int | None = None
    save_secs: float | None = None
    is_data_kept: bool = False
    has_exact_saves: bool = False
    hooks: tuple[Any, ...] = ()
    chief_hooks: tuple[Any, ...] = ()


def terms_of(conf: Conf) -> TrainingTerms:
    return TrainingTerms(
        model_dir=conf.model_dir,
        save_steps=None if conf.save_secs else conf.save_steps,
        save_secs=conf.save_secs,
        is_data_kept=conf.data_on_restore == CONTINUE,
        has_exact_saves=bool(conf.exact_saves),
        hooks=tuple(conf.training_hooks),
        chief_hooks=tuple(conf.training_chief_hooks),
    )


class TaskTraining:
    """Of one process, as chief or worker."""

    def __init__(
        self, terms: TrainingTerms, link: ClusterLink, view: VersionView, train_set: Conf | None = None
    ) -> None:
        """`train_set`: read by us; None: the script reads by itself."""
        self._terms = terms
        self._link = link
        self._is_chief = link.where.task_type == CHIEF
        # A chief beside living variables takes them as they are.
        self._is_attaching = self._is_chief and view.restored_step is not None
        self._is_stopped_early = False
        self._saving: SavingHook | None = None
        self._parking = Parking(link, flush=self.flush, save=self._save if self._is_chief else None)
        self.source = None if train_set is None else TrainingInput(train_set, self._parking)
        if self._is_chief:
            os.makedirs(terms.model_dir, exist_ok=True)
            self._saving = SavingHook(
                ModelCheckpoints(terms.model_dir, link),
                newest=newest_checkpoint(terms.model_dir),
                is_attaching=self._is_attaching,
                is_data_kept=terms.is_data_kept,
                flush=self.flush,
                wait_for_workers=self._wait_for_workers,
                save_steps=terms.save_steps,
                save_secs=terms.save_secs,
                park_for_save=ExactSaves(link).ask if terms.has_exact_saves else None,
            )

    @property
    def task(self) -> tuple[str, int]:
        """What TensorFlow shall take this process for."""
        where = self._link.where
        return (WORKER, _ATTACHED_CHIEF) if self._is_attaching else (where.task_type, where.task_rank)

    def build(self, users: Any, config: Any) -> Any:
        """An Estimator that trains the model of the user's."""

        def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
            spec = users.model_fn(features=features, labels=labels, mode=mode, config=config)
            if mode != tf.estimator.ModeKeys.TRAIN:
                return spec
            ours: list[Any] = [TrainingHook(self.source, self._parking)]
            if self._saving is not None:
                ours = [self._saving, *ours, ReportModelInfoHook()]
            # Those of a chief that attaches would be left out: TensorFlow does not take it for one.
            of_chief = [*(spec.training_chief_hooks or ()), *self._terms.chief_hooks] if self._is_chief else []
            hooks = [*(spec.training_hooks or ()), *self._terms.hooks, *of_chief, *ours]
            scaffold = WaitingScaffold(self._wait, self._link.await_end, spec.scaffold)
            if self._saving is not None:
                self._saving.scaffold = scaffold
            return spec._replace(training_hooks=_unique(hooks), training_chief_hooks=(), scaffold=scaffold)

        return tf.estimator.Estimator(model_fn, model_dir=self._terms.model_dir, config=config)

    def flush(self) -> None:
        client = None if self.source is None else self.source.client
        if client is not None:
            client.flush(_FINAL_FLUSH)

    def finish(self) -> None:
        """The training of this process is over, and all that it read is reported."""
        source = self.source
        client = None if source is None else source.client
        if source is not None and client is not None and not source.is_exhausted and not self._is_stopped_early:
            self._is_stopped_early = True
            client.stop_early("training ended, by the last step or by a hook of the script")
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
    """A hook that the user names twice runs once."""
    return list({id(hook): hook for hook in hooks}.values())
