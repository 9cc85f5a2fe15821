"""Stand-in: the arguments of the run."""

from __future__ import annotations

import argparse

_ARGS: list[argparse.Namespace] = []


def get_args() -> argparse.Namespace:
    return _ARGS[-1]


def set_args(args: argparse.Namespace) -> None:
    _ARGS.append(args)
