"""vLLM (the CPU build), its engine core in this process."""

import os
import time

from protocol import serve


def load(args):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, args.cpus))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm

    llm = vllm.LLM(args.model, dtype=args.dtype, max_model_len=args.max_len, max_num_seqs=args.max_seqs, **args.options)
    engine = llm.llm_engine
    jobs = iter(range(1 << 62))

    def run(prompts, max_tokens):
        job = next(jobs)
        params = vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{job}-{i}", {"prompt_token_ids": prompt}, params)
        first, outputs = {}, {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id.split("-")[1])
                if output.outputs[0].token_ids:
                    first.setdefault(index, time.perf_counter() - start)
                outputs[index] = list(output.outputs[0].token_ids)
        return [outputs[i] for i in range(len(prompts))], sum(first.values()) / len(prompts)

    info = {
        "engine": "vllm",
        "version": vllm.__version__,
        "vocab_size": llm.llm_engine.model_config.get_vocab_size(),
    }
    return info, run


if __name__ == "__main__":
    serve(load)
