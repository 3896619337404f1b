"""An engine that answers one text, then works until it is killed.

Arguments: the model, a JSON object of engine options, a JSON list of the text's tokens, how many tokens the answer has.
One JSON line goes to standard output: the answer, and how many tokens of the text were known.
"""

import json
import random
import sys
import time

import jaxserve


def main() -> None:
    model, options, text, count = sys.argv[1], *(json.loads(argument) for argument in sys.argv[2:5])
    begun = time.monotonic()
    llm = jaxserve.LLM(model, **options)
    ready = time.monotonic()
    (out,) = llm.generate([text], max_tokens=count, temperature=0.0, ignore_eos=True, progress=False)
    seconds = {"start": round(ready - begun, 3), "answer": round(time.monotonic() - ready, 3)}
    said = {"answer": out.outputs[0].token_ids, "cached": out.cached_tokens, "seconds": seconds}
    print(json.dumps(said | {"kv": llm.report()["kv cache"]}), flush=True)
    time.sleep(0.5)
    print("working", flush=True)
    while True:
        prompts = [random.choices(range(5, 250), k=random.randrange(20, 120)) for _ in range(4)]
        llm.generate(prompts, max_tokens=random.randrange(1, 40), temperature=0.0, ignore_eos=True, progress=False)


if __name__ == "__main__":
    main()
