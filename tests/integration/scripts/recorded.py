import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("recorded failure of rank 1")


if __name__ == "__main__":
    main()
