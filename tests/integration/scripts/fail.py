"""Ends the way it is told to: rank 1 on its first life (or on every life), the others wait for it in a barrier."""

import argparse
import os
import signal
import sys

parser = argparse.ArgumentParser()
parser.add_argument("how")
parser.add_argument("--always", action="store_true")
parser.add_argument("--folder", default=".")
args = parser.parse_args()
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fail() -> None:
    match args.how:
        case "exception":
            raise ValueError("the weights are on fire")
        case "endless-line":
            raise ValueError("a" * 60 + "!")
        case "memory-error":
            raise MemoryError("cannot allocate 1 TiB")
        case "exit":
            os._exit(3)
        case "sys-exit":
            sys.exit(4)
        case "text":
            sys.exit("no good reason")
        case "oom":
            hog = []
            while True:
                hog.append(bytearray(os.urandom(1 << 20)) * 16)
        case name:
            os.kill(os.getpid(), getattr(signal, name))


def main() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1 and (args.always or life == 0):
        fail()
    dist.barrier()
    with open(f"{args.folder}/done-{rank}", "w") as out:
        out.write(str(life))
    dist.destroy_process_group()


main()
