"""A server process for tests: ``serve.run`` over a fake engine that loads slowly, dies or hangs as it is told.

Arguments: a JSON object {"load": seconds, "fail": text, "hang": how, "llm": {...}, "options": {...}}.
"""

import json
import logging
import os
import sys
import threading
import time

import serve
from tests.fake_llm import FakeLLM


def hang(llm: FakeLLM, how: str) -> None:
    """From now on the engine makes no progress: ``hang`` as such, ``gil`` in native code that lets no thread run."""
    if how == "die":
        llm.state.alive = False
    begun = time.monotonic()
    while how in ("hang", "gil"):
        llm.state.seconds_since_progress = time.monotonic() - begun
        if how == "gil" and llm._jobs:
            import ctypes

            ctypes.PyDLL(None).usleep(100_000_000)  # PyDLL keeps the lock
        time.sleep(0.01)


def main() -> int:
    asked = json.loads(sys.argv[1])

    def load(on_phase):
        on_phase("weights")
        time.sleep(asked.get("load", 0))
        if "fail" in asked:
            raise RuntimeError(asked["fail"])
        llm = FakeLLM(**asked.get("llm", {}))
        if "hang" in asked:
            threading.Thread(target=hang, args=(llm, asked["hang"]), daemon=True).start()
        return llm

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = serve.ServerOptions(**{"port": 0} | asked.get("options", {}))
    try:
        ended = serve.run(load, options)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 7
    if not ended.clean:
        logging.shutdown()
        os._exit(ended.status)
    print("closed", flush=True)
    return ended.status


if __name__ == "__main__":
    sys.exit(main())
