"""An API server, and a terminal beside it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kubernetes.operator.lab import DEADLINE, REPOSITORY, Lab, open_lab


class Terminal:
    """Runs `dlrover …` as a process that finds the cluster by its kubeconfig."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder

    async def start(self, *words: str, **environ: str) -> asyncio.subprocess.Process:
        variables = {**os.environ, "KUBECONFIG": str(self.lab.server.kubeconfig), "HOME": str(self.folder), **environ}
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dlrover.cli.main",
            *words,
            cwd=REPOSITORY,
            env=variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *words: str, **environ: str) -> tuple[int, str, str]:
        process = await self.start(*words, **environ)
        async with asyncio.timeout(DEADLINE):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def says(self, *words: str) -> str:
        """The output of a command that must succeed."""
        code, out, err = await self.run(*words)
        assert code == 0, err
        return out


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with open_lab(tmp_path) as lab:
        await lab.define()
        yield Terminal(lab, tmp_path)
