"""How an agent tells its launcher how the job ended: also where nothing can be written any more."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from dlrover.agent.config import AgentResult

# In a mount namespace of its own, so that the small disk goes with the process.
ON_A_SMALL_DISK = ("unshare", "--map-root-user", "--mount", "sh", "-c")
SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace

from dlrover.agent.__main__ import _reserve_result, _write_result
from dlrover.agent.config import AgentResult

directory = Path(sys.argv[1])
config = SimpleNamespace(runtime_dir=str(directory))
_reserve_result(config)
try:
    with open(directory / "of somebody else", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
except OSError:
    pass
_write_result(config, AgentResult(exit_code=0, message="well done " * 1000))
print((directory / "result.json").read_text())
"""


def test_the_result_has_its_place_on_a_disk_that_became_full(tmp_path):
    mounting = f"mount -t tmpfs -o size=256k none {tmp_path}"
    if subprocess.run([*ON_A_SMALL_DISK, mounting], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        [*ON_A_SMALL_DISK, f'{mounting} && exec "$@"', "sh", sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert msgspec.json.decode(done.stdout, type=AgentResult).message.startswith("well done")
