"""Programs that start `dlrover-run` from Python: `parse_args`, a changed namespace, `run`."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from dlrover.cli.launch.namespace import _parsed
from dlrover.cli.options.parser import ValueOrigin
from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.elastic_run import parse_args, run
from tests.cli.conftest import DEADLINE


def test_the_namespace_has_the_names_and_types_of_the_original() -> None:
    words = ["--nnodes=2:4", "--precheck", "1", "--node_unit", "2", "--max_restarts=3", "train.py", "--lr", "0.1"]
    args = parse_args(words)
    assert (args.nnodes, args.nproc_per_node, args.precheck, args.node_unit) == ("2:4", "1", 1, 2)
    assert (args.network_check, args.comm_perf_test, args.standalone, args.save_at_breakpoint) == (False,) * 4
    assert (args.log_dir, args.redirects, args.max_restarts, args.accelerator) == (None, "0", 3, "nvidia.com/gpu")
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "0.1"])
    assert "parsed" not in vars(args), "programs print and store them"


def test_what_a_program_changes_counts_as_given() -> None:
    args = parse_args(["--nnodes=2", "train.py"])
    read = _parsed(args)
    assert (read.origins["nnodes"], read.origins["max_restarts"]) == (ValueOrigin.FLAG, ValueOrigin.DEFAULT)
    args.nnodes, args.nproc_per_node, args.network_check, args.redirects = 3, 4, 1, 3
    args.training_script_args += ["--resume"]
    changed = _parsed(args)
    assert (changed.text("nnodes"), changed.text("nproc_per_node"), changed.text("redirects")) == ("3", "4", "3")
    assert changed.flag("network_check")
    assert changed.script_args == ("--resume",)
    given = {name for name, origin in changed.origins.items() if origin is ValueOrigin.FLAG}
    assert given == {"nnodes", "nproc_per_node", "network_check", "redirects"}


def test_a_namespace_of_somebody_elses_is_taken() -> None:
    read = _parsed(Namespace(training_script="train.py", nnodes="2:3", other="value", max_restarts=0))
    assert (read.text("nnodes"), read.text("accelerator")) == ("2:3", "nvidia.com/gpu")
    with pytest.raises(ConfigError, match="training_script"):
        run(Namespace(standalone=True))
    with pytest.raises(ConfigError, match="max_restarts=often"):
        run(Namespace(training_script="train.py", max_restarts="often"))


@pytest.mark.parametrize(("words", "code"), [(["--no-such", "x.py"], 2), ([], 2), (["--help"], 0)])
def test_a_wrong_command_line_ends_the_program_as_a_parser_would(words: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(words)
    assert ended.value.code == code


WRAPPER = """
import sys
from dlrover.protocol.errors import JobError
from dlrover.trainer.torch.elastic_run import main, parse_args, run

args = parse_args(["--no-warm", "no-such.py", "good"])
args.nproc_per_node = 2
args.training_script = sys.argv[1]
assert run(args) is None
print("went well", flush=True)
try:
    main(["--no-warm", "--max-restarts=0", sys.argv[1], "bad"])
except JobError as error:
    print("failed:", error, flush=True)
sys.exit(7)
"""

TRAIN = """
import os, sys
if sys.argv[1] == "bad":
    raise ValueError("this one fails")
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
"""


def test_a_wrapper_changes_the_command_line_and_learns_how_it_ended(short_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, str(tmp_path / "train.py")],
        env={**os.environ, "TMPDIR": str(short_dir)},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
    )
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["rank 0 of 2", "rank 1 of 2"]
    assert lines[2] == "went well"
    assert lines[3].startswith("failed: ")
    assert "this one fails" in done.stdout + done.stderr


EXTENSION = """
import sys
from dlrover.python.common.enums import FailoverStrategy
from dlrover.python.elastic_agent.torch.dynamic_failover import DynamicAgentFailoverExtension
from dlrover.python.elastic_agent.torch.training import ElasticLaunchConfig, launch_agent

class Abort(DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        return FailoverStrategy.ABORTION_FAILOVER

if __name__ == "__main__":
    config = ElasticLaunchConfig(1, 1, 1, is_warm=False)
    config.dynamic_failover_extension = Abort()
    launch_agent(config, "false", [])
"""


def test_an_extension_of_the_wrapper_itself_decides(short_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "wrapper.py").write_text(EXTENSION)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "wrapper.py")],
        env={**os.environ, "TMPDIR": str(short_dir)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert "JobError" in done.stderr
    assert "USER_FAILOVER_TRIGGER_JOB_ABORTION" in done.stderr


def test_an_extension_that_is_in_no_file_is_refused(short_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXTENSION],
        env={**os.environ, "TMPDIR": str(short_dir)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert "agents cannot import Abort" in done.stderr
