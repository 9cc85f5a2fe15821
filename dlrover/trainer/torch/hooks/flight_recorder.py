"""
torch's flight recorder, for the agent: the newest collectives of this worker, those inside backward included.

The one place that calls torch's private `_dump_fr_trace_json`, which torch 2.13 has and fills for gloo as well as for NCCL; a torch
without it is left alone. A collective that hangs lets the interpreter lock go, so a thread can still answer: it sleeps on a pipe and
writes the record when the agent asks. It begins with the first process group, which starts threads of its own: before, a script that
forks finds no thread of ours.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dlrover.protocol import progress_page as layout
from dlrover.trainer import phases

NUM_ENTRIES = 16


def install(c10d: ModuleType, *, pipe: str, file: str) -> None:
    """Around `init_process_group`; nothing where torch keeps no such record."""
    native = getattr(getattr(c10d, "torch", None), "_C", None)
    dump = getattr(getattr(native, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return
    is_started = False

    def begin() -> None:
        nonlocal is_started
        writer = phases.current()
        if is_started or writer is None:
            return
        is_started = True
        try:
            source = os.open(pipe, os.O_RDONLY | os.O_CLOEXEC)
            target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return
        threading.Thread(target=_answer, args=(dump, source, target), name="dlrover recorder", daemon=True).start()
        writer.words[layout.HAS_RECORDER] = 1

    c10d.__dict__["init_process_group"] = _then(c10d.__dict__["init_process_group"], begin)
    public: Any = sys.modules.get("torch.distributed")
    if public is not None and hasattr(public, "init_process_group"):
        public.init_process_group = c10d.__dict__["init_process_group"]


def _then(original: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after()
        return result

    return replacement


def _answer(dump: Callable[[], bytes], source: int, target: int) -> None:
    try:
        while os.read(source, 1):
            os.write(target, newest(dump()) + b"\n")
    except OSError:
        return  # the agent has gone, and so shall we


def newest(record: bytes) -> bytes:
    """The last few entries, and of each only what is shown."""
    try:
        entries = json.loads(record).get("entries", [])[-NUM_ENTRIES:]
        return json.dumps([_entry(entry) for entry in entries]).encode()
    except (ValueError, AttributeError, TypeError, KeyError):
        return b"[]"


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    name = str(entry.get("profiling_name", ""))
    backend = name.partition(":")[0] if ":" in name else ""
    dtypes, sizes = entry.get("input_dtypes") or [""], entry.get("input_sizes") or [[]]
    return {
        "sequence": int(entry.get("collective_seq_id") or entry.get("p2p_seq_id") or 0),
        "operation": name.rpartition(":")[2],
        "group": _group(entry.get("process_group") or [""]),
        "shape": f"{str(dtypes[0]).lower()}[{','.join(map(str, sizes[0]))}]" if dtypes[0] else "",
        "is_inside": not entry.get("retired", False),
        "backend": backend,
        "has_started": backend == "gloo" or entry.get("state") != "scheduled",  # gloo tells of nothing else
    }


def _group(names: list[Any]) -> str:
    """Its description, where it has one: groups that the script made share the description "undefined"."""
    name, description = str(names[0]), str(names[-1])
    return name if description in ("", "undefined") else description
