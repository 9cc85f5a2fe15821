"""How an agent process is told from a former one of the same launch."""

from __future__ import annotations

from pathlib import Path

from dlrover.agent.agent import Agent
from tests.agent.lab import make_config


def an_agent(scratch: Path) -> Agent:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("no workers in this test")

    config = make_config(scratch, "train.py")
    return Agent(config, token="", local_world_size=1, build_group=build, step=lambda: None)  # type: ignore[arg-type]


async def test_each_process_of_a_launch_presents_itself_with_one_life_of_its_own(tmp_path: Path) -> None:
    first, second = an_agent(tmp_path), an_agent(tmp_path)
    presented = [agent._decisions.presentation() for agent in (first, first, second)]
    assert len({attach.launch for attach in presented}) == 1
    assert presented[0].life == presented[1].life != presented[2].life
    assert all(len(attach.life) == 16 for attach in presented)
