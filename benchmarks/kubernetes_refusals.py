"""
How soon a job that cannot run says so in its status.

    python benchmarks/kubernetes_refusals.py [--runs 10] [--kubeconfig FILE] [--json FILE]

The API server and the operator run on this machine; `--kubeconfig` names another API server, without our definitions and without
another operator. From the answer to `create` until the condition `Valid=False` with the sentence is there to be read. The
definitions are without their rules, so that the operator has to find all mistakes. Beside it: how many pods were made, which must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from figures import summarise, table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the lab of the tests

from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import ELASTIC_JOBS, PODS, ClusterApi
from tests.kubernetes.operator.lab import BAD_JOBS, Lab
from tests.kubernetes.server import ApiServer

LIMIT = 2.0
LOOK_EVERY = 0.01
_DEADLINE = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kubeconfig", type=Path, help="of another API server")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, num_pods = asyncio.run(measure(arguments.kubeconfig, arguments.runs, Path(folder)))
    rows = []
    for mistake, samples in found.items():
        summary = summarise(samples)
        assert summary is not None, "at least one run"
        rows.append([mistake, *(f"{value:.2f}" for value in (summary.median, summary.lowest, summary.highest, LIMIT))])
    print(table(["what is wrong", "median s", "least", "most", "limit"], rows))
    print(f"pods made: {num_pods}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


async def measure(kubeconfig: Path | None, num_runs: int, folder: Path) -> tuple[dict[str, list[float]], int]:
    found: dict[str, list[float]] = {mistake: [] for mistake in BAD_JOBS}
    async with _lab(kubeconfig, folder) as lab:
        operator = await lab.start_operator(kubeconfig=kubeconfig)
        await lab.until(lambda: _is_in_log(operator.log), "the operator")
        for number in range(num_runs):
            for mistake, (spec, part) in BAD_JOBS.items():
                name = f"{spec.get('name', mistake)}-{number}"
                found[mistake].append(await _refuse(lab, name, spec, part))
        num_pods = len(await lab.names_of(PODS))
        for name in await lab.names_of(ELASTIC_JOBS):
            await lab.delete(name)
        await operator.stop()
    return found, num_pods


async def _refuse(lab: Lab, name: str, spec: dict[str, object], part: str) -> float:
    await lab.apply(**{**spec, "name": name})  # type: ignore[arg-type]
    began_at = time.monotonic()
    while part not in (await lab.condition("Valid", name)).get("message", ""):
        if time.monotonic() - began_at > _DEADLINE:
            sys.exit(f"{name} got no sentence with {part!r} within {_DEADLINE:g} s:\n{lab.operators[-1].log}")
        await asyncio.sleep(LOOK_EVERY)
    return time.monotonic() - began_at


async def _is_in_log(log: str) -> bool:
    return "operator of namespace=" in log


@contextlib.asynccontextmanager
async def _lab(kubeconfig: Path | None, folder: Path) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        server = ApiServer()
        if kubeconfig is None:
            await stack.enter_async_context(server)
        access = find_access({}, kubeconfig=kubeconfig or server.kubeconfig)
        lab = Lab(server, await stack.enter_async_context(ClusterApi(access)), folder)
        await lab.define(with_rules=False)
        try:
            yield lab
        finally:
            for operator in lab.operators:
                await operator.kill()


if __name__ == "__main__":
    main()
