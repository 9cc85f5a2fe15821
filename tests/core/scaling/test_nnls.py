"""The fit by hand against scipy, which the product does not load."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy
import pytest

from dlrover.core.scaling.fit.nnls import nnls

optimize = pytest.importorskip("scipy.optimize", reason="scipy belongs to the dev extra")


def a_law(chance: random.Random) -> tuple[list[list[float]], list[float]]:
    """Runs of a job as the model sees them: rows divided by noisy step times of a random law."""
    thetas = [chance.random() * (chance.random() < 0.7) for _ in range(4)]
    rows = []
    for _ in range(chance.randint(1, 64)):
        nodes, batch = chance.randint(1, 16), chance.choice([8, 16, 32])
        network = float(nodes > 1)
        row = [1.0, float(batch), network, network * (nodes - 2)]
        seconds = max(1e-3, sum(theta * part for theta, part in zip(thetas, row, strict=True)))
        rows.append([part / (seconds * chance.gauss(1, 0.05)) for part in row])
    return rows, [1.0] * len(rows)


def anything(chance: random.Random) -> tuple[list[list[float]], list[float]]:
    width, scale = chance.randint(1, 6), chance.choice([0, 3])
    kinds = [lambda: chance.gauss(0, 1), chance.random, lambda: 0.0, lambda: 1.0]
    rows = [
        [chance.choice(kinds)() * 10 ** chance.uniform(-scale, scale) for _ in range(width)]
        for _ in range(chance.randint(1, 64))
    ]
    return rows, [chance.gauss(0, 1) for _ in rows]


@pytest.mark.parametrize("kind", [a_law, anything])
def test_it_leaves_no_larger_residual_than_scipy(kind: object) -> None:
    chance = random.Random(7)
    for _ in range(1000):
        rows, values = kind(chance)  # type: ignore[operator]
        matrix, target = numpy.array(rows), numpy.array(values)
        ours = nnls(rows, values)
        _, residual = optimize.nnls(matrix, target)
        assert min(ours) >= 0
        mine = float(numpy.linalg.norm(matrix @ numpy.array(ours) - target))
        assert mine <= residual + 1e-9 * float(numpy.linalg.norm(target))


def test_it_finds_the_coefficients_of_an_exact_law() -> None:
    rows = [[1.0, 32.0, float(n > 1), float(n > 1) * (n - 2)] for n in (1, 2, 3, 5, 8)]
    rows += [[1.0, 64.0, float(n > 1), float(n > 1) * (n - 2)] for n in (1, 2)]
    thetas = [0.1, 0.01, 0.05, 0.002]
    values = [sum(theta * part for theta, part in zip(thetas, row, strict=True)) for row in rows]
    assert nnls(rows, values) == pytest.approx(thetas, rel=1e-6)


def test_64_runs_are_fitted_in_a_fraction_of_the_budget_of_a_decision() -> None:
    rows, values = a_law(random.Random(1))
    rows, values = (rows * 64)[:64], (values * 64)[:64]
    began = time.process_time()
    for _ in range(50):
        nnls(rows, values)
    assert (time.process_time() - began) / 50 < 0.05, "ten times the budget of a whole decision"


def test_a_master_loads_neither_numpy_nor_scipy() -> None:
    code = "import sys, dlrover.master.__main__, dlrover.master.service; print([name for name in ('numpy', 'scipy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
