"""
Amounts of data and memory. Reports and metrics carry bytes, `Resource` carries MiB; here one becomes the other, and here alone.

Earlier agents report megabytes (10^6 bytes), under names of their own. Such a report is still understood.
"""

from __future__ import annotations

from msgspec import UNSET, Struct
from msgspec.structs import force_setattr

MIB = 2**20
GIB = 2**30
_MEGABYTE = 10**6
_NEW_NAMES = {"_mb_s": "_bytes_per_second", "_mb": "_bytes"}


def in_mib(size_bytes: float) -> float:
    return size_bytes / MIB


def in_bytes(size_mib: int) -> int:
    return size_mib * MIB


def amount(size_bytes: float) -> str:
    """For people: `512 MiB`, `15.6 GiB`."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "bytes" else f"{size:.1f} {unit}"


def take_megabytes(report: Struct) -> None:
    """Fill in the bytes of a report whose sender told megabytes."""
    for name in report.__struct_fields__:
        ending = next((each for each in _NEW_NAMES if name.endswith(each)), "")
        told = getattr(report, name) if ending else UNSET
        if told is not UNSET and told is not None:
            size = told * _MEGABYTE
            is_rate = ending == "_mb_s"
            force_setattr(report, name.removesuffix(ending) + _NEW_NAMES[ending], size if is_rate else round(size))
