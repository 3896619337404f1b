"""jaxserve through its public face: every prompt of a job is submitted at once."""

import threading
import time

from protocol import serve


def load(args):
    from importlib.metadata import version

    import jaxserve

    llm = jaxserve.LLM(
        args.model, dtype=args.dtype, max_num_seqs=args.max_seqs, max_model_len=args.max_len, **args.options
    )

    def run(prompts, max_tokens):
        params = jaxserve.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        errors = []
        left = [len(prompts)]
        done = threading.Event()
        start = time.perf_counter()

        def listener(index):
            def on_delta(delta):  # on the engine's one thread
                if delta.token_ids and not outputs[index]:
                    first[index] = time.perf_counter() - start
                outputs[index].extend(delta.token_ids)
                if delta.error:
                    errors.append(delta.error)
                if delta.request_done:
                    left[0] -= 1
                    if not left[0]:
                        done.set()

            return on_delta

        for index, prompt in enumerate(prompts):
            llm.submit(prompt, params, on_delta=listener(index))
        done.wait()
        if errors:
            raise RuntimeError(errors[0])
        return outputs, sum(first) / len(first)

    info = {
        "engine": "jaxserve",
        "version": f"{version('jaxserve')}, jax {version('jax')}",
        "vocab_size": llm.tokenizer.vocab_size if llm.tokenizer else None,
        "report": llm.report(),
    }
    return info, run


if __name__ == "__main__":
    serve(load)
