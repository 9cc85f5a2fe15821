"""A node that does what the test tells it through a pipe named after it: `FOLDER/<job>.<id>`."""

import os
import signal
import subprocess
import sys

_, _, name = os.environ["DLROVER_LOCAL_NODE"].partition(".")
path = os.path.join(sys.argv[1], name)
try:
    os.mkfifo(path)
except FileExistsError:
    pass
pipe = open(path, encoding="ascii")  # noqa: SIM115 (for life)
while True:
    match pipe.readline().split():
        case ["exit", code]:
            sys.exit(int(code))
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["exhaust"]:
            hoard = [bytearray(1 << 20) for _ in range(1 << 20)]
        case ["ignore", "SIGTERM"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case ["environ"]:
            print(dict(os.environ))
        case ["say", *rest]:
            print(*rest, flush=True)
        case ["leave", "children"]:
            for environ in (None, {}):
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", f"import time; time.sleep(300)  # {path}"],
                    env=environ,
                    start_new_session=True,
                )
        case []:
            pipe = open(path, encoding="ascii")  # noqa: SIM115 (the test has closed its end)
