"""
The end of a worker that ends because another one is lost: the others wait for it.

To take an interpreter apart in which torch and its compiler are takes 0.3 s of a processor and more: hundreds of thousands of objects are freed, one by
one. So here happens what a script can count on at its end, in the interpreter's order, and then the process goes. Objects that live until then get no
`__del__`, which Python does not promise either, and files that are open are written out.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_STREAMS: Any = _io._IOBase
"""All files of Python are one. The class of `io` of the same name asks a registry, for each object anew."""


def leave(exit_code: int) -> NoReturn:
    steps: tuple[Callable[[], object], ...] = (
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
        _write_out,
        lambda: ctypes.CDLL(None).fflush(None),
    )
    try:
        for step in steps:
            with contextlib.suppress(Exception):  # each tells of its own; the others have their turn
                step()
    finally:
        os._exit(exit_code)


def _write_out() -> None:
    """What is in the buffers of files. The zygote has set its own objects aside, so these are few."""
    for stream in [sys.stdout, sys.stderr, *(each for each in gc.get_objects() if isinstance(each, _STREAMS))]:
        with contextlib.suppress(Exception):  # closed, or the disk is full
            stream.flush()
