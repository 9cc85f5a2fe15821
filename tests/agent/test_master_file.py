"""A master that moves: the agent reads its newest address from a file before each attempt."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.agent.config import AgentConfig


def test_the_newest_address_is_in_the_file_and_the_first_one_holds_without_it(tmp_path: Path):
    fields = {field.name: field for field in msgspec.structs.fields(AgentConfig)}
    needed = {name: None for name, field in fields.items() if field.required}
    config = AgentConfig(**{**needed, "master_addr": "a:1", "master_file": str(tmp_path / "master")})
    assert config.find_master() == "a:1"
    (tmp_path / "master").write_text("b:2\n")
    assert config.find_master() == "b:2"
    (tmp_path / "master").write_text("")
    assert config.find_master() == "a:1"
