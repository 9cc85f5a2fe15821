"""
Least squares with coefficients of at least 0, after Lawson and Hanson.

By hand, because a replay must give the same bits on every machine, and a master must not load numpy (let alone scipy) for a dozen numbers. Only `+ - * /` and
the square root are used, which are exact to the last bit everywhere. Normal equations with columns of length 1: the problems have at most six columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_DEPENDENT = 1e-11
"""A column whose part that the others do not explain is smaller than this share of its length adds nothing but noise."""
_STALLED = 1e-13
"""A gradient below this share of the data is rounding."""

Vector = list[float]


def nnls(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Vector:
    """The x >= 0 with the smallest |rows · x - values|."""
    assert len(rows) == len(values) > 0, "nothing to fit"
    width = len(rows[0])
    lengths = [math.sqrt(sum(row[j] * row[j] for row in rows)) for j in range(width)]
    used = [j for j in range(width) if lengths[j] > 0]
    columns = [[row[j] / lengths[j] for row in rows] for j in used]
    gram = [[_dot(one, other) for other in columns] for one in columns]
    target = [_dot(column, values) for column in columns]
    scale = math.sqrt(_dot(values, values))
    solved = _solve(columns, gram, target, values, _STALLED * scale)
    found = [0.0] * width
    for j, coefficient in zip(used, solved, strict=True):
        found[j] = coefficient / lengths[j]
    return found


def _solve(columns: list[Vector], gram: list[Vector], target: Vector, values: Sequence[float], least: float) -> Vector:
    width = len(columns)
    x = [0.0] * width
    passive: list[int] = []
    refused: list[int] = []
    for _ in range(3 * width + 3):
        gradient = _gradient(columns, x, values)
        free = [j for j in range(width) if j not in passive and j not in refused and gradient[j] > least]
        if not free:
            return x
        entering = max(free, key=lambda j: gradient[j])
        trial = _least_squares(gram, target, [*passive, entering])
        if trial is None or trial[-1] <= 0:
            refused.append(entering)  # the others explain it already
            continue
        passive.append(entering)
        refused = []
        x = _step_to(gram, target, x, passive, trial)
    return x


def _step_to(gram: list[Vector], target: Vector, x: Vector, passive: list[int], trial: Vector) -> Vector:
    """Move towards the unconstrained solution; a value that would become negative on the way stays at 0."""
    while True:
        negative = [i for i, value in enumerate(trial) if value <= 0]
        if not negative:
            moved = [0.0] * len(x)
            for j, value in zip(passive, trial, strict=True):
                moved[j] = value
            return moved
        share = min(x[passive[i]] / (x[passive[i]] - trial[i]) for i in negative)
        moved = list(x)
        for j, value in zip(passive, trial, strict=True):
            moved[j] = x[j] + share * (value - x[j])
        stuck = min(negative, key=lambda i: x[passive[i]] / (x[passive[i]] - trial[i]))
        leaving = [passive[i] for i in range(len(passive)) if i == stuck or moved[passive[i]] <= 0]
        for j in leaving:
            moved[j] = 0.0
            passive.remove(j)
        x = moved
        if not passive:
            return x
        solved = _least_squares(gram, target, passive)
        assert solved is not None, "a part of independent columns is independent"
        trial = solved


def _gradient(columns: list[Vector], x: Vector, values: Sequence[float]) -> Vector:
    rest = list(values)
    for column, coefficient in zip(columns, x, strict=True):
        if coefficient:
            rest = [value - coefficient * part for value, part in zip(rest, column, strict=True)]
    return [_dot(column, rest) for column in columns]


def _least_squares(gram: list[Vector], target: Vector, chosen: list[int]) -> Vector | None:
    """By Cholesky; None: the chosen columns depend on each other."""
    size = len(chosen)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for k in range(i + 1):
            rest = gram[chosen[i]][chosen[k]] - _dot(lower[i][:k], lower[k][:k])
            if i == k:
                if rest <= _DEPENDENT:
                    return None
                lower[i][i] = math.sqrt(rest)
            else:
                lower[i][k] = rest / lower[k][k]
    forward = [0.0] * size
    for i in range(size):
        forward[i] = (target[chosen[i]] - _dot(lower[i][:i], forward[:i])) / lower[i][i]
    solved = [0.0] * size
    for i in reversed(range(size)):
        later = sum(lower[k][i] * solved[k] for k in range(i + 1, size))
        solved[i] = (forward[i] - later) / lower[i][i]
    return solved


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
