"""Tokenizers of every origin: ids equal the reference's, text comes back, chat templates render as in transformers."""

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from test_gguf import write_gguf
from tokenizers import decoders, models, pre_tokenizers, processors

import checkpoints
from checkpoints import CheckpointError
from jaxserve.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.tokenizer import Tokenizer, TokenizerError

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "smollm2_reference.json").read_text())
TEXTS = (
    "The quick  brown fox can't jump 1234567 times.\n\n\tOK?",
    " Leading and trailing ",
    "naïve café – 東京 🎉👩‍👩‍👧 Ünïcödé",
    "x=1;\r\ny  =\t{'a': [1,2]}\n    return",
    "",
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        path = checkpoints.resolve_model("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
    with checkpoints.open_checkpoint(path) as ckpt:
        return Tokenizer.from_checkpoint(ckpt)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["id"])
def test_reference_prompts_and_outputs(smollm2, case):
    assert smollm2.encode(case["text"], add_special_tokens=False) == case["prompt_token_ids"]
    assert smollm2.encode(case["text"]) == case["prompt_token_ids"]
    assert smollm2.decode(case["token_ids"], skip_special_tokens=False) == case["output_text"]
    if case["kind"] == "chat":
        assert smollm2.apply_chat_template(case["messages"]) == case["text"]


def test_facts_of_the_embedded_tokenizer(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_str(2) == "<|im_end|>"
    assert smollm2.token_bytes(7042) == b" Paris"
    assert smollm2.token_bytes(10**9) == smollm2.token_bytes(-1) == b""


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert b"".join(smollm2.token_bytes(i) for i in ids).decode() == text


def test_decode_equals_the_library(smollm2):
    ids = [i for case in REFERENCE["cases"] for i in case["token_ids"]]
    for skip in (True, False):
        assert smollm2.decode(ids, skip) == smollm2._backend.decode(ids, skip_special_tokens=skip)


# --- built from GGUF metadata


def byte_level_vocab(*extra: str) -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]


def gguf_tokenizer(tmp_path: Path, **metadata) -> Tokenizer:
    path = write_gguf(tmp_path / "m.gguf", **{f"tokenizer__ggml__{k}": v for k, v in metadata.items()})
    with checkpoints.open_checkpoint(path) as ckpt:
        return Tokenizer.from_checkpoint(ckpt)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [piece for piece, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "!", "ĊĊ"]),
        ("gpt-2", ["I", "'m", "Ġ1234", "!", "ĊĊ"]),
        ("default", ["I", "'m", "Ġ1234", "!", "ĊĊ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "4", "!ĊĊ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "!ĊĊ"]),
        ("tekken", ["I", "'m", "Ġ", "1", "2", "3", "4", "!ĊĊ"]),
    ],
)
def test_pre_tokenizers(tmp_path, pre, expected):
    tokens = byte_level_vocab("ab", "<|end|>")
    types = [1] * 257 + [3]
    tokenizer = gguf_tokenizer(tmp_path, model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=["a b"])
    assert words(tokenizer, "I'm 1234!\n\n") == expected
    assert tokenizer.encode("ab<|end|>", add_special_tokens=False) == [256, 257]
    assert tokenizer.special_ids == {257}
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_merge_that_looks_like_the_comment_of_a_merges_file(tmp_path):
    """The library passes over strings that begin with #version."""
    word = "#versions"
    tokens = byte_level_vocab(*(word[:end] for end in range(2, len(word) + 1)))
    merges = [f"{word[:end]} {word[end]}" for end in range(1, len(word))]
    tokenizer = gguf_tokenizer(tmp_path, model="gpt2", pre="qwen2", tokens=tokens, merges=merges)
    assert tokenizer.encode(word) == [len(tokens) - 1]


def test_bos_is_added_where_the_model_wants_it(tmp_path):
    common = {
        "tokens": byte_level_vocab("ab", "<s>"),
        "token_type": [1] * 257 + [3],
        "merges": ["a b"],
        "bos_token_id": 257,
    }
    for pre, add, expected in (("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", True, True)):
        flag = {} if add is None else {"add_bos_token": add}
        tokenizer = gguf_tokenizer(tmp_path, model="gpt2", pre=pre, **common, **flag)
        assert (tokenizer.encode("a")[0] == 257) is expected
        assert 257 not in tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.bos_token_id == 257


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pre": "grok-9"}, r"pre-tokenizer 'grok-9' \(tokenizer\.ggml\.pre\) is not supported; known: gpt-2, smollm"),
        ({"model": "t5"}, r"tokenizer model 't5' is not supported in GGUF"),
        ({"merges": ["abc"]}, r"'abc' is not a pair"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"'a' appears twice"),
        ({"token_type": [1]}, r"token_type has 1 entries for 257 tokens"),
        ({"bos_token_id": 300}, r"bos_token_id 300 is outside the vocabulary"),
        ({"tokens": [1]}, r"tokens must be a list of str"),
    ],
)
def test_unusable_gguf_tokenizer_is_refused_by_name(tmp_path, metadata, message):
    good = {"model": "gpt2", "tokens": byte_level_vocab("<s>"), "token_type": [1] * 256 + [3], "merges": ["a b"]}
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(tmp_path, **(good | metadata))


def sentencepiece_metadata() -> dict:
    """A small vocabulary in which the better score must win over the longer or the earlier pair."""
    pieces = {
        "▁": -9.0,
        "a": -10.0,
        "b": -11.0,
        "c": -12.0,
        "▁a": -2.0,
        "ab": -1.0,
        "bc": -3.0,
        "abc": -4.0,
        "▁abc": -5.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "[INST]"]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_sentencepiece_vocabulary(tmp_path):
    tokenizer = gguf_tokenizer(tmp_path, **sentencepiece_metadata())
    tokens = sentencepiece_metadata()["tokens"]

    def pieces(text: str, **kwargs) -> list[str]:
        return [tokens[i] for i in tokenizer.encode(text, **kwargs)]

    assert tokenizer.kind == "pieces"
    assert pieces("ab") == ["<s>", "▁", "ab"]
    assert pieces("abc", add_special_tokens=False) == ["▁abc"]
    assert pieces("é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces("[INST]", add_special_tokens=False) == ["[INST]"]
    for text in ("abc é 🎉 abc", " a  b ", "\n", "[INST] a"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).replace("  ", " ").strip() == (
            text.replace("  ", " ").strip()
        )
    assert tokenizer.decode(tokenizer.encode("abc é 🎉")) == "abc é 🎉"


def test_a_piece_that_only_looks_like_a_byte_is_text(tmp_path):
    metadata = sentencepiece_metadata()
    metadata["tokens"][-2] = "<0xZZ>"
    tokenizer = gguf_tokenizer(tmp_path, **metadata)
    assert tokenizer.token_str(len(metadata["tokens"]) - 2) == "<0xZZ>"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_sentencepiece_without_space_prefix(tmp_path):
    tokenizer = gguf_tokenizer(tmp_path, **sentencepiece_metadata(), add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"
    assert len(tokenizer.encode("abc", add_special_tokens=False)) == 1 + 1 - (
        "abc" in sentencepiece_metadata()["tokens"]
    )


def test_tokenizer_of_a_converted_model_stands_alone(tmp_path, smollm2):
    jnp = pytest.importorskip("jax.numpy")
    with checkpoints.open_checkpoint(checkpoints.resolve_model("smollm2-135m")) as ckpt:
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        assets = {name: data for name in names if (data := ckpt.asset(name)) is not None}
        meta = {"config": ckpt.config, "generation_config": ckpt.generation_config}
    checkpoints.save_tree(tmp_path / "c", {"w": jnp.zeros(1)}, meta, assets)
    with checkpoints.open_checkpoint(tmp_path / "c") as ckpt:
        again = Tokenizer.from_checkpoint(ckpt)
    assert again.encode(TEXTS[0]) == smollm2.encode(TEXTS[0])
    assert again.chat_template == smollm2.chat_template
    assert again.eos_token_ids == smollm2.eos_token_ids


# --- Hugging Face folders


class FakeCheckpoint(checkpoints.Checkpoint):
    path = Path("fake")
    format = "safetensors"
    tensors = {}  # noqa: RUF012
    files = ()

    def __init__(self, config=None, generation_config=None, **assets):
        self.config, self.generation_config = config or {}, generation_config or {}
        self.assets = {name.replace("__", "."): value for name, value in assets.items()}

    def read(self, name, rows=None):
        raise NotImplementedError

    def asset(self, name):
        value = self.assets.get(name)
        return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()

    def fingerprint(self):
        return ""

    def close(self):
        pass


def backend(bos: bool = False, decoder=None) -> bytes:
    vocab = {token: i for i, token in enumerate(byte_level_vocab("<s>", "</s>", "<|eot|>"))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer.to_str().encode()


def test_eos_ids_are_the_union():
    config = {"eos_token": {"content": "<|eot|>"}, "bos_token": "<s>"}
    ckpt = FakeCheckpoint(
        {"eos_token_id": 257}, {"eos_token_id": [7, 257]}, tokenizer__json=backend(), tokenizer_config__json=config
    )
    tokenizer = Tokenizer.from_checkpoint(ckpt)
    assert tokenizer.eos_token_ids == (7, 257, 258)
    assert tokenizer.bos_token_id == 256
    assert tokenizer.special_ids == {256, 257, 258}


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_add_bos_token_overrules_where_transformers_lets_it(template, flag):
    config = {"bos_token": "<s>", "add_bos_token": flag}
    for name, wanted in (("LlamaTokenizerFast", flag), ("Qwen2TokenizerFast", template)):
        files = {"tokenizer__json": backend(template), "tokenizer_config__json": config | {"tokenizer_class": name}}
        tokenizer = Tokenizer.from_checkpoint(FakeCheckpoint(**files))
        assert tokenizer.encode("a").count(256) == wanted
        assert tokenizer.encode("a", add_special_tokens=False).count(256) == 0


def test_tokens_declared_in_the_config_alone_are_added():
    declared = {"259": {"content": "<tool>", "special": False}, "260": {"content": "<pad>", "special": True}}
    files = {"tokenizer__json": backend(), "tokenizer_config__json": {"added_tokens_decoder": declared}}
    tokenizer = Tokenizer.from_checkpoint(FakeCheckpoint(**files))
    assert tokenizer.encode("<tool><pad>") == [259, 260]
    assert tokenizer.vocab_size == 261
    assert tokenizer.decode([259, 260]) == "<tool>"
    files["tokenizer_config__json"] = {"added_tokens_decoder": {"400": {"content": "<far>"}}}
    with pytest.raises(TokenizerError, match=r"fake: tokenizer_config\.json gives '<far>' the id 400"):
        Tokenizer.from_checkpoint(FakeCheckpoint(**files))


def test_absent_and_broken_files_are_named():
    with pytest.raises(TokenizerError, match=r"fake: no tokenizer\.json"):
        Tokenizer.from_checkpoint(FakeCheckpoint())
    with pytest.raises(TokenizerError, match=r"fake: tokenizer\.json cannot be used"):
        Tokenizer.from_checkpoint(FakeCheckpoint(tokenizer__json=b"{}"))
    with pytest.raises(TokenizerError, match=r"fake: tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_checkpoint(FakeCheckpoint(tokenizer__json=backend(), tokenizer_config__json=b"{"))


def test_where_the_chat_template_comes_from():
    def template(**files) -> Tokenizer:
        return Tokenizer.from_checkpoint(FakeCheckpoint(tokenizer__json=backend(), **files))

    config = {"chat_template": "from config"}
    assert template().chat_template is None
    assert template(tokenizer_config__json=config).chat_template == "from config"
    assert (
        template(chat_template__json={"chat_template": "json"}, tokenizer_config__json=config).chat_template == "json"
    )
    assert template(chat_template__jinja=b"own", tokenizer_config__json=config).chat_template == "own"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = template(tokenizer_config__json={"chat_template": named})
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "tools"
    assert tokenizer.apply_chat_template([], chat_template="mine {{ bos_token }}", bos_token="B") == "mine B"
    with pytest.raises(ChatTemplateError, match="no chat template"):
        template().apply_chat_template([])


# --- chat templates


def render(source: str, messages=(), **variables) -> str:
    return ChatTemplate(source).render(list(messages), **variables)


MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Sure, "}]


def test_templates_render_as_in_transformers():
    loop = "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}|\n  {% endif %}\n{% endfor %}"
    assert render(loop, MESSAGES) == "Hi <b>|\n"
    assert render("{{ x | tojson }}", x={"ü": "<&'>"}) == '{"ü": "<&\'>"}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}{{ 1 }}{% endgeneration %}!") == "1!"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ tools is none }} {{ add_generation_prompt }}") == "True True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ nothing.here }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_fails_only_itself(source):
    with pytest.raises(ChatTemplateError, match="the chat template failed: .+"):
        render(source, MESSAGES)


def test_a_template_that_does_not_compile():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_continue_final_message():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(SIMPLE, MESSAGES, **options) == "<user>Hi <b></><assistant>Sure, "
    trimmed = SIMPLE.replace("m.content", "m.content | trim")
    assert render(trimmed, MESSAGES, **options) == "<user>Hi <b></><assistant>Sure,"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    assert render("{{ messages[0].content[0].text }}!", parts, **options) == "Well"
    for messages in ([], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": " "}]):
        with pytest.raises(ChatTemplateError, match="continue_final_message needs"):
            render(SIMPLE, messages, **options)
    with pytest.raises(ChatTemplateError, match="changes the last message"):
        render("{{ messages[0].content | upper }}", MESSAGES[1:], **options)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(SIMPLE, MESSAGES, continue_final_message=True)


def test_encoding_lets_other_threads_run(smollm2: Tokenizer) -> None:
    """A long text is tokenized without holding the interpreter: a server's other requests go on."""
    text = "x y " * 250_000
    worker = threading.Thread(target=smollm2.encode, args=(text,))
    longest, last = 0.0, time.perf_counter()
    worker.start()
    begun = last
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < max(0.5, (last - begun) / 2)
