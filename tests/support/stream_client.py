"""A client that reads many streams of completions at once and prints when each began and ended; run as a module.

It imports no jax, and parses no JSON while it reads, so that it is faster than any server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def read(host: str, port: int, body: dict[str, object]) -> tuple[float, float, int]:
    """Send one request; return the times (seconds) of its first and last chunk, and the number of chunks."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    times: list[float] = []
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
    writer.close()
    return times[0], times[-1], len(times)


async def main(host: str, port: int, streams: int, tokens: int) -> None:
    bodies = [
        {"model": "m", "prompt": [7 + i] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": i}
        for i in range(streams)
    ]
    print(json.dumps(await asyncio.gather(*(read(host, port, body) for body in bodies))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
