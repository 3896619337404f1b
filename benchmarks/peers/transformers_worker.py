"""transformers: one static batch through ``generate``."""

import time

from protocol import serve


def load(args):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), **args.options
    ).eval()

    class FirstToken(transformers.StoppingCriteria):
        """Stops nothing; notes when it is first asked, which is after the first token."""

        when = None

        def __call__(self, input_ids, scores, **kwargs):
            self.when = self.when or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def run(prompts, max_tokens):
        first = FirstToken()
        ids = torch.tensor(prompts)  # prompts of one length: nothing is padded
        start = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([first]),
        )
        return output[:, ids.shape[1] :].tolist(), first.when - start

    info = {
        "engine": "transformers",
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "vocab_size": model.config.vocab_size,
    }
    return info, run


serve(load)
