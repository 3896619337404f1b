"""``jaxserve detect``: were these texts marked? Needs no accelerator, and imports no jax."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.commands.common import MODEL_HELP, UsageError
from jaxserve.config import EngineConfig
from jaxserve.watermark import Detection, Scheme, default_streams, detect_many
from jaxserve.watermark.config import WatermarkConfig, WatermarkConfigError
from jaxserve.watermark.detect import LEAST_STREAMS, MIN_SCORED_TOKENS
from jaxserve.watermark.prf import KEY_BITS
from jaxserve.watermark.statistics import STATISTICS


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells for each document whether it was marked with one of the keys, and how likely chance alone does as well. "
        "p-values are corrected for the number of keys, streams and statistics that are tried."
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="a document each; a .jsonl file has one a line: a string, a list of token ids, or an object with "
        '"text" or "token_ids"; a .json file may be one list of token ids. Standard input where none is given',
    )
    parser.add_argument("--model", default=EngineConfig.model, help=f"whose tokenizer reads texts: {MODEL_HELP}")
    parser.add_argument("--json", action="store_true", help="a JSON object for each document, a line each")
    marks = parser.add_argument_group("the mark")
    marks.add_argument(
        "--watermark-config", metavar="FILE", help="what serve was given: JSON, or a file of JSON. Or a key of its own:"
    )
    marks.add_argument("--key-file", metavar="FILE", help="a file with one key")
    marks.add_argument("--context-width", type=int, metavar="N", help="tokens a context has; 4 by default")
    marks.add_argument("--alpha", type=float, metavar="SHARE", help="the second half's share where the key is dual")
    marks.add_argument("--prf", metavar="NAME", help=f"one of {', '.join(KEY_BITS)}; the first by default")
    marks.add_argument("--key-id", action="append", metavar="ID", help="try only this key; may be given several times")
    how = parser.add_argument_group("detection")
    how.add_argument(
        "--streams",
        type=int,
        metavar="N",
        help=f"keys that each key is spread over; the configuration's by default, and {LEAST_STREAMS} at least",
    )
    how.add_argument("--statistic", choices=STATISTICS, default="sum", help="likelihood is for text that was edited")
    how.add_argument("--threshold", type=float, default=0.01, metavar="P", help="p-value; 0.01 by default")
    how.add_argument(
        "--min-scored-tokens",
        type=int,
        default=MIN_SCORED_TOKENS,
        metavar="N",
        help=f"evidence that a verdict needs; {MIN_SCORED_TOKENS} by default",
    )
    how.add_argument("--no-dedup", action="store_true", help="score repeated contexts too: p-values then mean nothing")
    how.add_argument("--spans", action="store_true", help="which stretches of a document are marked")
    how.add_argument("--tokens", action="store_true", help="every token with its score, as JSON")
    parser.set_defaults(command=run, kinds=())


def run(parsed: argparse.Namespace) -> int:
    config, schemes = _schemes(parsed)
    config.warn()
    documents = _documents(parsed)
    reader = _Reader(parsed.model)
    try:
        ids = [reader.ids(document, name) for name, document in documents]
        found = detect_many(
            ids,
            schemes,
            streams=default_streams(config) if parsed.streams is None else parsed.streams,
            statistic=parsed.statistic,
            dedup=not parsed.no_dedup,
            threshold=parsed.threshold,
            min_scored_tokens=parsed.min_scored_tokens,
            token_scores=parsed.tokens,
            spans=parsed.spans,
        )
    except ValueError as error:
        if type(error) is not ValueError:  # the tokenizer cannot be read
            raise
        raise UsageError(f"{_as_option(str(error))}") from None
    for (name, _), tokens, one in zip(documents, ids, found, strict=True):
        if parsed.json or parsed.tokens:
            print(json.dumps({"document": name} | _facts(one, tokens, reader), ensure_ascii=False))
        else:
            print("\n".join(_lines(name, one, tokens, reader)))
    return 0


def _as_option(message: str) -> str:
    """The message with the field that it begins with spelled as the option is."""
    field, space, rest = message.partition(" ")
    known = ("streams", "threshold", "min_scored_tokens", "statistic")
    return f"--{field.replace('_', '-')}{space}{rest}" if field in known else message


def _schemes(parsed: argparse.Namespace) -> tuple[WatermarkConfig, list[Scheme]]:
    """What to try. Raises UsageError."""
    own = {"context_width": parsed.context_width, "alpha": parsed.alpha, "prf": parsed.prf}
    own = {name: value for name, value in own.items() if value is not None}
    if (parsed.watermark_config is None) == (parsed.key_file is None):
        raise UsageError("give --watermark-config or --key-file, and not both")
    if parsed.watermark_config is not None and own:
        raise UsageError(f"--{min(own).replace('_', '-')} goes with --key-file: --watermark-config has its own")
    try:
        if parsed.watermark_config is not None:
            config = WatermarkConfig.read(parsed.watermark_config)
        else:
            dual = {"algorithm": "dual_key_gumbel"} if parsed.alpha is not None else {}
            config = WatermarkConfig.read({"key_file": parsed.key_file} | own | dual)
    except WatermarkConfigError as error:
        option = "--watermark-config" if parsed.key_file is None else "--key-file"
        raise UsageError(f"{option}: {error}") from None
    try:
        return config, Scheme.of(config, parsed.key_id)
    except ValueError as error:
        raise UsageError(f"--key-id: {error}") from None


# -- documents --------------------------------------------------------------------------------------------------------


def _documents(parsed: argparse.Namespace) -> list[tuple[str, Any]]:
    """Names and contents: texts, or lists of token ids. Raises UsageError."""
    if not parsed.files:
        try:
            return [("standard input", sys.stdin.read())]
        except UnicodeDecodeError:
            raise UsageError("standard input is not UTF-8 text") from None
    found: list[tuple[str, Any]] = []
    for path in parsed.files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None
        if path.suffix != ".jsonl":
            found.append((str(path), _listed(text) or text if path.suffix == ".json" else text))
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                found.append((f"{path}:{number}", _entry(line, f"{path}:{number}")))
    return found


def _listed(text: str) -> list[int] | None:
    """The token ids of a JSON file that is a list of such; of all other JSON None: it may be what a model wrote."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and set(map(type, value)) == {int} else None


def _entry(line: str, name: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from None
    if isinstance(value, dict):
        value = value.get("token_ids", value.get("text"))
    if not isinstance(value, str | list):
        raise UsageError(f'{name} has neither a "text" nor "token_ids"')
    return value


class _Reader:
    """The model's tokenizer, read when it is first needed: token ids need none."""

    def __init__(self, model: str):
        self._model = model
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            import checkpoints
            from jaxserve.tokenizer import Tokenizer

            path = checkpoints.resolve_model(self._model)
            self._tokenizer = Tokenizer.from_checkpoint(checkpoints.open_checkpoint(path))
        return self._tokenizer

    def ids(self, document: Any, name: str) -> Any:
        from jaxserve.watermark.detect import encode
        from jaxserve.watermark.evidence import as_ids

        try:
            return encode(document, self.tokenizer) if isinstance(document, str) else as_ids(document)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise UsageError(f"{name}: {error}") from None

    def text(self, ids: Any) -> str | None:
        """None where no text was read, and there may be no tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode([int(token) for token in ids])


# -- what is told -----------------------------------------------------------------------------------------------------


def _facts(one: Detection, ids: Any, reader: _Reader) -> dict[str, Any]:
    told = dataclasses.asdict(one)
    told["key"] = told.pop("key_name")
    scores, spans = told.pop("token_scores"), told.pop("spans")
    if scores is not None:
        told["tokens"] = [
            {"id": int(token), "score": score}
            | ({} if reader.text([]) is None else {"text": reader.tokenizer.token_str(int(token))})
            for token, score in zip(ids, scores, strict=True)
        ]
    if spans is not None:
        told["spans"] = [
            {name: value for name, value in span.items() if name != "key_name"}
            | {"key": span["key_name"], "text": reader.text(ids[span["start"] : span["end"]])}
            for span in spans
        ]
    return told


def _lines(name: str, one: Detection, ids: Any, reader: _Reader) -> list[str]:
    streams = "1 stream" if one.num_streams == 1 else f"{one.num_streams} streams"
    none = f"no mark found in {streams} of each key"
    verdict = "marked" if one.is_watermarked else none if one.enough_evidence else "too short to tell"
    which = f" with key {one.key_name}" if one.is_watermarked else ""
    which += f", completion {one.stream}" if one.is_watermarked and one.stream else ""
    p_value = f"{one.p_value:.3g}" if one.p_value > 1e-300 else f"1e{one.log10_p_value:.0f}"
    counted = f"{one.num_scored_tokens} of {one.num_tokens} tokens counted"
    lines = [f"{name}: {verdict}{which} (p = {p_value}, {counted})"]
    for span in one.spans or ():
        text = reader.text(ids[span.start : span.end])
        shown = "" if text is None else f": {' '.join(text.split())[:100]}"
        lines.append(f"  tokens {span.start} to {span.end}, key {span.key_name} (p = {span.p_value:.3g}){shown}")
    return lines
