"""Who am I? The smallest script a launcher can run: it reads the environment that torchrun and dlrover-run both set."""

import os

rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"hello from worker {rank} of {world_size}, local rank {os.environ['LOCAL_RANK']}, pid {os.getpid()}", flush=True)
