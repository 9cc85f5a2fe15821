"""
The server as a process: `python -m tests.kubernetes.server --port 0 --ready-file F`.

It ends on SIGTERM or SIGINT. SIGUSR1 closes its port and all connections, SIGUSR2 opens the port again: objects stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

from tests.kubernetes.server.serving import ApiServer


async def serve(options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = ApiServer(
        port=options.port,
        history=options.history,
        bookmark_every=options.bookmark_every,
        token_cache=options.token_cache,
        tls=options.tls,
        directory=options.directory,
    )
    is_away = asyncio.Queue[bool]()  # one after the other: a quick pair of signals must not cross
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_away.put_nowait, True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, is_away.put_nowait, False)
    async with server:
        presence = asyncio.create_task(_come_and_go(server, is_away))
        ready = {"url": server.url, "kubeconfig": str(server.kubeconfig), "token": server.token, "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        if options.ready_file is not None:
            part = options.ready_file.with_suffix(".part")
            part.write_text(json.dumps(ready))
            part.replace(options.ready_file)
        await ended.wait()
        presence.cancel()
        await asyncio.wait((presence,))


async def _come_and_go(server: ApiServer, is_away: asyncio.Queue[bool]) -> None:
    while True:
        await (server.stop() if await is_away.get() else server.start())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--ready-file", type=Path, help="written as JSON (url, kubeconfig, token, pid) when the server listens"
    )
    parser.add_argument("--directory", type=Path, help="where the kubeconfig goes; default: a temporary one")
    parser.add_argument("--history", type=int, default=10_000, help="changes per resource that a watch may begin at")
    parser.add_argument("--bookmark-every", type=float, default=60.0, help="seconds between bookmarks")
    parser.add_argument(
        "--token-cache", type=float, default=10.0, help="seconds that a good token stays good unchecked"
    )
    parser.add_argument("--tls", action="store_true", help="serve HTTPS with a certificate of its own")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
