"""Scores answers. Scoring twice does no harm, so a call to an instance that died is sent again."""

from __future__ import annotations

from dlrover.unified import rpc
from examples.grpo import model


class Reward:
    @rpc(retry=True)
    def score(self, prompt: list[int], answers: list[list[int]]) -> list[list[float]]:
        return [model.score(prompt, answer) for answer in answers]
