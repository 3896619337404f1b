"""Languages that completions are held to: from ``StructuredOutputs`` to a matcher that says which tokens may follow.

The matching is llguidance's (https://github.com/guidance-ai/llguidance): an Earley parser over derivatives of regular
expressions, walking the vocabulary's trie. Here is what surrounds it: reading the request, limits, a cache of compiled
grammars, the tokenizer in its form, and the end of a text. Imports no jax.
"""

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from jaxserve.batch import pack_bits
from jaxserve.constraint import Constraint, Mask
from jaxserve.json_schema import MAX_PATTERNS, Schema
from jaxserve.request import OwnFault, RequestError, StructuredOutputs
from jaxserve.schema_reader import SchemaError
from jaxserve.tokenizer import Tokenizer

MAX_BYTES = 256 * 1024
"""Longest schema, regular expression, list of choices or grammar, as text."""
CACHED = 256
"""Compiled grammars that are kept."""
WHITESPACE = r"[ ]|\n[ \t]{0,32}"
"""Where JSON allows whitespace: nothing, a space, or a line break with an indentation. So no answer is mostly blank."""
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrbtf\\"',  # no \uXXXX: no name can be written in two ways
    "lenient": False,
    "coerce_one_of": False,
}
STACK_BYTES = 256 << 20
"""Of the thread that compiles. The compiler recurses as deep as a grammar's rules are chained: under the usual 8 MiB,
four thousand of them end the process."""
PROBED = 2
"""Tokens that a new grammar is followed for, so that one too wide to begin with is refused."""
_LIMITS = llguidance.LLParserLimits(max_items_in_row=1000, step_max_items=20_000, verbose_errors=False)
"""Bounds of one step. Taking in a token holds the interpreter's lock, 13 ms at the worst that was found under these."""


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: list[int]):
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        special = {i for i in tokenizer.special_ids if i < size} | {i for i in eos_ids if i < size}
        if not eos_ids:  # a token past the vocabulary, which is never chosen
            self.tokens.append(b"<end>")
            special.add(size)
            eos_ids = [size]
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted(special)
        names = [re.escape(self.tokens[i].decode(errors="replace")) for i in self.special_token_ids]
        self._special = re.compile("|".join(sorted((name for name in names if name), key=len, reverse=True)) or "(?!)")
        self.eos_ids = eos_ids
        self._ids: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that the grammar forces, exactly its bytes.

        What is spelled like a special token is text there, so it is cut. Tokenizers that begin every text with a space
        do not spell it; then the longest tokens are taken that do.
        """
        text = text if isinstance(text, str) else text.decode(errors="replace")
        cuts = [0, *(match.start() + 1 for match in self._special.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]
        ids = [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)]
        wanted = text.encode()
        return ids if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == wanted else self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
            self._longest = max(map(len, self._ids), default=0)
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


class Grammars:
    """Compiles grammars for one model, and keeps them. Every method may be called from any thread.

    ``vocab_size`` is the model's; ``eos_ids`` end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]):
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._compiling = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._words: llguidance.LLTokenizer | None = None
        self._text = self._legal = np.zeros(0, np.uint32)
        self._bytes = 0

    def compile(self, wish: StructuredOutputs) -> "Grammar":
        """The grammar of a wish. Raises ``RequestError`` naming field, path and keyword.

        Takes milliseconds to a few hundred for the largest, on one thread at a time, mostly without the interpreter's
        lock.
        """
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, which this model has not", param=_FIELD)
        if self._tokenizer.kind == "other":
            message = "structured_outputs: this model's tokenizer does not say which bytes its tokens stand for"
            raise RequestError(message, param=_FIELD)
        name = wish.kind
        param = f"{_FIELD}.{name}"
        try:
            text, schema = _source(wish, name)
        except SchemaError as error:
            raise RequestError(f"{param}: {error}", param=param) from None
        if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
            raise RequestError(f"{param} is longer than {MAX_BYTES} bytes", param=param)
        key = ("json" if schema is not None else name, text)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{param} holds a lone surrogate, which is no text", param=param) from None
        with self._compiling:
            grammar = _on_a_deep_stack(lambda: self._compile(name, text, schema, param))
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > CACHED:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, name: str, text: str, schema: Schema | None, param: str) -> "Grammar":
        words = self._vocabulary()
        if schema is not None:
            source = _json_grammar(schema.document)
        elif name == "grammar":
            source = llguidance.LLMatcher.grammar_from_lark(self._lark(text, param))
        else:
            pattern = text if name == "regex" else _choices(json.loads(text))
            source = llguidance.LLMatcher.grammar_from_regex(pattern)
        matcher = llguidance.LLMatcher(words, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise self._refusal(matcher.get_error(), schema, param)
        grammar = Grammar(self, matcher)
        if grammar.first.error is not None or grammar.first.complete:
            raise RequestError(f"{param}: no text belongs to it, or the empty one alone", param=param)
        place = grammar.start()
        for _ in range(PROBED):
            if place.mask is None or place.mask.complete:
                break
            open_words = place.mask.words & self._text
            word = int(np.flatnonzero(open_words)[0])
            place.mask = place.matcher.advance(
                word * 32 + (int(open_words[word]) & -int(open_words[word])).bit_length() - 1
            )
            if place.mask.error is not None:
                raise RequestError(f"{param}: {place.mask.error}", param=param)
        return grammar

    def _refusal(self, complaint: str, schema: Schema | None, param: str) -> RequestError:
        if schema is None:
            text = complaint.strip() if len(complaint) < 400 else complaint[:400] + "..."
            return RequestError(f"{param} cannot be enforced: {text}", param=param)

        def validate(part: Mapping[str, Any]) -> str:
            return llguidance.LLMatcher.validate_grammar(_json_grammar(part), self._vocabulary(), limits=_LIMITS)

        return RequestError(f"{param}: {schema.blame(complaint, validate)}", param=param)

    def _lark(self, text: str, param: str) -> str:
        """The grammar with its JSON schemas checked, and tokens that are not "special" named by their ids."""
        out, at = [], 0
        for match in _LARK.finditer(text):
            if match.start() < at:
                continue  # within a schema
            found = match.group()
            if found.startswith("%json"):
                try:
                    given, end = json.JSONDecoder().raw_decode(text, match.end())
                except (ValueError, RecursionError):
                    raise RequestError(f"{param}: what follows %json is not valid JSON", param=param) from None
                try:
                    document = Schema.read(given).document
                except SchemaError as error:
                    raise RequestError(f"{param}: %json: {error}", param=param) from None
                out += [text[at : match.end()], json.dumps({"x-guidance": JSON_OPTIONS, **document})]
                at = end
            elif found.startswith("<"):
                out += [text[at : match.start()], self._token(found)]
                at = match.end()
            elif found.startswith("["):
                for option in ("stop", "temperature"):
                    if re.search(rf"\b{option}\s*=", re.sub(r'"(?:\\.|[^"\\])*"', "", found)):
                        hint = "; use lazy or suffix" if option == "stop" else ""
                        raise RequestError(f"{param}: the option {option!r} is not supported{hint}", param=param)
        made = "".join([*out, text[at:]])
        if _LARK.sub("", made).count("&") > MAX_PATTERNS:
            raise RequestError(f"{param}: more than {MAX_PATTERNS} intersections (&) are not supported", param=param)
        return made

    def _token(self, name: str) -> str:
        """A token by its id where the tokenizer knows it, whether it calls it special or not.

        ``<|im_end|>`` is the token of that name, ``<[TOOL_CALLS]>`` is ``[TOOL_CALLS]``, ``<[7]>`` stays.
        """
        assert self._tokenizer is not None
        names = (name[1:-1], name) if name.startswith("<[") else (name,)
        ids = [token for token in map(self._tokenizer.token_id, names) if token is not None]
        return f"<[{ids[0]}]>" if ids and ids[0] < self.vocab_size else name

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """Made for the first grammar: a tenth of a second for 49,000 tokens."""
        if self._words is None:
            assert self._tokenizer is not None
            vocabulary: Any = _Vocabulary(self._tokenizer, self.vocab_size, self._eos_ids)
            self._words = llguidance.LLTokenizer(
                vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids
            )
            text = np.ones(self.vocab_size, bool)
            text[self._eos_ids] = False
            self._text, self._legal = pack_bits(text), pack_bits(np.ones(self.vocab_size, bool))
            self._bytes = -(-len(vocabulary.tokens) // 32) * 4
        return self._words

    def mask(self, matcher: llguidance.LLMatcher) -> Mask:
        """What may follow where ``matcher`` stands."""
        buffer = np.zeros(self._bytes // 4, np.uint32)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        if matcher.is_error():
            complaint = matcher.get_error()[:200]
            return Mask(buffer, error=OwnFault(f"the grammar became too complex to follow: {complaint}"))
        words = buffer[: len(self._legal)]
        words &= self._legal
        if (words & self._text).any():
            return Mask(words)
        if matcher.is_accepting():
            return Mask(words, complete=True)
        return Mask(words, error=OwnFault("the grammar leads to where no token of the vocabulary can follow"))


class Grammar:
    """A compiled grammar, from which any number of sequences may start."""

    def __init__(self, grammars: Grammars, matcher: llguidance.LLMatcher):
        self._grammars, self._matcher = grammars, matcher
        self._lock = threading.Lock()
        self.first = grammars.mask(matcher)
        self.first.words.flags.writeable = False

    def start(self) -> Constraint:
        """A sequence's own place, at the beginning."""
        with self._lock:
            return Constraint(_Place(self._grammars, self._matcher.deep_copy()), self.first)


@dataclass(slots=True)
class _Place:
    """``constraint.Matcher`` over one matcher of llguidance."""

    grammars: Grammars
    matcher: llguidance.LLMatcher

    def advance(self, token: int) -> Mask:
        self.matcher.consume_token(token)
        return self.grammars.mask(self.matcher)


def _on_a_deep_stack[T](work: Callable[[], T]) -> T:
    """Run ``work`` on a thread of its own with ``STACK_BYTES`` of stack (reserved, and filled only as it is used)."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, "jaxserve-grammar") as thread:
            return thread.submit(work).result()
    finally:
        threading.stack_size(usual)


_FIELD = "structured_outputs"
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\b\s*|<[^<>\s]+>|(?<=\w)\[(?:"(?:\\.|[^"\\\n])*"|[^\]"\n])*\](?=\s*:)'
)
"""What a Lark grammar is read for: strings, comments and expressions (to be passed over), schemas, tokens, options."""


def _source(wish: StructuredOutputs, name: str) -> tuple[str, Schema | None]:
    """The wish as canonical text; for the JSON kinds, the schema too."""
    if name == "json" or name == "json_object":
        schema = Schema.read({"type": "object"} if name == "json_object" else wish.json)  # type: ignore[arg-type]
        return schema.canonical(), schema
    if name == "choice":
        return json.dumps(wish.choice, ensure_ascii=False), None
    return getattr(wish, name), None


def _json_grammar(schema: Mapping[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _choices(choices: list[str]) -> str:
    """A regular expression: the parser has no room for thousands of alternatives, the lexer has."""
    return "|".join(re.sub(r"[^\w\s]", lambda char: f"\\x{{{ord(char.group()):x}}}", choice) for choice in choices)
