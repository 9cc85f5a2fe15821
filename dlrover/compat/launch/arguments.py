"""Types of command line arguments, as the original's `args_util` has them, and their values in the log."""

from __future__ import annotations

import argparse
import ast
import logging
from collections.abc import Iterable, Sequence
from typing import Any

log = logging.getLogger(__name__)


def pos_int(arg: str) -> int:
    number = int(arg)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"give a number of at least 1 (got {number})")
    return number


def str2bool(value: str | bool) -> bool:
    text = str(value).lower()
    if text in ("true", "yes", "t", "y", "1"):
        return True
    if text in ("false", "no", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"give true or false (got {value!r})")


def parse_tuple_list(value: str | None) -> list[Any]:
    """`[(a, b), (c, d, e)]`: tuples of two or three."""
    told = _literal(value, "[(v1, v2), ...]", [])
    if not isinstance(told, list) or not all(isinstance(each, tuple) and len(each) in (2, 3) for each in told):
        raise argparse.ArgumentTypeError(f"give [(v1, v2), ...] (got {value!r})")
    return told


def parse_dict(value: str | None) -> dict[Any, Any]:
    told = _literal(value, "{k1: v1, ...}", {})
    if not isinstance(told, dict):
        raise argparse.ArgumentTypeError(f"give {{k1: v1, ...}} (got {value!r})")
    return told


def parse_tuple_dict(value: str | None) -> dict[tuple[Any, ...], bool]:
    """`{(a, b): true or false, ...}`"""
    told = parse_dict(value)
    if not all(isinstance(key, tuple) and isinstance(each, str | bool) for key, each in told.items()):
        raise argparse.ArgumentTypeError(f"give {{(v1, v2): true or false, ...}} (got {value!r})")
    return {key: str2bool(each) for key, each in told.items()}


def parse_group_affinity(value: str | None) -> dict[int, int] | None:
    """`{group: number of nodes, ...}`; None for nothing."""
    if value is None or value == "":
        return None
    told = parse_dict(value)
    are_numbers = all(type(key) is int and type(each) is int and key >= 0 < each for key, each in told.items())
    if not told or not are_numbers:
        raise argparse.ArgumentTypeError(f"give {{group: number of nodes, ...}}, for example {{0: 10}} (got {value!r})")
    return told


def print_args(
    args: argparse.Namespace, exclude_args: Sequence[str] = (), groups: Iterable[Iterable[str]] | None = None
) -> None:
    """Into the log, those of the groups first."""
    first = [name for group in groups or () for name in group]
    rest = [name for name in vars(args) if name not in first and name not in exclude_args]
    for name in (*first, *rest):
        log.info("%s = %s", name, getattr(args, name, None))


def _literal(value: str | None, form: str, default: Any) -> Any:
    if not value:
        return default
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"give {form} (got {value!r})") from error
