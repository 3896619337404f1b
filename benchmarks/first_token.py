"""Run as a module in a fresh process by ``benchmarks.startup``: imports, makes the engine, yields one token.

Prints one JSON line: wall-clock times (``time.time()``) of each phase's end, the token, and the engine's own report.
"""

import time

BEGUN = time.time()  # before anything else is imported

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", type=json.loads, default={}, help="engine options as a JSON object")
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jaxserve

    imported = time.time()
    with jaxserve.LLM(args.model, **args.engine) as llm:
        ready = time.time()
        prompt = list(range(100, 132))
        stream = llm.stream(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
        token = next(delta.token_ids[0] for delta in stream if delta.token_ids)
        first = time.time()
        marks = {"python": BEGUN, "import": imported, "ready": ready, "first token": first}
        print(
            json.dumps({"marks": marks, "token": token, "report": llm.report()}, default=str), file=replies, flush=True
        )
        for _ in stream:
            pass


if __name__ == "__main__":
    main()
