"""llama.cpp through llama-cpp-python's low-level calls: all sequences of a job in one ``llama_decode`` a step.

The weights' type is the GGUF file's own; ``--dtype`` only labels the run.
"""

import ctypes
import time

from protocol import serve

CHUNK = 512
"""Most prompt tokens in one call."""


def load(args):
    import llama_cpp as lc
    import numpy as np

    lc.llama_backend_init()
    model_params = lc.llama_model_default_params()
    model = lc.llama_model_load_from_file(args.model.encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {args.model}")
    params = lc.llama_context_default_params()
    params.n_ctx = args.max_seqs * args.max_len
    params.n_batch = params.n_ubatch = max(CHUNK, args.max_seqs)
    params.n_seq_max = args.max_seqs
    params.n_threads = params.n_threads_batch = args.threads
    for key, value in args.options.items():
        if not hasattr(params, key):
            raise ValueError(f"llama_context_params has no field {key!r}")
        setattr(params, key, value)
    context = lc.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    batch = lc.llama_batch_init(params.n_batch, 0, 1)

    def decode(rows):
        """Feed (token, position, sequence, wants logits) rows; the argmax of each row that wants logits."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if status := lc.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        chosen = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = ctypes.cast(lc.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float * vocab))
                chosen.append(int(np.frombuffer(logits.contents, np.float32).argmax()))
        return chosen

    def run(prompts, max_tokens):
        start = time.perf_counter()
        lc.llama_memory_clear(lc.llama_get_memory(context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        outputs = [[] for _ in prompts]
        first = 0.0
        for at in range(0, len(rows), params.n_batch):
            chunk = rows[at : at + params.n_batch]
            tokens = decode(chunk)
            now = time.perf_counter() - start
            for sequence, token in zip([row[2] for row in chunk if row[3]], tokens, strict=True):
                outputs[sequence].append(token)
                first += now / len(prompts)
        for step in range(max_tokens - 1):
            rows = [
                (outputs[sequence][-1], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)
            ]
            for sequence, token in enumerate(decode(rows)):
                outputs[sequence].append(token)
        return outputs, first

    info = {"engine": "llama.cpp", "version": f"llama-cpp-python {lc.__version__}", "vocab_size": vocab}
    return info, run


serve(load)
