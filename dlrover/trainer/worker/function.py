"""
Programmatic launch: a function instead of a script.

The user's process writes the call into a file that only it can write (the job's runtime directory), the worker reads
it. It is a pickle, as everywhere where functions travel between processes of one program; it never crosses a socket.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

RESULT_FILE = "DLROVER_RESULT_FILE"
"""Environment variable that names where a worker leaves the return value."""


def write_call(path: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
    main = sys.modules["__main__"]
    main_path = getattr(main, "__file__", None)
    outer = {
        "main_path": os.path.abspath(main_path) if main_path else None,
        "sys_path": list(sys.path),
        "call": pickle.dumps((function, args)),
    }
    with open(path, "wb") as file:
        pickle.dump(outer, file)


def call(path: str) -> None:
    """Run the call in this worker and leave its result."""
    with open(path, "rb") as file:
        outer = pickle.load(file)
    sys.path[:] = outer["sys_path"]
    if outer["main_path"]:
        # As multiprocessing does it: the launching script is imported under another name, so its main guard stays
        # closed.
        from multiprocessing import spawn

        spawn._fixup_main_from_path(outer["main_path"])  # type: ignore[attr-defined]
    function, args = pickle.loads(outer["call"])
    result = function(*args)
    result_path = os.environ.get(RESULT_FILE)
    if result_path:
        with open(f"{result_path}.part", "wb") as file:
            pickle.dump(result, file)
        os.replace(f"{result_path}.part", result_path)


def read_result(path: str) -> Any:
    # Importing it makes `__mp_main__`, the name under which workers know the launching script, a name of ours, too.
    import multiprocessing  # noqa: F401

    with open(path, "rb") as file:
        return pickle.load(file)
