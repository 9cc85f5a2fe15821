"""
A program of its own: searches lines for regular expressions that may never end. `dlrover.agent.workers.user_patterns` starts it.

Python's `re` cannot be interrupted and holds the interpreter lock, so no thread can watch a search. The kernel can: each pattern has
a limit of processor time, after which the process is killed. Wall-clock time would count the load of the machine.

It imports nothing of ours, so that it starts within a few milliseconds.
"""

import json
import re
import signal
import sys


def main() -> None:
    task = json.load(sys.stdin)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    for pattern in task["patterns"]:
        signal.setitimer(signal.ITIMER_PROF, task["limit"])
        search = re.compile(pattern).search
        found = next((number for number, line in enumerate(task["lines"]) if search(line)), -1)
        print(found, flush=True)
        if found >= 0:
            return


if __name__ == "__main__":
    main()
