"""Asks a server for ``/health`` again and again until standard input ends, then prints how it went, as JSON.

``python -m benchmarks.probe URL SECONDS``: a process of its own, so that a busy load generator does not slow it; a new
connection each time, as probes of orchestrators make. ``SECONDS`` lie between two questions. Told of each: when it was
asked, how long it took, the status, and by how much this process itself had overslept, which the server has no part in.
"""

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit


def ask(netloc: str) -> int:
    """The status, or 0 where no answer came."""
    connection = http.client.HTTPConnection(netloc, timeout=30)
    try:
        connection.request("GET", "/health")
        with connection.getresponse() as reply:
            reply.read()
            return reply.status
    except OSError:
        return 0
    finally:
        connection.close()


def main() -> None:
    netloc, pause = urlsplit(sys.argv[1]).netloc, float(sys.argv[2])
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    found: list[tuple[float, float, int, float]] = []
    due = time.time() + pause
    while not ended.wait(pause):
        begun = time.time()
        status = ask(netloc)
        found.append((begun, time.time() - begun, status, begun - due))
        due = time.time() + pause
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
