"""
The command line of a job whose nodes are started for the user: our own options, then what each node runs.

`dlrover local` and `dlrover ray run` read it in the same way, and find a port and an exit code in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence

from dlrover.cli.launch.discovery import MasterPort
from dlrover.cli.launch.launcher import EXIT_FAILED, result_of
from dlrover.cli.options.parser import OPTION_NAMES, nearest, parse
from dlrover.cli.options.settings import parse_nnodes
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import JobEnd

_NUM_PORT_CHOICES = 5

# What nodes are told by their host, not by the user. Variables of the surroundings would contradict it.
_OURS = (
    "nnodes", "standby", "node_rank", "standalone", "rdzv_endpoint", "rdzv_id", "job_name", "master_addr", "master_port", "local_addr",
    "job_token_file",
)  # fmt: skip
_INSTEAD = {
    "nnodes": "Give --nodes instead, in front of `--`.",
    "standby": "Give it once, in front of `--`.",
    "job_name": "Give it once, in front of `--`.",
}
_NOT_PASSED_ON = (
    "DLROVER_JOB_TOKEN", "DLROVER_NODE_ID", "DLROVER_AGENT_SOCKET", "DLROVER_MASTER_FILE", "NODE_ID", "WORKER_ID", "NODE_RANK",
    "WORKER_RANK", "NODE_NUM", "WORKER_NUM", "POD_NAME", "POD_IP", "MY_POD_IP", "RELAUNCHED_POD", "RDZV_ENDPOINT", "HOST_PORTS",
)  # fmt: skip


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The surroundings without what each node is told by its host."""
    return {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}


def split_command(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[list[str], list[str]]:
    """
    Our own options, and what each node runs: from `--` on, or from the first word that is none of ours.

    The second way because `--` may have been eaten by who called us, as command-line libraries like to do.
    """
    takes_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return argv[:position], argv[position + 1 :]
        if word in takes_value:
            position += 2
        elif word in flags or word.partition("=")[0] in takes_value:
            position += 1
        else:
            _check_option(parser, word)
            break
    return argv[:position], argv[position:]


def read_nodes(text: str) -> tuple[int, int]:
    try:
        return parse_nnodes(text)
    except ConfigError as error:
        raise ConfigError(f"{error}".replace("--nnodes", "--nodes")) from error


def check_command(command: Sequence[str], program: str) -> None:
    """Raises `ConfigError` for options that each node is told by its host."""
    for dest in _OURS:
        if parse(command, {}).is_given(dest):
            option = f"--{dest.replace('_', '-')}"
            advice = _INSTEAD.get(dest, "Leave it out.")
            raise ConfigError(
                f"{option} after `{program}` is not allowed, because the job sets it for each node. {advice}"
            )


def take_master_port(host: str, host_ports: Sequence[int] = ()) -> MasterPort:
    """
    A free port with the claim on it, so that no node takes it for its own to host a master at.

    `host_ports`: HOST_PORTS, of which the first free one is taken, because other machines can reach it; else any.
    """
    for choice in host_ports:
        with contextlib.suppress(OSError):
            return MasterPort(host, choice)
    for _ in range(_NUM_PORT_CHOICES):
        trial = MasterPort(host, 0)
        trial.close()
        with contextlib.suppress(OSError):
            return MasterPort(host, trial.port)
    raise ConfigError(
        f"The master could not start: other programs took {_NUM_PORT_CHOICES} free ports in a row at {host} before it "
        "could use them. Start the job again."
    )


def exit_code_of(end: JobEnd, *, is_of_worker: bool, stopped_by: int | None) -> int:
    """What the command that started the job ends with."""
    if stopped_by is not None and end.exit_code != 0:
        return 128 + stopped_by
    worker = result_of(end).worker_exit_code
    return worker if end.exit_code == EXIT_FAILED and is_of_worker and worker else end.exit_code


def _check_option(parser: argparse.ArgumentParser, word: str) -> None:
    """Raises `ConfigError` for an option that no command knows; the nodes' launcher would know only half of what it could be."""
    name = word.partition("=")[0]
    ours = [option for action in parser._actions for option in action.option_strings]
    if name.startswith("--") and name not in OPTION_NAMES:
        raise ConfigError(
            f"{name} is not an option of {parser.prog} or of the nodes' "
            f"dlrover-run.{nearest(name, (*ours, *OPTION_NAMES))}"
        )
