"""``jaxserve generate``: prompts from the command line, a file or standard input, without a server."""

import argparse
import json
import queue
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from jaxserve.commands.common import UsageError, add_model, check_engine, load
from jaxserve.config import EngineConfig
from jaxserve.options import add_options, given
from jaxserve.request import CompletionOutput, Delta, EngineDeadError, RequestError, RequestOutput, SamplingParams

MAX_TOKENS = 256
"""What ``generate`` takes for ``--max-tokens``: sixteen, as in the API, is little to read."""
WINDOW = 1024
"""Sequences that ``generate`` keeps in the engine at once."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "One prompt is streamed to the terminal; several give JSON lines, in order, and a progress bar."
    )
    add_model(parser)
    prompts = parser.add_argument_group("prompts (standard input where none is given)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a prompt a line; in a .jsonl file a string, a list of token ids, a list of messages, or an object with "
        '"prompt" or "messages"',
    )
    prompts.add_argument("--chat", action="append", default=[], metavar="TEXT", help="a user's message to answer")
    prompts.add_argument("--system", metavar="TEXT", help="system message for every --chat")
    prompts.add_argument("--json", action="store_true", help="JSON lines for a single prompt too")
    prompts.add_argument("--output", type=Path, metavar="FILE", help="write there instead of to standard output")
    add_options(parser, SamplingParams, title="sampling", defaults={"max_tokens": MAX_TOKENS})
    flags = {"seed": ("--engine-seed",)}
    add_options(parser, EngineConfig, title="engine", skip=("model", "served_name"), flags=flags)
    parser.set_defaults(command=run, kinds=(SamplingParams, EngineConfig))


def run(parsed: argparse.Namespace) -> int:
    check_engine(parsed)
    try:
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, **given(parsed, SamplingParams)})
    except RequestError as error:
        raise UsageError(error) from None
    prompts = _prompts(parsed)
    try:
        output = open(parsed.output, "w", encoding="utf-8") if parsed.output else nullcontext(sys.stdout)  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--output {parsed.output}: {error.strerror}") from None
    words = not any(map(_is_ids, prompts))  # of several, those in words are refused one by one
    with output as out, load(parsed, needs_tokenizer=words) as llm:
        if len(prompts) == 1 and params.n == 1 and not parsed.json:
            for delta in llm.stream(prompts[0], params):
                if delta.error is not None:
                    raise EngineDeadError(delta.error)
                print(delta.text, end="", file=out, flush=True)
            print(file=out)
            return 0
        return _generate_many(llm, prompts, params, out)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], dict)


def _prompts(parsed: argparse.Namespace) -> list[Any]:
    """All prompts: strings, lists of token ids, or lists of messages. Raises UsageError."""
    found: list[Any] = list(parsed.prompt)
    if parsed.prompts_file is not None:
        found += _read_prompts(parsed.prompts_file)
    if parsed.system is not None and not parsed.chat:
        raise UsageError("--system goes with --chat")
    system = [] if parsed.system is None else [{"role": "system", "content": parsed.system}]
    found += [[*system, {"role": "user", "content": text}] for text in parsed.chat]
    if not found and parsed.prompts_file is None and not sys.stdin.isatty():
        text = sys.stdin.read().removesuffix("\n")
        found += [text] if text else []
    if not found:
        raise UsageError("no prompt: give --prompt, --chat or --prompts-file, or write to standard input")
    return found


def _read_prompts(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts-file {path}: {getattr(error, 'strerror', None) or error}") from None
    lines = [line for line in lines if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--prompts-file {path}: prompt {number} is not valid JSON: {error}") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not isinstance(value, str | list) or not value:
            raise UsageError(f'--prompts-file {path}: prompt {number} has neither a "prompt" nor "messages"')
        found.append(value)
    return found


@dataclass
class _Work:
    """One of many prompts on its way."""

    output: RequestOutput
    done: bool = False

    def line(self, index: int) -> str:
        output = self.output
        shown: dict[str, Any] = {"index": index}
        if output.prompt is not None:
            shown["prompt"] = output.prompt
        if output.error is not None:
            shown["error"] = output.error
        shown["outputs"] = [
            {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
            | ({} if one.logprobs is None else {"logprobs": [entry.logprob for entry in one.logprobs]})
            for one in output.outputs
        ]
        return json.dumps(shown, ensure_ascii=False)


def _generate_many(llm: Any, prompts: list[Any], params: SamplingParams, out: TextIO) -> int:
    """Write a JSON line for each prompt, in order. A prompt that is refused gets a line with "error"; status 1 then."""
    arrived: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
    work: list[_Work] = []
    window = max(1, WINDOW // params.n)
    from jaxserve.progress import Progress

    written = running = failed = 0
    with Progress() as bars:
        advance = bars.bar("prompts")
        while written < len(prompts):
            while len(work) < len(prompts) and running < window:
                running += _start(llm, prompts[len(work)], params, work, arrived)
            while written < len(work) and work[written].done:
                print(work[written].line(written), file=out, flush=True)
                failed += work[written].output.error is not None
                written += 1
                advance(written, len(prompts))
            if running:
                index, delta = arrived.get()
                work[index].output.add(delta)
                if delta.request_done:
                    work[index].done = True
                    running -= 1
    if failed:
        print(f"jaxserve: error: {failed} of {len(prompts)} prompts failed; their lines say why", file=sys.stderr)
    return 1 if failed else 0


def _start(
    llm: Any,
    prompt: Any,
    params: SamplingParams,
    work: list[_Work],
    arrived: queue.SimpleQueue[tuple[int, Delta]],
) -> bool:
    """Submit the next prompt; False where it was refused."""
    text = prompt if isinstance(prompt, str) else None
    item = _Work(RequestOutput("", text, [], [CompletionOutput(i) for i in range(params.n)]))
    index = len(work)
    work.append(item)
    try:
        llm.submit(prompt, params, on_delta=lambda delta: arrived.put((index, delta)))
    except ValueError as error:
        item.output.error, item.done = str(error), True
        return False
    return True
