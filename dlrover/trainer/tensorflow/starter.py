"""
The starter of TensorFlow jobs and its flags, under the names and with the defaults that manifests have.

Inside a job it becomes the process that the node's agent asks for; on a node of a platform that has no agent yet, the agent. With `--platform local_kubernetes` or `local_ray` it starts the whole job on this
machine: the same nodes, agents and master as everywhere, by `dlrover local`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover.protocol.errors import DLRoverError
from dlrover.trainer.tensorflow.logs import log_to_console

log = logging.getLogger("dlrover.trainer.tensorflow")

EXIT_FAILED = 255
EXIT_USAGE = 2
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off", "")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dlrover.trainer", allow_abbrev=False)
    add = parser.add_argument
    add("--platform", default="KUBERNETES", type=str.upper, help="KUBERNETES, RAY, local_kubernetes or local_ray")
    add("--worker_action", default="run", help="`run` starts the job; other actions do nothing")
    add("--ps_num", type=int, default=1, help="number of parameter servers of a local job")
    add("--worker_num", type=int, default=3, help="number of workers of a local job, including the chief")
    add("--evaluator_num", type=int, default=1, help="number of evaluators of a local job: 0 or 1")
    add("--conf", default="", help="module.Class of the conf class, importable from the working directory")
    add("--task_id", type=int, default=0)
    add("--task_type", default="")
    add("--mock", type=_boolean, default=False)
    add(
        "--enable_auto_scaling",
        type=_boolean,
        default=False,
        help="accepted without effect: every job has failover and dynamic sharding",
    )
    return parser


def get_parsed_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Unknown flags are logged and have no effect."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        log.warning("Unknown flags have no effect: %s", " ".join(unknown))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    log_to_console()
    args = get_parsed_args(argv)
    _print_commit()
    if args.worker_action != "run":
        log.warning("--worker_action %s does nothing. Only `run` starts the job.", args.worker_action)
        return 0
    try:
        return _start(args, list(sys.argv[1:] if argv is None else argv))
    except DLRoverError as error:
        print(f"dlrover.trainer: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _start(args: argparse.Namespace, argv: list[str]) -> int:
    is_inside = bool(os.environ.get("DLROVER_AGENT_SOCKET"))
    if "LOCAL" in args.platform and not is_inside:
        return _start_local(args, argv)
    if not is_inside and os.environ.get("DLROVER_MASTER_ADDR"):
        command = node_command(argv, os.environ)
        os.execv(command[0], command)
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "dlrover.trainer: error: TensorFlow is not installed here. Install an extra: pip install 'dlrover[tensorflow]' (the newest), or "
            "'dlrover[tensorflow-estimator]' (TensorFlow 2.15 with its own Estimator, Python 3.11).",
            file=sys.stderr,
        )
        return EXIT_USAGE
    from dlrover.trainer.tensorflow.process import run_task

    run_task(args.conf)
    return 0


def node_command(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """
    For a node that a platform has started with the starter as its program, as manifests of the original do: its agent, which starts this program again
    for each version.
    """
    limits = [] if environ.get("PET_NNODES") else [f"--nnodes={max(1, int(environ.get('NODE_NUM') or 1))}"]
    program = ["-m", "dlrover.trainer.entry.local_entry", *argv]
    return [sys.executable, "-m", "dlrover.cli.run", "--strategy=ps", *limits, *program]


def _start_local(args: argparse.Namespace, argv: list[str]) -> int:
    """Not 0: everything was ended, and as ever the exit code is 255."""
    for what, is_wrong, rule in (
        ("--worker_num", args.worker_num < 1, "at least 1, the chief included"),
        ("--ps_num", args.ps_num < 1, "at least 1"),
        ("--evaluator_num", args.evaluator_num not in (0, 1), "0 or 1"),
    ):
        if is_wrong:
            print(f"dlrover.trainer: error: {what}: give {rule}.", file=sys.stderr)
            return EXIT_USAGE
    command = ["--ps", str(args.ps_num), "--evaluator", str(args.evaluator_num), "--nodes", str(args.worker_num)]
    environ = {"WORKFLOW_ID": "test_id", "USERNUMBER": "test_user", **os.environ}
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "local",
            *command,
            "--",
            "-m",
            "dlrover.trainer.entry.local_entry",
            *argv,
        ],
        env=environ,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: job.send_signal(number))
    return 0 if job.wait() == 0 else EXIT_FAILED


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"give true or false, not {text!r}")


def _print_commit() -> None:
    """Of builds that carry one."""
    with contextlib.suppress(OSError):
        print((Path(__file__).parents[2] / "COMMIT_INFO").read_text(encoding="utf-8").strip())
