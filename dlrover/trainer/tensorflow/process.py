"""
What the process of a node does in a cluster: serve, train or evaluate, as its agent says.

Forked from a zygote that has imported TensorFlow, or started cold. It ends with 0 when its work is done; a process of a version that is over is
killed by its agent.
"""

from __future__ import annotations

import logging
import os

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.cluster import ServerBound
from dlrover.trainer import environment
from dlrover.trainer.tensorflow import config
from dlrover.trainer.tensorflow.conf import Conf, load_conf
from dlrover.trainer.tensorflow.config import EVALUATOR, PS
from dlrover.trainer.tensorflow.coordinator import training as coordinating
from dlrover.trainer.tensorflow.coordinator.serving import serve_worker
from dlrover.trainer.tensorflow.estimator import plain
from dlrover.trainer.tensorflow.estimator.training import evaluate, train
from dlrover.trainer.tensorflow.link import ClusterLink, VersionOver
from dlrover.trainer.tensorflow.logs import log_steps, log_to_console
from dlrover.trainer.tensorflow.server import TaskServer

log = logging.getLogger("dlrover.trainer.tensorflow")


def run_task(conf_name: str) -> None:
    """The whole life of the process. A parameter server does not even import the conf class."""
    link = _open_link()
    if link.where.task_type == PS:
        _serve(link)
    else:
        _run(load_conf(conf_name), link)


def run_conf(conf: Conf) -> None:
    """The same with settings that were read before."""
    link = _open_link()
    if link.where.task_type == PS:
        _serve(link)
    else:
        _run(conf, link)


def prepare_script() -> None:
    """For a script that calls TensorFlow's Estimator by itself. A parameter server serves and never returns."""
    log_to_console()
    link = _open_link()
    if link.where.task_type == PS:
        _serve(link)
    else:
        plain.prepare(link)


def _open_link() -> ClusterLink:
    where = environment.current()
    if where is None or not where.task_type:
        raise ConfigError(
            "This process runs outside a parameter-server job. Start the job with `dlrover local --ps N`, or "
            "with --platform local_kubernetes."
        )
    log_steps()
    return ClusterLink(where)


def _run(conf: Conf, link: ClusterLink) -> None:
    try:
        if conf.backend == "coordinator":
            _coordinate(conf, link)
        else:
            _work(conf, link)
    except VersionOver:
        link.await_end()


def _serve(link: ClusterLink) -> None:
    where = link.where
    server = TaskServer(PS, where.task_rank, where.node_host)
    log.info(
        "ps-%d serves version %d at %s (pid %d)", where.task_rank, where.cluster_version, server.address, os.getpid()
    )
    link.tell(ServerBound(address=server.address))
    server.serve()


def _work(conf: Conf, link: ClusterLink) -> None:
    where = link.where
    link.start()
    if where.task_type == EVALUATOR:
        link.tell(ServerBound(address=""))
        evaluate(conf, link)
        return
    server = TaskServer(where.task_type, where.task_rank, where.node_host)
    link.tell(ServerBound(address=server.address))
    train(conf, link, server)


def _coordinate(conf: Conf, link: ClusterLink) -> None:
    match link.where.task_type:
        case config.CHIEF:
            coordinating.train(conf, link)
        case config.EVALUATOR:  # a program says how to train, and nothing about evaluation
            link.start()
            link.tell(ServerBound(address=""))
            link.wait_for_training_end()
        case _:
            serve_worker(link)
