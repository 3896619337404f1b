"""Layers with windows on real tiny models: the same tokens whatever is freed, reused, spilled or computed again."""

import pytest
import test_prefix_engine
from test_prefix_engine import computed, texts
from tiny import idle, tiny

import jaxserve
from jaxserve.prefix_cache import in_order

FAMILIES = ("gpt_oss", "gemma4_dense")
"""Two groups of two layers; and layers without a window and three groups with one, whose heads are narrower than their
plane, some of them layers that read what others have written."""
WINDOW, PAGE, BUDGET = 16, 8, 32
SMALL = {"gpt_oss": 180 << 10, "gemma4_dense": 240 << 10}
"""Bytes of about 45 and 60 pages: enough for the longest text, of which the groups have 64 and 128, but not for two."""


def ids(text: str) -> list[int]:
    """The models' 256 tokens, for bytes."""
    return list(text.encode())


STORY = ids("It was a dark and stormy night; the rain fell in torrents, except when it was checked by a gust of wind. ")
ASKS = [STORY + ids(end) for end in ("And then the wind rose over the hill.", "And then?", "Why?", "And then it was.")]
LONG = [ASKS[0] + STORY[:70]]
CROWD = [ids(text) for text in test_prefix_engine.CROWD]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(family, programs_dir):
    with tiny(programs_dir, family, prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def llm(family, programs_dir):
    with tiny(programs_dir, family) as made:
        yield made


def test_reuse_changes_no_token(llm, plain):
    expected, none = texts(plain, ASKS)
    assert none == [0] * 4
    cold, first = texts(llm, ASKS)
    warm, again = texts(llm, ASKS)
    assert expected == cold == warm
    assert all(cached >= len(STORY) for cached in first[1:]), "the others wait for the first one's pages"
    assert again == [len(prompt) - 1 for prompt in ASKS]


def test_a_missing_window_is_computed_again(llm, plain):
    """The pages of the layers without one are still known; only a beginning whose window is there is of use."""
    expected, _ = texts(plain, ASKS[:1])
    texts(llm, ASKS[:1])
    cache = llm._built.engine.cache
    chain = cache.chain(ASKS[0])
    for keys in chain.keys[1:]:
        for key in keys[4:]:
            cache.forget(cache._by_key[key])
    before = computed(llm)
    found, (cached,) = texts(llm, ASKS[:1])
    assert found == expected
    assert cached == 4 * PAGE
    assert computed(llm) - before == len(ASKS[0]) - cached + 11


def test_the_answer_of_a_conversation_is_reused(llm):
    (first,) = llm.generate(ASKS[1:2], max_tokens=70, temperature=0.0, ignore_eos=True)
    known = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([[*known, 65, 66, 67]], max_tokens=2, temperature=0.0)
    assert second.cached_tokens >= len(known) - 1
    idle(llm)


def test_the_report_counts_all_groups(llm):
    table = llm.report()["kv cache"]
    groups = llm._built.programs.groups
    assert len(table["groups"]) == groups
    assert table["groups"][0].endswith("all tokens")
    bound = (-(-(WINDOW - 1 + BUDGET) // PAGE) + 1) * PAGE
    assert all(f"window 16: at most {bound} tokens" in line for line in table["groups"][1:])
    longest = llm._built.limits.max_model_len
    a_text = longest // PAGE + (groups - 1) * bound // PAGE
    assert table["tokens_that_fit"] // longest == table["pages"] // a_text


def test_a_prompt_of_many_windows_is_the_same_in_chunks_as_whole(family, programs_dir, plain):
    if family != FAMILIES[0]:
        pytest.skip("one family will do")
    expected, _ = texts(plain, LONG)
    with tiny(programs_dir, family, max_num_seqs=1, max_num_batched_tokens=256, prefix_caching=False) as whole:
        assert texts(whole, LONG)[0] == expected


@pytest.mark.parametrize(("host", "devices"), [(0, 1), (0.001, 1), (0.001, 2)])
def test_too_little_memory_changes_no_token(family, programs_dir, plain, host, devices):
    """Windows pass over prompts and answers; who is preempted is computed again, or brought back from the host."""
    if devices > 1 and family != FAMILIES[0]:
        pytest.skip("on several devices one family will do")
    expected, _ = texts(plain, CROWD, max_tokens=100)
    long, _ = texts(plain, LONG, max_tokens=40)
    limits = {"kv_cache_memory_bytes": SMALL[family] // devices, "host_kv_gib": host, "tensor_parallel": devices}
    with tiny(programs_dir, family, **limits) as small:
        scheduler, most = small._built.engine.scheduler, [0] * small._built.programs.groups
        grow = scheduler._grow

        def spy(seq, start, end):
            done = grow(seq, start, end)
            for group, table in enumerate(seq.pages):
                most[group] = max(most[group], len(in_order([table])))
            return done

        scheduler._grow = spy
        for _ in range(2):
            assert texts(small, CROWD, max_tokens=100)[0] == expected
        assert scheduler.preemptions > 0
        if host:
            assert scheduler.cache.tier.counts.spilled > 0
            assert scheduler.cache.tier.counts.restored > 0
        assert texts(small, LONG, max_tokens=40)[0] == long
        assert max(most[1:]) <= -(-(WINDOW + BUDGET) // PAGE) + 1
        assert scheduler.pool.usable < len(most) * small._built.limits.max_model_len // PAGE
        idle(small)


def test_a_restart_brings_all_groups_back_from_the_disk(family, programs_dir, plain, tmp_path):
    expected, _ = texts(plain, ASKS)
    room = {"host_kv_gib": 0.001, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_gib": 0.01}
    with tiny(programs_dir, family, **room) as first:
        assert texts(first, ASKS)[0] == expected
    with tiny(programs_dir, family, **room) as second:
        found, cached = texts(second, ASKS)
        assert found == expected
        assert all(tokens >= (len(ask) - 1) // PAGE * PAGE for tokens, ask in zip(cached, ASKS, strict=True))
        assert not second._built.engine.scheduler.cache.stores.reading


def test_a_request_that_could_never_fit_is_refused(family, programs_dir):
    for size in (20 << 10, 60 << 10):
        with pytest.raises(jaxserve.ConfigError, match="max_model_len 256 does not fit: the KV cache holds"):
            tiny(programs_dir, family, kv_cache_memory_bytes=size, max_model_len=256)
