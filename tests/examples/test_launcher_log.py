"""When a launcher noticed a death, by its own word: lines as the real ones wrote them."""

from datetime import datetime

import pytest
from failover import KillClock
from launcher_log import OURS_DETECTED, OURS_MET, TORCH_DETECTED, LogLine

TORCHRUN = """\
W1116 00:27:19.244000 14141 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 14145 closing signal SIGTERM
E1116 00:27:19.309000 14141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 14144) of binary: /venv/bin/python3
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:28370.
W1116 00:27:24.442000 14141 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 14269 closing signal SIGTERM
E1116 00:27:24.507000 14141 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 14270) of binary: /venv/bin/python3
"""

DLROVER_061 = """\
  restart_count=0
W1116 00:27:54.546000 14524 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 14748 closing signal SIGTERM
E1116 00:27:54.610000 14524 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 14747) of binary: /peers/bin/python
[2026-11-16 00:27:54,610] [ERROR] [training.py:1202:_invoke_run] The worker fails with {0: ProcessFailure(local_rank=0, pid=14747, exitcode=-9, error_file='<N/A>')}
"""

OURS = """\
2026-11-16 00:30:34,461 INFO dlrover.agent round=1 group_rank=0 of 1 first_global_rank=0 world_size=2 coordinator=localhost:25308
2026-11-16 00:30:37,032 INFO dlrover.agent started 2 workers round=1 seconds=2.570
2026-11-16 00:30:37,913 INFO dlrover.agent.workers.process_tree ended pid=17506 exit_code=None signal=9
2026-11-16 00:30:37,937 WARNING dlrover.agent global rank 0 failed: ended by SIGKILL
2026-11-16 00:30:37,963 INFO dlrover.agent round=2 group_rank=0 of 1 first_global_rank=0 world_size=2 coordinator=localhost:24354
2026-11-16 00:30:37,973 INFO dlrover.agent.workers.process_tree ended pid=17508 exit_code=None signal=15
2026-11-16 00:30:37,980 INFO dlrover.agent stopped workers round=1 cause=failure seconds=0.042
2026-11-16 00:30:38,719 INFO dlrover.agent.workers.process_tree ended pid=17540 exit_code=None signal=9
2026-11-16 00:30:38,750 INFO dlrover.agent round=3 group_rank=0 of 1 first_global_rank=0 world_size=2 coordinator=localhost:26330
"""


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-11-16T00:{clock}").timestamp()


@pytest.mark.parametrize(
    ("log", "line", "killed", "victim", "expected"),
    [
        (TORCHRUN, TORCH_DETECTED, "27:19.209456", 14144, "27:19.244"),
        (TORCHRUN, TORCH_DETECTED, "27:24.381061", 14270, "27:24.442"),
        (DLROVER_061, TORCH_DETECTED, "27:54.456323", 14747, "27:54.546"),
        (OURS, OURS_DETECTED, "30:37.873772", 17506, "30:37.913"),
        (OURS, OURS_DETECTED, "30:38.699277", 17540, "30:38.719"),
        (OURS, OURS_MET, "30:37.873772", 17506, "30:37.963"),
        (OURS, OURS_MET, "30:38.699277", 17540, "30:38.750"),
    ],
)
def test_the_first_word_after_the_kill_counts(log: str, line: LogLine, killed: str, victim: int, expected: str) -> None:
    assert line.first_after(log.splitlines(), killed_at=at(killed), victim=victim) == pytest.approx(at(expected))


def test_where_no_survivor_is_left_torch_only_says_who_failed() -> None:
    lines = [line for line in TORCHRUN.splitlines() if "Sending" not in line]
    found = TORCH_DETECTED.first_after(lines, killed_at=at("27:24.381061"), victim=14270)
    assert found == pytest.approx(at("27:24.507"))


def test_the_end_of_another_worker_is_not_the_victims() -> None:
    assert OURS_DETECTED.first_after(OURS.splitlines(), killed_at=at("30:37.9"), victim=1750) is None


def test_a_log_without_a_word_tells_nothing() -> None:
    for line in (TORCH_DETECTED, OURS_DETECTED, OURS_MET):
        assert line.first_after(["[rank0]: Traceback", ""], killed_at=at("27:19.2"), victim=1) is None


def test_a_time_cut_to_milliseconds_is_not_before_the_kill() -> None:
    killed_at = at("30:37.913600")
    assert OURS_DETECTED.first_after(OURS.splitlines(), killed_at=killed_at, victim=17506) == killed_at
    assert OURS_DETECTED.first_after(OURS.splitlines(), killed_at=killed_at + 0.001, victim=17506) is None


def test_times_are_translated_to_the_monotonic_clock(tmp_path) -> None:
    log = tmp_path / "output.log"
    log.write_text(
        "2026-11-16 00:30:37,913 INFO dlrover.agent.workers.process_tree ended pid=7 exit_code=None signal=9\n"
    )
    clock = KillClock(log, victim=7)
    assert clock.read(None) is None
    assert clock.read(OURS_DETECTED) is None  # written before the kill
    now = datetime.now()
    with log.open("a") as file:
        stamp = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03}"
        file.write(f"{stamp} INFO dlrover.agent.workers.process_tree ended pid=7 exit_code=None signal=9\n")
    detected_at_ns = clock.read(OURS_DETECTED)
    assert detected_at_ns is not None
    assert 0 <= detected_at_ns - clock.killed_at_ns < 60e9
