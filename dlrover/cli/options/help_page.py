"""The texts of `dlrover-run --help` and `--help-all`, made from the table of options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from dlrover.cli.options.parser import PROGRAM
from dlrover.cli.options.table import OPTIONS, OURS, Option

COMMON: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "nodes and workers",
        ("nnodes", "nproc_per_node", "standalone", "rdzv_endpoint", "rdzv_id", "node_rank", "standby", "platform"),
    ),
    ("the script", ("module", "no_python", "log_dir", "tee")),
    ("failures", ("max_restarts", "hang_detection", "network_check", "shutdown_timeout")),
    ("state", ("save_at_breakpoint", "snapshot_replicas")),
    ("watching", ("job_name", "journal", "enable_dashboard", "metrics_port")),
)
"""What most jobs need, by what it is about: all that `--help` shows."""
_IMMEDIATE = (
    ("-h, --help", "Print the options that most jobs need."),
    ("--help-all", "Print all options, those of torchrun first."),
    (
        "--check-env",
        "Print what is installed, what is missing and which feature needs it. `dlrover doctor` prints more.",
    ),
)


def describe_common() -> str:
    """The text of `--help`."""
    by_dest = {option.dest: option for option in OPTIONS}
    lines = _head()
    for title, dests in COMMON:
        lines += ["", f"{title}:", *_described(by_dest[dest] for dest in dests)]
    lines += ["", "help:", *_immediate()]
    return "\n".join(lines) + "\n"


def describe_all() -> str:
    """The text of `--help-all`."""
    lines = _head()
    for group, title in (("torchrun", "torchrun's options"), (OURS, "further options")):
        lines += ["", f"{title}:"]
        if group == OURS:
            lines += _immediate()
        lines += _described(option for option in OPTIONS if option.group == group)
    return "\n".join(lines) + "\n"


def spelling_of(option: Option) -> str:
    """As the help shows it: the short form, the name and the value."""
    names = f"{option.short}, {option.names[0]}" if option.short else option.names[0]
    return names if option.is_flag else f"{names} {option.metavar or option.dest.upper()}"


def text_of(option: Option) -> str:
    """What it does, its choices and its default."""
    text = option.help
    if option.choices:
        text += f" One of: {', '.join(option.choices)}."
    # Of torchrun's options many defaults mean "not given" here, and the texts say what happens then.
    has_default = option.group == OURS and not option.is_flag and option.default not in (None, "")
    if has_default and not option.unavailable:
        text += (
            f" Default: {option.default:g}." if isinstance(option.default, float) else f" Default: {option.default}."
        )
    return f"{text} (Not yet available.)" if option.unavailable else text


def _head() -> list[str]:
    return [
        f"usage: {PROGRAM} [options] SCRIPT [arguments of the script]",
        "",
        "Runs a script as torchrun does, on one node or several, and keeps it running: it replaces failed",
        "workers by warm ones, and nodes may join and leave. Each option is also read from PET_<NAME>; dashes and",
        "underscores are the same.",
    ]


def _immediate() -> list[str]:
    return [line for spelling, text in _IMMEDIATE for line in (f"  {spelling}", f"      {text}")]


def _described(options: Iterable[Option]) -> list[str]:
    lines = []
    for option in options:
        lines.append(f"  {spelling_of(option)}")
        lines += textwrap.wrap(text_of(option), width=108, initial_indent="      ", subsequent_indent="      ")
    return lines
