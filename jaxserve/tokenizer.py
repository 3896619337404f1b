"""Text to token ids and back, through the ``tokenizers`` library and the files that came with the model."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

import tokenizers

import checkpoints
from jaxserve.chat_template import ChatTemplate, ChatTemplateError

__all__ = ["ChatTemplateError", "Tokenizer", "TokenizerError"]

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE = "\u2581"  # SentencePiece's visible space
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LEGACY_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Tokenizer classes for which add_bos_token and add_eos_token overrule the post-processor, as in transformers."""

Kind = Literal["bytes", "pieces", "other"]


class TokenizerError(ValueError):
    """The model has no tokenizer, or one that cannot be used."""


def tokenizer_file(ckpt: checkpoints.Checkpoint) -> bytes:
    """The file that a tokenizer is made from. Raises ``TokenizerError`` where there is none."""
    data = ckpt.asset("tokenizer.json")
    if data is None:
        raise TokenizerError(f"{ckpt.path}: no tokenizer.json; give prompts as token ids")
    return data


class Tokenizer:
    """Encodes prompts and decodes tokens. Immutable after construction; every method may be called from any thread."""

    eos_token_ids: tuple[int, ...]
    """Every token that ends a completion: those of generation_config, config and the tokenizer."""
    bos_token_id: int | None
    special_ids: frozenset[int]
    chat_template: str | None
    """The default template's source."""
    kind: Kind
    """How tokens become text: "bytes" (byte-level), "pieces" (SentencePiece) or "other" (the library's decoder)."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        """``config`` is the content of tokenizer_config.json; ``chat_templates`` maps names ("default", "tool_use")."""
        config = config or {}
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        _add_missing_tokens(backend, config)
        names = _special_names(config)
        added = backend.get_added_tokens_decoder()
        named_ids = {backend.token_to_id(token) for tokens in names.values() for token in tokens}
        self.special_ids = frozenset(
            {i for i, token in added.items() if token.special} | {i for i in named_ids if i is not None}
        )
        self._names = {key: tokens[0] for key, tokens in names.items() if key in _NAMED}
        own_eos = backend.token_to_id(self._names["eos_token"]) if "eos_token" in self._names else None
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own_eos is None else [own_eos])]))
        own_bos = backend.token_to_id(self._names["bos_token"]) if "bos_token" in self._names else None
        self.bos_token_id = bos_token_id if own_bos is None else own_bos
        self._templates = dict(chat_templates or {})
        self.chat_template = self._templates.get("default")
        self._compiled: dict[str, ChatTemplate] = {}
        self._bos_rule, self._eos_rule = _affixes(backend, config, self.bos_token_id, own_eos)
        self.kind, self.strips_first_space, has_bytes = _decoder_kind(backend)
        self._bytes = _TokenBytes(backend, self.kind, has_bytes)

    @classmethod
    def from_checkpoint(cls, ckpt: checkpoints.Checkpoint) -> "Tokenizer":
        """The tokenizer beside the weights (or inside the GGUF file).

        Raises:
            TokenizerError: there is none, or its files are broken.
        """
        data = tokenizer_file(ckpt)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{ckpt.path}: tokenizer.json cannot be used: {error}") from error
        config = _json_asset(ckpt, "tokenizer_config.json")
        for key, value in _json_asset(ckpt, "special_tokens_map.json").items():
            config.setdefault(key, value)
        bos = next(
            (c["bos_token_id"] for c in (ckpt.generation_config, ckpt.config) if _is_id(c.get("bos_token_id"))), None
        )
        try:
            return cls(
                backend,
                config=config,
                eos_token_ids=[
                    *_ids(ckpt.generation_config),
                    *_ids(ckpt.config),
                    *_ids(ckpt.config.get("text_config")),
                ],
                bos_token_id=bos,
                chat_templates=_chat_templates(ckpt, config),
            )
        except TokenizerError as error:
            raise TokenizerError(f"{ckpt.path}: {error}") from error

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's own vocabulary may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written out in it count as such.

        ``add_special_tokens`` adds bos and eos where the model wants them.
        """
        # A batch of one: unlike encode, it lets other Python threads run, and it skips the offsets nobody asks for.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens:
            return ids
        for rule, at in ((self._bos_rule, 0), (self._eos_rule, -1)):
            if rule is None:
                continue
            token, wanted = rule
            present = bool(ids) and ids[at] == token
            if wanted and not present:
                ids.insert(0 if at == 0 else len(ids), token)
            elif present and not wanted:
                del ids[at]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 come out as U+FFFD, ids without a token as nothing."""
        if self.kind == "other":
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        text = self.join_bytes(ids, skip_special_tokens).decode(errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def join_bytes(self, ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes of ``ids``, one after the other, the first space not stripped."""
        found = self._bytes
        if skip_special_tokens:
            special = self.special_ids
            return b"".join([found[i] for i in ids if i not in special])
        return b"".join([found[i] for i in ids])

    def token_id(self, token: str) -> int | None:
        """The id of the token that the vocabulary spells ``token``, added ones too; None where there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to the text; empty where there is no such token."""
        return self._bytes[id]

    def token_str(self, id: int) -> str:
        """One token alone as text, special ones too; U+FFFD where it is part of a character."""
        return self.token_bytes(id).decode(errors="replace")

    @property
    def tool_template(self) -> str | None:
        """Source of the template for conversations with tools."""
        return self._templates.get("tool_use", self.chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with ``add_special_tokens=False``: the template writes them out.

        Raises:
            ChatTemplateError: there is no template, it fails, or it refuses the messages.
        """
        source = chat_template
        if source is None:
            source = self.tool_template if tools else self.chat_template
        if source is None:
            names = ", ".join(self._templates)
            hint = f" (only named ones: {names})" if names else ""
            raise ChatTemplateError(f"the model has no chat template{hint}; pass one, or use plain prompts")
        template = self._compiled.get(source)
        if template is None:
            template = ChatTemplate(source)
            if chat_template is None:
                self._compiled[source] = template
        return template.render(
            messages,
            **{
                **self._names,
                "documents": None,
                **kwargs,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            },
        )


def _is_id(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _ids(config: Mapping[str, Any] | None) -> list[int]:
    value = (config or {}).get("eos_token_id")
    return [i for i in (value if isinstance(value, list) else [value]) if _is_id(i)]


def _json_asset(ckpt: checkpoints.Checkpoint, name: str) -> dict[str, Any]:
    data = ckpt.asset(name)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"{ckpt.path}: {name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{ckpt.path}: {name} must hold a JSON object")
    return value


def _chat_templates(ckpt: checkpoints.Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of its own (chat_template.jinja, then chat_template.json) overrules tokenizer_config.json."""
    value: Any = config.get("chat_template")
    own = ckpt.asset("chat_template.jinja")
    if own is not None:
        value = own.decode(errors="replace")
    elif (document := _json_asset(ckpt, "chat_template.json")).get("chat_template"):
        value = document["chat_template"]
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    items = value.items() if isinstance(value, dict) else [(e.get("name"), e.get("template")) for e in value]
    return {name: source for name, source in items if isinstance(name, str) and isinstance(source, str)}


def _content(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _special_names(config: Mapping[str, Any]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for key in (*_NAMED, "additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        if isinstance(value, Mapping) and "content" not in value:
            value = list(value.values())
        tokens = [_content(t) for t in (value if isinstance(value, list) else [value])]
        if found := [t for t in tokens if t is not None]:
            names[key] = found
    return names


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json does not hold."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        content, token_id = _content(entry), int(key)
        if content is None or token_id in known:
            continue
        token = tokenizers.AddedToken(
            content,
            special=bool(entry.get("special", False)),
            normalized=bool(entry.get("normalized", False)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
            single_word=bool(entry.get("single_word", False)),
        )
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(content) != token_id:
            message = f"tokenizer_config.json gives {content!r} the id {token_id}; tokenizer.json leaves no room for it"
            raise TokenizerError(message)


Rule = tuple[int, bool] | None


def _affixes(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[Rule, Rule]:
    """(token, whether it must be there) at the front and at the end, where tokenizer_config.json overrules."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name not in _LEGACY_CLASSES:
        return None, None
    rules: list[Rule] = []
    for key, token in (("add_bos_token", bos), ("add_eos_token", eos)):
        wanted = config.get(key)
        rules.append((token, wanted) if isinstance(wanted, bool) and token is not None else None)
    return rules[0], rules[1]


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[Kind, bool, bool]:
    """How the library would decode, whether the first space of a text is dropped, whether <0xXX> tokens are bytes."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", False, False
    if kinds == ["Metaspace"]:
        step = steps[0]
        if step.get("replacement", _SPACE) == _SPACE:
            return "pieces", step.get("prepend_scheme", "always") != "never", False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        replaces = steps[0].get("pattern") == {"String": _SPACE} and steps[0].get("content") == " "
        strips = steps[3:]
        one_space = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        if replaces and strips in ([], one_space):
            return "pieces", bool(strips), True
    return "other", False, False


class _TokenBytes(dict[int, bytes]):
    """What tokens add to a text, by id: found when first asked for, nothing where there is no such token."""

    def __init__(self, backend: tokenizers.Tokenizer, kind: Kind, has_bytes: bool):
        super().__init__()
        self._backend, self._kind, self._has_bytes = backend, kind, has_bytes
        self.update((i, token.content.encode()) for i, token in backend.get_added_tokens_decoder().items())

    def __missing__(self, id: int) -> bytes:
        token = self._backend.id_to_token(id) if 0 <= id < _MOST_IDS else None
        if token is None:
            return b""
        self[id] = found = self._convert(token)
        return found

    def _convert(self, token: str) -> bytes:
        if self._kind == "bytes":
            try:
                return token.translate(_BYTE_OF).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if self._has_bytes and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte: itself where it is visible, else the next one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


_BYTE_OF = {ord(char): byte for byte, char in _byte_alphabet().items()}
_MOST_IDS = 1 << 32
