"""A two-layer character model that shall learn to write three digits in order, and what all roles must agree on about it."""

from __future__ import annotations

import hashlib
import random

import torch
from torch import nn

DIGITS = 6
LENGTH = 3
NUM_ANSWERS = 4
"""To each prompt; their mean is what an answer is compared with."""
SEED = 7


def new_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(LENGTH * DIGITS, 64), nn.Tanh(), nn.Linear(64, LENGTH * DIGITS))


def prompt_of(key: int) -> list[int]:
    """Of a sample's key, for ever the same."""
    chance = random.Random(f"{SEED}/{key}")
    return [chance.randrange(DIGITS) for _ in range(LENGTH)]


def logits(model: nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """One row of scores for each character of each answer."""
    seen = nn.functional.one_hot(torch.tensor(prompts), DIGITS).float().flatten(1)
    result: torch.Tensor = model(seen).view(len(prompts), LENGTH, DIGITS)
    return result


def sample(model: nn.Module, key: int, step: int) -> list[list[int]]:
    """Answers to a prompt. They depend on the key, the step and the weights alone, not on who makes them or when."""
    chance = torch.Generator().manual_seed(SEED * 1_000_003 + key * 997 + step)
    with torch.no_grad():
        probabilities = logits(model, [prompt_of(key)])[0].softmax(-1)
    return [torch.multinomial(probabilities, 1, generator=chance).flatten().tolist() for _ in range(NUM_ANSWERS)]


def score(prompt: list[int], answer: list[int]) -> list[float]:
    """For each character: whether it is the right one."""
    return [float(given == right) for given, right in zip(answer, sorted(prompt), strict=True)]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def digest(weights: dict[str, torch.Tensor]) -> str:
    """By which a sample tells the weights that made it."""
    total = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        total.update(weights[name].numpy().tobytes())
    return total.hexdigest()
