"""
Readiness probes and preStop hooks.
"""

from __future__ import annotations

import asyncio

from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.kubelet.lives import Life


async def is_passing(probe: Body, life: Life, address: str) -> bool:
    timeout = float(probe.get("timeoutSeconds") or 1)
    if "exec" in probe:
        return await life.execute(probe["exec"]["command"], timeout)
    action = probe.get("httpGet") or probe.get("tcpSocket") or probe.get("grpc") or {}
    port = int(action["port"])
    if "httpGet" in probe:
        return await _answers(address, port, str(action.get("path") or "/"), timeout)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def run_hook(hook: Body, life: Life, address: str, grace: float) -> None:
    """At most the pod's grace. A hook that fails or takes too long changes nothing."""
    if "exec" in hook:
        await life.execute(hook["exec"]["command"], grace)
    elif "sleep" in hook:
        await asyncio.wait((asyncio.ensure_future(life.wait()),), timeout=min(float(hook["sleep"]["seconds"]), grace))
    elif "httpGet" in hook:
        await _answers(address, int(hook["httpGet"]["port"]), str(hook["httpGet"].get("path") or "/"), grace)


async def _answers(address: str, port: int, path: str, timeout: float) -> bool:
    """Whether the status is 2xx or 3xx."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            line = await reader.readline()
            writer.close()
    except (OSError, TimeoutError):
        return False
    words = line.split()
    return len(words) > 1 and words[1][:1] in (b"2", b"3")
