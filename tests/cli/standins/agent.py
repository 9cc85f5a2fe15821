"""Stands in for an agent: does what the first argument of the training script says, and tells the test through a pipe."""

import base64
import json
import os
import signal
import subprocess
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

with open(sys.argv[2], encoding="utf-8") as file:
    config = json.load(file)
events = os.environ["STANDIN_EVENTS"]
life = os.path.join(os.path.dirname(events), "lives")
behaviour = base64.b64decode(config["entry"]["args"][0]).decode()


def tell(text: str) -> None:
    with open(events, "a", encoding="utf-8") as pipe:
        pipe.write(f"{text}\n")


def finish(exit_code: int, **fields: object) -> None:
    path = os.path.join(config["runtime_dir"], "result.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump({"exit_code": exit_code, **fields}, file)
    os.rename(f"{path}.new", path)
    sys.exit(exit_code)


def count_life() -> int:
    with open(life, "a", encoding="utf-8") as file:
        file.write("x")
    return os.path.getsize(life)


def leave_orphan() -> int:
    """A grandchild in a session of its own, whose parent is gone."""
    script = "import os, sys; pid = os.fork(); pid and (print(pid), os._exit(0)); os.close(1); os.setsid(); os.pause()"
    script = script.replace("os.pause()", "import signal; signal.pause()")
    return int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)


class StopError(Exception):
    pass


def on_term(number: int, frame: object) -> None:
    raise StopError


if behaviour == "stubborn":
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
elif behaviour != "newborn":
    for number in SIGNALS:
        signal.signal(number, on_term)

tell(f"agent {os.getpid()} {os.getsid(0) == os.getpid()} {os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE']}")
try:
    match behaviour:
        case "ok":
            finish(0)
        case "descriptors":
            tell("descriptors " + " ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
            finish(0)
        case "fail":
            finish(1, message="worker 3 had enough", worker_exit_code=7, first_failed_rank=3)
        case "dismissed":
            finish(0, message="This node left the job: scaled down.", is_job_alive=True)
        case "pended":
            finish(22, message="This node left the job: no room.", is_job_alive=True)
        case "crash":
            os._exit(9)
        case "crash-once":
            if count_life() == 1:
                tell(f"orphan {leave_orphan()}")
                os.kill(os.getpid(), signal.SIGKILL)
            finish(0)
        case "orphan":
            tell(f"orphan {leave_orphan()}")
            finish(0)
        case "wait" | "stubborn" | "newborn" | "wait-and-fail":
            tell(f"waiting {config['master_addr']}")
            with open(os.environ["STANDIN_GATE"], encoding="utf-8") as gate:
                gate.read()
            finish(7 if behaviour == "wait-and-fail" else 0, message="worker 3 had enough")
except StopError:
    tell("stopped")
    finish(143)
