"""
The three standard descriptors: every process of ours starts with all of them open.

Apart from `lifeline` because the first lines of a launcher cannot wait for `ctypes`.
"""

from __future__ import annotations

import os
import sys


def open_standard_descriptors() -> None:
    """
    Point stdin, stdout and stderr to nowhere where the program that started us closed them (`>&-`, some daemons).

    Otherwise the next socket that is opened gets the number 0, 1 or 2, and everything that prints, workers included,
    writes into it. Call it before anything opens a descriptor to keep.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
            continue
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
        if opened == number:
            os.set_inheritable(number, True)  # for our children, too
        else:
            os.dup2(opened, number)
            os.close(opened)
        if (
            getattr(sys, name) is None
        ):  # Python's answer to a closed descriptor; `sys.stderr.write` would not survive it
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
