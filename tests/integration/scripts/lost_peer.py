"""
Rank 1 is lost in step 5 of its first life, after the others have noticed: their tracebacks are out before it ends, and they have
not ended yet. With "interrupt" nobody is lost: all step until a signal comes.
"""

import atexit
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dlrover.trainer

folder = Path(sys.argv[1])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def hang_up() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            connection = socket.socket(fileno=os.dup(int(name))) if is_socket else None
        except OSError:
            continue
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


def mark_and_wait() -> None:
    """After the traceback. A rank that hears from this one only is to fail, too, as if this process had ended."""
    hang_up()
    (folder / f"told-{rank}").touch()
    victim = int((folder / "victim").read_text())
    wait_for(lambda: not os.path.exists(f"/proc/{victim}"))


dist.init_process_group("gloo")
if sys.argv[2:] == ["interrupt"]:
    try:
        for _ in range(100_000):
            dist.all_reduce(torch.ones(4))
            (folder / f"steps-{rank}").touch()
            time.sleep(0.01)
    finally:
        print(f"rank {rank} clears up", flush=True)
if life == 0 and rank == 1:
    (folder / "victim").write_text(str(os.getpid()))
dist.barrier()
if life == 0 and rank != 1:
    atexit.register(mark_and_wait)
for step in range(1, 11):
    if (life, rank, step) == (0, 1, 5):
        hang_up()
        wait_for(lambda: all((folder / f"told-{other}").exists() for other in (0, 2)))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))
    dlrover.trainer.report(step)
dist.destroy_process_group()
