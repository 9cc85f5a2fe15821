"""Answers prompts with the weights of the step that asks, has the answers scored, and hands them to the trainer."""

from __future__ import annotations

import torch

from dlrover.unified import Stream, Weights, current, group
from examples.grpo.model import digest, new_model, prompt_of, sample


class Rollout:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = new_model()
        self.lag = int((current().config or {}).get("stale", 0))
        """For the test: use weights that are older by so many steps than this says."""

    def run(self) -> None:
        weights, reward = Weights("policy"), group("reward")
        held: list[tuple[int, dict[str, torch.Tensor]]] = []
        for task in Stream("samples").tasks(most=4):
            if not held or held[-1][0] != task.step:
                held = (
                    [*held[-self.lag :], (task.step, weights.fetch(task.step))]
                    if self.lag
                    else [(task.step, weights.fetch(task.step))]
                )
            _, state = held[0]
            self.model.load_state_dict(state)
            answers = sample(self.model, task.key, task.step)
            prompt = prompt_of(task.key)
            scores = reward.call_rank0("score", prompt, answers).result()
            task.put({"prompt": prompt, "answers": answers, "scores": scores, "weights": digest(state)})
