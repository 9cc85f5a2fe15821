"""Stands in for a master: serves nobody, but lives, dies and ends like one."""

import json
import os
import shutil
import signal
import sys

with open(sys.argv[2], encoding="utf-8") as file:
    config = json.load(file)
events = os.environ["STANDIN_EVENTS"]
behaviour = os.environ.get("STANDIN_MASTER", "serve")
lives = os.path.join(os.path.dirname(events), "master-lives")


def tell(text: str) -> None:
    with open(events, "a", encoding="utf-8") as pipe:
        pipe.write(f"{text}\n")


with open(lives, "a", encoding="utf-8") as file:
    file.write("x")
life = os.path.getsize(lives)

if behaviour == "refuse":
    print("the configuration is wrong: nonsense", file=sys.stderr)
    sys.exit(2)
if behaviour == "port-in-use-once" and life == 1:
    tell(f"master-port {config['port']}")
    sys.exit(3)


def stop(*_: object) -> None:
    if behaviour == "log-out":
        shutil.rmtree(os.environ["TMPDIR"])
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
with open(config["ready_file"], "w", encoding="utf-8") as file:
    file.write("{}")
tell(f"master {os.getpid()} {config['port']} {config['journal']}")
if behaviour == "end-at-gate":
    with open(os.environ["STANDIN_GATE"], encoding="utf-8") as gate:
        gate.read()
    with open(config["end_file"], "w", encoding="utf-8") as file:
        json.dump({"reason": "Completed", "exit_code": 0, "message": "all ended well"}, file)
    sys.exit(0)
signal.pause()
