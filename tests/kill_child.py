"""An engine for the kill matrix: says how it started and what it answers, then works until somebody kills it.

Arguments: the model, a JSON object of engine options, the number of the round. One JSON line goes to standard output
as soon as the golden prompt has been answered.
"""

import itertools
import json
import random
import sys
import time

import jaxserve
from jaxserve import SamplingParams

GOLDEN = list(range(40, 160))
"""What every round asks first: a text that the round before has asked too."""
ANSWER = 24
STREAMS = 4


def started(llm: jaxserve.LLM, begun: float) -> dict[str, object]:
    """What the parent checks."""
    (golden,) = llm.generate([GOLDEN], max_tokens=ANSWER, temperature=0.0, ignore_eos=True, progress=False)
    report = llm.report()
    return {
        "golden": golden.outputs[0].token_ids,
        "cached": golden.cached_tokens,
        "compiled": report["executables"]["compiled"],
        "discarded": report["executables"]["discarded"],
        "weights": report["weights"],
        "seconds": round(time.monotonic() - begun, 3),
    }


def work(llm: jaxserve.LLM, seed: int) -> None:
    """Prompts that share beginnings, some hung up on, for ever."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(5, 250) for _ in range(rng.choice((20, 60, 110)))] for _ in range(6)]
    open_requests: list[str] = []
    done: list[str] = []
    for number in itertools.count():
        prompt = rng.choice(beginnings) + [rng.randrange(5, 250) for _ in range(rng.randrange(1, 30))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=rng.choice((0.0, 1.0)), ignore_eos=True)

        def ended(delta: jaxserve.Delta) -> None:
            if delta.request_done:
                done.append(delta.request_id)

        open_requests.append(llm.submit(prompt, params, on_delta=ended))
        if number % 7 == 0:
            llm.abort(rng.choice(open_requests[-STREAMS:]))
        while len(open_requests) - len(done) >= STREAMS:
            time.sleep(0.001)


def main() -> None:
    begun = time.monotonic()
    model, options, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    llm = jaxserve.LLM(model, **options)
    print(json.dumps(started(llm, begun)), flush=True)
    work(llm, seed)


if __name__ == "__main__":
    main()
