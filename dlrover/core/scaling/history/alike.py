"""
Which former jobs are like the one that asks: by the first of three levels on which a completed job is found.

Only jobs of the same tenant count, and what is not known of a job is equal to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from dlrover.core.scaling.history.seen import JobSeen, Recipe

HOUR = 3600.0


class AlikeJobs(Struct, frozen=True, kw_only=True):
    level: int = 0
    """1 the same recipe, 2 the same script of the same user, 3 the same strategy and size of model; 0: none is alike."""
    jobs: tuple[JobSeen, ...] = ()
    """The newest first, those that did not complete too."""

    @property
    def completed(self) -> tuple[JobSeen, ...]:
        return tuple(job for job in self.jobs if job.is_completed)

    @property
    def text(self) -> str:
        if not self.level:
            return "no completed job is like this one"
        what = {1: "the same recipe", 2: "the same script, user and strategy", 3: "the same strategy and size of model"}
        count = len(self.completed)
        return f"{count} completed job{'' if count == 1 else 's'} with {what[self.level]} (level {self.level})"


def find_alike(
    recipe: Recipe, former: Sequence[JobSeen], *, before: float = math.inf, hours: float = math.inf
) -> AlikeJobs:
    """Of jobs that began in so many hours before that moment."""
    recent = [
        job for job in former if before - hours * HOUR <= job.began_at <= before and job.recipe.tenant == recipe.tenant
    ]
    for level, is_alike in enumerate(LEVELS, start=1):
        jobs = [job for job in recent if is_alike(job.recipe, recipe)]
        if any(job.is_completed for job in jobs):
            newest_first = sorted(jobs, key=lambda job: (-job.began_at, job.uid))
            return AlikeJobs(level=level, jobs=tuple(newest_first))
    return AlikeJobs()


def level_keys(recipe: Recipe) -> tuple[str, ...]:
    """A text for each level, equal for jobs that are alike on it; empty: what the level needs is not known. For the index of a store."""
    by_name = f"name\t{recipe.name}" if recipe.name else ""
    parts = (recipe.script_hash, recipe.dataset, _digits(recipe.model_size))
    by_parts = "\t".join(("parts", *parts)) if all(parts) else ""
    second = (recipe.script, recipe.user, recipe.strategy)
    third = (recipe.strategy, _decade(recipe.model_size))
    return (by_name, by_parts, "\t".join(second) if all(second) else "", "\t".join(third) if all(third) else "")


def _is_same_recipe(one: Recipe, other: Recipe) -> bool:
    if one.name or other.name:
        return one.name == other.name
    return bool(level_keys(one)[1]) and level_keys(one)[1] == level_keys(other)[1]


def _is_same_script(one: Recipe, other: Recipe) -> bool:
    return bool(level_keys(one)[2]) and level_keys(one)[2] == level_keys(other)[2]


def _is_same_size(one: Recipe, other: Recipe) -> bool:
    return bool(level_keys(one)[3]) and level_keys(one)[3] == level_keys(other)[3]


LEVELS: tuple[Callable[[Recipe, Recipe], bool], ...] = (_is_same_recipe, _is_same_script, _is_same_size)


def _digits(size: int) -> str:
    """The first two digits and the power of ten: models whose sizes differ by less are the same."""
    return f"{size:.1e}" if size > 0 else ""


def _decade(size: int) -> str:
    return str(math.floor(math.log10(size))) if size > 0 else ""
