"""
Scripts that call `tf.estimator.train_and_evaluate` by themselves, with `TF_CONFIG` and without a line of ours.

Such a script is no more than a model, its input and two specifications. So a parameter server runs none of it, it only serves. In the chief and the
workers the script runs, and what it hands to `train_and_evaluate` is trained as the model of a conf class is: with a fresh server, the small
cluster of the version, and our hooks. Its `RunConfig` says when to save. The evaluator runs `train_and_evaluate` as it is.

For that `tf.estimator.train_and_evaluate` is ours in these processes. No class of TensorFlow is changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover.protocol.messages.cluster import ServerBound
from dlrover.trainer.tensorflow.config import CHIEF, EVALUATOR, VARIABLE, TfConfig, TfTask, task_config
from dlrover.trainer.tensorflow.estimator.training import TaskTraining, TrainingTerms, join, wait_for_servers
from dlrover.trainer.tensorflow.link import ClusterLink, VersionOver
from dlrover.trainer.tensorflow.server import TaskServer

log = logging.getLogger("dlrover.trainer.tensorflow")

_NAME = "train_and_evaluate"
_PACKAGE = "tensorflow_estimator"
_API = "tensorflow_estimator.python.estimator.api._v{}.estimator"
_NOWHERE = "localhost:1"
"""Stands in lists of TensorFlow that no process connects to."""


def prepare(link: ClusterLink) -> None:
    """Before the script of a chief, a worker or an evaluator begins: what it reads of `TF_CONFIG`, and what `train_and_evaluate` is."""
    where = link.where
    if where.task_type == EVALUATOR:
        task = TfTask(type=EVALUATOR, index=0)
        config = TfConfig(cluster={"ps": [_NOWHERE], CHIEF: [_NOWHERE]}, task=task)
        os.environ[VARIABLE] = config.to_text()
        return
    link.start()
    server = TaskServer(where.task_type, where.task_rank, where.node_host)
    link.tell(ServerBound(address=server.address))
    try:
        view = wait_for_servers(link)
    except VersionOver:
        link.await_end()
    config = task_config(
        where.task_type, where.task_rank, view.servers, own_address=server.address, target=server.target
    )
    os.environ[VARIABLE] = config.to_text()
    _offer(functools.partial(_train, link, server))


def _train(link: ClusterLink, server: TaskServer, estimator: Any, train_spec: Any, eval_spec: Any = None) -> None:
    """In place of TensorFlow's: what it would do in a chief or a worker."""
    if getattr(train_spec, "saving_listeners", None):
        log.warning("saving_listeners of TrainSpec are not called: the chief saves with a hook of DLRover.")
    try:
        view = wait_for_servers(link)
        own = estimator.config
        terms = TrainingTerms(
            model_dir=estimator.model_dir,
            save_steps=own.save_checkpoints_steps,
            save_secs=own.save_checkpoints_secs,
        )
        training = TaskTraining(terms, link, view)
        given = own.session_config
        if given is not None:
            given = tf.compat.v1.ConfigProto.FromString(given.SerializeToString())
            del given.device_filters[:]  # TensorFlow's defaults name the tasks of a cluster that all know
        session = join(training, link, view, server, given)
        config = tf.estimator.RunConfig(
            model_dir=estimator.model_dir,
            tf_random_seed=own.tf_random_seed,
            save_summary_steps=own.save_summary_steps,
            save_checkpoints_steps=None,
            save_checkpoints_secs=None,
            session_config=session,
            keep_checkpoint_max=own.keep_checkpoint_max,
            keep_checkpoint_every_n_hours=own.keep_checkpoint_every_n_hours,
            log_step_count_steps=own.log_step_count_steps,
        )
        ours = training.build(estimator, config)
        ours.train(train_spec.input_fn, hooks=list(train_spec.hooks), max_steps=train_spec.max_steps)
        training.finish()
    except VersionOver:
        link.await_end()


def _offer(ours: Callable[..., None]) -> None:
    """Under all names that scripts call it by."""
    owners = [tf.estimator, tf.compat.v1.estimator, tf.compat.v2.estimator]
    if tf.estimator.__name__.startswith(_PACKAGE) or importlib.util.find_spec(_PACKAGE) is not None:
        owners += [importlib.import_module(_API.format(version)) for version in (1, 2)]
    for owner in owners:
        setattr(owner, _NAME, ours)
