"""Prefix reuse on a real tiny model: the same tokens as without it, and less to compute."""

import pytest
from tiny import idle, roomy

import jaxserve


@pytest.fixture(scope="module")
def plain(speaking, programs_dir):
    with roomy(programs_dir, speaking, prefix_caching=False) as made:
        yield made


SYSTEM = "You are a helper who knows everything about tides, moons and harbours. " * 3
ASKS = [SYSTEM + ask for ask in ("When is high water?", "When is low water?", "Why?", "When is high water?")]


def texts(llm: jaxserve.LLM, prompts, **options):
    out = llm.generate(prompts, **{"max_tokens": 12, "temperature": 0.0, **options})
    idle(llm)
    return [[one.token_ids for one in item.outputs] for item in out], [item.cached_tokens for item in out]


def test_reuse_changes_no_token(llm, plain):
    expected, none = texts(plain, ASKS)
    assert none == [0] * 4
    cold, first = texts(llm, ASKS)
    warm, again = texts(llm, ASKS)
    assert expected == cold == warm
    assert all(cached >= len(SYSTEM) for cached in first[1:]), "the others wait for the first one's pages"
    assert again == [len(prompt) - 1 for prompt in ASKS]


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "seed": 7, "temperature": 1.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logprobs": 3},
        {"seed": 5, "temperature": 0.8, "top_p": 0.9, "min_tokens": 4},
    ],
)
def test_reuse_changes_nothing_whatever_is_asked_for(llm, plain, options):
    expected, _ = texts(plain, ASKS, **options)
    for _ in range(2):
        assert texts(llm, ASKS, **options)[0] == expected


def test_many_completions_share_one_prefill(llm):
    prompt = "A prompt nobody has sent before, of a hundred tokens or so, which five completions have in common: "
    before = computed(llm)
    llm.generate(prompt, n=5, max_tokens=3, seed=1)
    assert computed(llm) - before == len(prompt) + 4 + 2 * 5, "the prompt once, four last tokens, two decodes each"


def computed(llm: jaxserve.LLM) -> float:
    return llm.metrics.get_sample_value(
        "jaxserve:iteration_tokens_total_sum", {"model_name": llm.config.model, "engine": "0"}
    )


def test_prompt_logprobs_are_computed_though_the_prompt_is_known(llm, plain):
    def score(llm):
        (out,) = llm.generate(ASKS[1], max_tokens=1, temperature=0.0, prompt_logprobs=2)
        return [entry.logprob for entry in out.prompt_logprobs[1:]], out.cached_tokens

    expected, _ = score(plain)
    texts(llm, ASKS)
    values, cached = score(llm)
    assert cached == 0
    assert values == pytest.approx(expected, abs=1e-5)


def test_requests_of_different_salts_reuse_nothing_of_each_other(llm):
    import queue

    def cached(salt: str) -> int:
        deltas: queue.SimpleQueue = queue.SimpleQueue()
        params = jaxserve.SamplingParams(max_tokens=2, temperature=0.0)
        llm.submit(ASKS[2], params, on_delta=deltas.put, cache_salt=salt)
        found = [delta := deltas.get(timeout=60)]
        while not delta.request_done:
            found.append(delta := deltas.get(timeout=60))
        return found[0].cached_tokens

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, len(ASKS[2]) - 1]


def test_a_conversation_goes_on_where_it_was(llm):
    """The answer's own pages are reused too, not the prompt's alone."""
    (first,) = llm.generate("Tell me about the sea at night. " * 4, max_tokens=40, temperature=0.0, ignore_eos=True)
    ids = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([*ids, 65, 66, 67], max_tokens=2, temperature=0.0)
    assert second.cached_tokens >= len(ids) - 1


CROWD = [f"{i} is where this begins, and it goes on for long enough to fill some pages. " for i in range(8)]


@pytest.mark.parametrize(("host", "devices"), [(0, 1), (0.001, 1), (0.0005, 1), (0.001, 2)])
def test_too_little_device_memory_changes_no_token(speaking, programs_dir, plain, host, devices):
    """Recomputed, or spilled to the host and restored, or some of each where the host has too little room as well."""
    expected, _ = texts(plain, CROWD, max_tokens=100)
    limits = {"kv_cache_memory_bytes": (300 << 10) // devices, "host_kv_gib": host, "tensor_parallel": devices}
    with roomy(programs_dir, speaking, **limits) as small:
        for _ in range(2):
            assert texts(small, CROWD, max_tokens=100)[0] == expected
        scheduler = small._built.engine.scheduler
        assert scheduler.preemptions > 0
        if host:
            assert scheduler.cache.tier.counts.spilled > 0
            assert scheduler.cache.tier.counts.restored > 0


def test_reuse_on_several_devices(speaking, programs_dir, plain):
    expected, _ = texts(plain, ASKS)
    with roomy(programs_dir, speaking, tensor_parallel=2) as wide:
        for _ in range(2):
            assert texts(wide, ASKS)[0] == expected
