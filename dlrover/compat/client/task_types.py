"""The types of tasks as numbers, and the answer to a report: `dlrover.proto.elastic_training_pb2`."""

from __future__ import annotations

from dlrover.protocol.messages.data import TaskType as TaskType

NONE, TRAINING, EVALUATION, PREDICTION, WAIT, TRAIN_END_CALLBACK = TaskType
