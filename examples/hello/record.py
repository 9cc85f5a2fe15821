"""
A crash with its reason: `@record` writes the exception to a file, and the launcher's report shows it.

The last worker fails in its first life and works in the second, so `--max-restarts=1` brings the job to a good end and
`--max-restarts=0` shows the report.
"""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == world_size - 1 and restart == 0:
        raise RuntimeError(f"worker {rank} fails on purpose, once")
    print(f"worker {rank} is fine after {restart} restarts", flush=True)


if __name__ == "__main__":
    main()
