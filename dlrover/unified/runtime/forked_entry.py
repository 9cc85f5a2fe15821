"""`python -m dlrover.unified.runtime.forked_entry package.module.Class`: the entry point of an elastic role that is no script."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from typing import Any

from dlrover.unified.runtime.methods import METHODS
from dlrover.unified.runtime.stream import serve


def main(argv: list[str]) -> None:
    module_name, _, attribute = argv[0].rpartition(".")
    module = importlib.import_module(module_name)
    METHODS.export_module(module)
    target = getattr(module, attribute)
    instance = target() if isinstance(target, type) else None
    serve(instance)
    entry = target if instance is None else getattr(instance, "run", None)
    if entry is None:
        sys.exit(f"{argv[0]} has no method run(), so its workers would end at once. Add the method.")
    result = entry()
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Any) -> None:
    await result


if __name__ == "__main__":
    main(sys.argv[1:])
