"""Which connections of a worker nobody answers, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dlrover.agent.monitor.links import Links, read_links
from dlrover.protocol.messages.watch import UnansweredLink

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TABLE = HEAD + "".join(
    f"   {number}: {local} {remote} {state} 00000040:00000000 {timer}:00000123 {times} 0 0 {inode} 1 ffff 20 4 30 10 -1\n"
    for number, (local, remote, state, timer, times, inode) in enumerate(
        [
            ("0302000A:9C40", "0402000A:1F90", "01", "01", "00000003", 11),  # sent again
            ("0302000A:9C41", "0502000A:1F90", "01", "01", "0000000A", 12),  # more often
            ("0302000A:9C42", "0602000A:1F90", "01", "01", "00000000", 13),  # on its way
            ("0302000A:9C43", "0702000A:1F90", "01", "04", "00000009", 14),  # the other side reads nothing
            ("0302000A:9C44", "0802000A:1F90", "01", "01", "00000009", 99),  # of another process
            ("0100007F:9C45", "0100007F:1F90", "01", "01", "00000009", 15),  # inside the machine
            ("0302000A:9C46", "00000000:0000", "0A", "00", "00000000", 16),  # listens
        ]
    )
)
TABLE_6 = HEAD + (
    "   0: 0000000000000000FFFF00000302000A:9C47 0000000000000000FFFF00000902000A:1F90 02 00000001:00000000 01:00000123 "
    "00000002 0 0 17 1 ffff 20 4 30 10 -1\n"
)


def test_what_is_not_acknowledged_is_told_with_both_ends_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "7/net").mkdir(parents=True)
    (tmp_path / "7/net/tcp").write_text(TABLE)
    (tmp_path / "7/net/tcp6").write_text(TABLE_6)
    (tmp_path / "7/fd").mkdir()
    for inode in (11, 12, 13, 14, 15, 16, 17):
        (tmp_path / f"7/fd/{inode}").symlink_to(f"socket:[{inode}]")
    (tmp_path / "7/fd/0").symlink_to("/dev/null")
    assert read_links(7, str(tmp_path)) == Links(
        ("10.0.2.3",),
        tuple(
            UnansweredLink(local="10.0.2.3", remote=remote, times=times)
            for remote, times in (("10.0.2.5", 10), ("10.0.2.4", 3), ("10.0.2.9", 2), ("10.0.2.6", 0))
        ),
    )
    assert read_links(8, str(tmp_path)) == Links()


def test_the_tables_of_this_kernel_can_be_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert all(link.times == 0 for link in read_links(os.getpid()).unanswered)
