"""Amounts: bytes in reports, MiB in resources, words for people, and what earlier agents send."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.protocol.codec import decode_from_agent, encode_frame
from dlrover.protocol.messages.frames import Observed
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import DeviceSample, NodeActivity, ProcessSample, ResourceReport
from dlrover.protocol.units import amount, in_bytes, in_mib


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (999.6, "1000 bytes"),
        (1536, "1.5 KiB"),
        (in_bytes(512), "512 MiB"),
        (in_bytes(16_000), "15.6 GiB"),
        (2_000_000_000, "1.9 GiB"),
        (in_bytes(1 << 40), "1048576 TiB"),
    ],
)
def test_people_read_binary_units(size_bytes: float, text: str) -> None:
    assert amount(size_bytes) == text


def test_mib_and_bytes_are_each_others_inverse() -> None:
    assert in_bytes(3) == 3 * 2**20
    assert in_mib(in_bytes(7)) == 7


def test_megabytes_of_earlier_agents_are_understood_as_bytes() -> None:
    """A megabyte was 10^6 bytes there."""
    told = {
        "type": "ResourceReport",
        "node": 1,
        "incarnation": 2,
        "memory_mb": 2000.5,
        "memory_limit_mb": 16000.0,
        "shm_mb": 1.0,
        "shm_limit_mb": 2.0,
        "disk_free_mb": 3.0,
        "disk_read_mb_s": 0.25,
        "disk_write_mb_s": 0.5,
        "network_in_mb_s": 4.0,
        "network_out_mb_s": 5.0,
        "workers": [{"global_rank": 0, "memory_mb": 700.0}],
        "devices": [{"index": 0, "used_memory_mb": 30.0, "total_memory_mb": 80.0}],
    }
    (parcel,) = decode_from_agent(msgspec.msgpack.encode([{"type": "Observed", "observation": told}]))
    assert isinstance(parcel, Observed)
    report = parcel.observation
    assert isinstance(report, ResourceReport)
    assert (report.memory_bytes, report.memory_limit_bytes) == (2_000_500_000, 16_000_000_000)
    assert (report.shm_bytes, report.shm_limit_bytes, report.disk_free_bytes) == (10**6, 2 * 10**6, 3 * 10**6)
    assert (report.disk_read_bytes_per_second, report.disk_write_bytes_per_second) == (250_000.0, 500_000.0)
    assert (report.network_in_bytes_per_second, report.network_out_bytes_per_second) == (4e6, 5e6)
    assert report.workers[0].memory_bytes == 700_000_000
    assert (report.devices[0].used_memory_bytes, report.devices[0].total_memory_bytes) == (30_000_000, 80_000_000)
    activity = msgspec.convert({"node": 1, "memory_mb": 1.5, "memory_limit_mb": 2.0}, NodeActivity)
    assert (activity.memory_bytes, activity.memory_limit_bytes) == (1_500_000, 2_000_000)


def test_a_report_carries_bytes_alone() -> None:
    report = ResourceReport(
        node=NodeId(1),
        incarnation=Incarnation(2),
        memory_bytes=5,
        workers=(ProcessSample(global_rank=0, memory_bytes=6),),
        devices=(DeviceSample(index=0, used_memory_bytes=7),),
    )
    data = encode_frame([Observed(report)])
    assert decode_from_agent(data) == [Observed(report)]
    assert b"_mb" not in data
