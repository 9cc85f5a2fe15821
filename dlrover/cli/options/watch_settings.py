"""What the command line says of watching the workers and the node itself: hooks, dumps, logs, and what else is measured."""

from __future__ import annotations

import re
import signal

import msgspec

from dlrover.agent.config import LogPattern, WatchConfig
from dlrover.cli.options.environment import Environment
from dlrover.cli.options.parser import Parsed
from dlrover.protocol.errors import ConfigError

_MAX_PATTERNS_FILE = 1 << 20


def watch_config(parsed: Parsed, environment: Environment) -> WatchConfig:
    dump_signal = parsed.integer("dump_signal")
    if dump_signal != 0 and not signal.SIGRTMIN <= dump_signal <= signal.SIGRTMAX - 5:
        raise ConfigError(
            f"--dump-signal {dump_signal}: give 0 or a real-time signal that workers do not use, "
            f"from {int(signal.SIGRTMIN)} to {signal.SIGRTMAX - 5}."
        )
    every = parsed.integer("canary")
    if every < 0:
        raise ConfigError(f"--canary {every}: give a number of steps, or 0 for none.")
    return WatchConfig(
        has_hooks=not parsed.flag("no_progress_hooks"),
        dump_signal=dump_signal,
        canary_every=every,
        log_file=environment.training_log_file,
        node_errors=environment.node_errors,
        log_patterns=_log_patterns(parsed.text("log_patterns")),
        scrapes=_scrapes(parsed.text("scrape")),
        xpu_timer_port=environment.xpu_timer_port,
        has_step_file=environment.is_monitored,
    )


def _log_patterns(path: str) -> tuple[LogPattern, ...]:
    if not path:
        return ()
    try:
        with open(path, "rb") as file:
            patterns = msgspec.json.decode(file.read(_MAX_PATTERNS_FILE), type=tuple[LogPattern, ...])
        for each in patterns:
            re.compile(each.pattern)
    except OSError as error:
        raise ConfigError(f"--log-patterns {path}: {error.strerror}.") from error
    except (msgspec.MsgspecError, re.error) as error:
        raise ConfigError(
            f'--log-patterns {path}: {error}. Give a list such as [{{"pattern": "out of tokens", "action": "abort"}}] with the actions '
            "restart, relaunch and abort."
        ) from error
    return patterns


def _scrapes(text: str) -> tuple[str, ...]:
    urls = tuple(url.strip() for url in text.split(",") if url.strip())
    if not urls:
        return ()
    from dlrover.agent.monitor.scrape import check_url  # late: few need it

    return tuple(check_url(url) for url in urls)
