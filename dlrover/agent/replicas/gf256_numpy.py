"""
The arithmetic of parity with numpy, where that is installed: beside torch it nearly always is.

Imported only by an agent that keeps parity. The snapshot room itself stays free of array libraries.
"""

from __future__ import annotations

import logging
from functools import cache

from dlrover.snapshot.parity import Add, add_slowly, table

_BLOCK_BYTES = 256 * 1024
"""Other threads run in between."""

log = logging.getLogger("dlrover.agent")


@cache
def fastest_add() -> Add:
    try:
        import numpy as np
    except ImportError:
        log.warning(
            "numpy is not installed, so computing the parity of snapshots is much slower. Install it with: pip "
            "install numpy"
        )
        return add_slowly

    def add(total: bytearray | memoryview, block: bytes | bytearray | memoryview, factor: int = 1) -> None:
        sums = np.frombuffer(total, dtype=np.uint8)
        for start in range(0, len(block), _BLOCK_BYTES):
            part = block[start : start + _BLOCK_BYTES]
            terms = part if factor == 1 else bytes(part).translate(table(factor))  # faster than looking up in an array
            here = sums[start : start + len(part)]
            np.bitwise_xor(here, np.frombuffer(terms, dtype=np.uint8), out=here)

    return add
