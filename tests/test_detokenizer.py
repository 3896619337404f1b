"""Streaming text: the chunks add up to the whole, no half characters, and no beginning of a stop string gets out."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.detokenizer import IncrementalDetokenizer, StopMatcher
from jaxserve.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = "<|end|>"
ODD_BYTES = [0x41, 0x20, 0x80, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x8E, 0x89, 0xF8, 0xFF]


def byte_level() -> Tokenizer:
    """One token a byte (in the order of ``BYTES``), then some words, then a special token."""
    words = ["Ġhello", "Ã©", "ðŁ"]
    vocab = {token: i for i, token in enumerate([*BYTES, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """Tokens 0 to 255 are the bytes."""
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["▁", "▁hello", "é", "▁▁", "lo"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([SPECIAL])
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    tokens = ["[UNK]", "hello", "##lo", "world", "##s", ".", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([SPECIAL])
    return Tokenizer(backend)


TOKENIZERS = {"bytes": byte_level(), "pieces": sentencepiece(), "other": wordpiece()}

ID_OF_BYTE = {TOKENIZERS["bytes"].token_bytes(i)[0]: i for i in range(256)}


def byte_id(kind: str, byte: int) -> int:
    return byte if kind == "pieces" else ID_OF_BYTE[byte]


def odd_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Tokens with many broken, cut and joined characters; the last id does not exist."""
    size = TOKENIZERS[kind].vocab_size
    ids = st.integers(256 if kind != "other" else 0, size)
    return st.lists(
        ids | st.sampled_from([byte_id(kind, b) for b in ODD_BYTES]) if kind != "other" else ids, max_size=24
    )


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt=(), skip=True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    bounds = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    chunks = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*chunks, detokenizer.flush()]


CUTS = st.lists(st.integers(0, 24), max_size=24)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_kinds_are_recognised(kind):
    assert TOKENIZERS[kind].kind == kind


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_chunks_add_up_to_the_whole(kind, data):
    tokenizer, skip = TOKENIZERS[kind], data.draw(st.booleans())
    ids = data.draw(odd_ids(kind))
    chunks = stream(tokenizer, ids, data.draw(CUTS), skip=skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(chunks) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in chunk for chunk in chunks)
    for chunk in chunks:
        chunk.encode()  # no lone surrogates either


@given(st.text(max_size=12), CUTS)
@settings(deadline=None, max_examples=150)
def test_valid_text_never_shows_a_replacement_character(text, cuts):
    ids = [byte_id("bytes", b) for b in text.encode()]
    chunks = stream(TOKENIZERS["bytes"], ids, cuts)
    assert "".join(chunks) == text
    assert all(("\ufffd" in chunk) <= ("\ufffd" in text) for chunk in chunks)


@given(st.text(min_size=1, max_size=4), st.integers(0, 16), CUTS)
@settings(deadline=None, max_examples=150)
def test_a_character_begun_by_the_prompt_is_completed(text, cut, cuts):
    ids = [byte_id("bytes", b) for b in text.encode()]
    prompt, rest = ids[:cut], ids[cut:]
    whole_characters = b"".join(TOKENIZERS["bytes"].token_bytes(i) for i in prompt).decode(errors="ignore")
    chunks = stream(TOKENIZERS["bytes"], rest, cuts, prompt)
    assert "".join(chunks) == (text.removeprefix(whole_characters) if rest else "")


def test_a_character_begun_by_the_prompt_and_not_continued_is_the_prompts_own():
    begun = [byte_id("bytes", 0xE2)]
    letter, more = [byte_id("bytes", 0x41)], [byte_id("bytes", 0xAC)]
    assert "".join(stream(TOKENIZERS["bytes"], letter, [], begun)) == "A"
    assert "".join(stream(TOKENIZERS["bytes"], [], [], begun)) == ""
    assert "".join(stream(TOKENIZERS["bytes"], more + letter, [1], begun)) == "\ufffdA"


def test_the_tail_is_never_swallowed():
    for kind in ("bytes", "pieces"):
        detokenizer = IncrementalDetokenizer(TOKENIZERS[kind])
        assert detokenizer.push([byte_id(kind, 0x41), byte_id(kind, 0xE2)]) == "A"
        assert detokenizer.push([byte_id(kind, 0x82)]) == ""
        assert detokenizer.flush() == "\ufffd"


def test_first_space_of_a_sentencepiece_text():
    tokenizer = TOKENIZERS["pieces"]
    hello = [257]
    assert "".join(stream(tokenizer, hello, [])) == "hello"
    assert "".join(stream(tokenizer, hello, [], prompt=hello)) == " hello"
    assert "".join(stream(tokenizer, hello * 2, [1])) == "hello hello"


def test_other_decoders_keep_their_context():
    tokenizer = TOKENIZERS["other"]
    assert "".join(stream(tokenizer, [3, 4, 1, 5], [1, 2, 3])) == "worlds hello ."
    assert "".join(stream(tokenizer, [4, 1], [1], prompt=[3])) == "s hello"


def test_special_tokens_are_shown_on_demand():
    tokenizer = TOKENIZERS["bytes"]
    end = tokenizer.encode(SPECIAL)
    assert "".join(stream(tokenizer, end, [])) == ""
    assert "".join(stream(tokenizer, end, [], skip=False)) == SPECIAL


# --- stop strings

ALPHABET = "ab\u00e9"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


def match(stops: list[str], include: bool, chunks: list[str]) -> tuple[list[str], str | None]:
    matcher, out, fired = StopMatcher(stops, include), [], None
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        out.append(text)
        if stop is not None:
            fired = stop
            break
    return [*out, matcher.flush()], fired


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) by brute force: the first character at which some stop string is complete; the longest of them."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return end, max(done, key=len)
    return None


@given(STOPS, st.booleans(), st.lists(st.text(ALPHABET, max_size=5), max_size=6))
@settings(deadline=None, max_examples=400)
def test_stop_matcher_equals_brute_force_however_the_text_is_cut(stops, include, chunks):
    text = "".join(chunks)
    out, fired = match(stops, include, chunks)
    expected = first_complete(text, stops)
    if expected is None:
        assert fired is None
        assert "".join(out) == text
    else:
        end, stop = expected
        assert fired == stop
        assert "".join(out) == text[: end if include else end - len(stop)]


@given(STOPS, st.lists(st.text(ALPHABET, max_size=5), max_size=6), st.text(ALPHABET, max_size=4))
@settings(deadline=None, max_examples=300)
def test_nothing_is_emitted_that_a_later_stop_would_take_back(stops, chunks, rest):
    matcher, emitted = StopMatcher(stops, include=False), ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        emitted += text
        if stop is not None:
            return
    seen = "".join(chunks)
    expected = first_complete(seen + rest, stops)
    kept = seen + rest if expected is None else (seen + rest)[: expected[0] - len(expected[1])]
    assert kept.startswith(emitted)
    held = seen[len(emitted) :]
    assert held == "" or any(s.startswith(held) for s in stops)  # and no more is held back than must be


def test_stop_matcher_by_example():
    matcher = StopMatcher(["</s>", "END"], include=False)
    assert matcher.push("Hello <") == ("Hello ", None)
    assert matcher.push("/") == ("", None)
    assert matcher.push("x> E") == ("</x> ", None)
    assert matcher.push("ND more") == ("", "END")
    assert matcher.push("after") == ("", None)
    assert matcher.flush() == ""
    assert StopMatcher([], include=True).push("any") == ("any", None)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""], include=True)
