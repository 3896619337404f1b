"""The command line: ``jaxserve serve``, ``generate`` and ``convert``. Options come from the dataclasses' fields."""

import argparse
import errno
import json
import logging
import os
import queue
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from jaxserve import __version__
from jaxserve.commands import detect
from jaxserve.commands.common import UsageError
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.options import Parser, add_options, as_flags, given
from jaxserve.progress import Progress
from jaxserve.request import (
    CompletionOutput,
    Delta,
    EngineDeadError,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
)

log = logging.getLogger(__name__)

MODEL_HELP = "a Hugging Face folder, a .gguf file, a converted folder, or smollm2-135m"
MAX_TOKENS = 256
"""What ``generate`` takes for ``--max-tokens``: sixteen, as in the API, is little to read."""
WINDOW = 1024
"""Sequences that ``generate`` keeps in the engine at once."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of the user's making are one line, without a traceback."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("jaxserve", "serve"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        return parsed.command(parsed)
    except (UsageError, ConfigError) as error:
        return _fail(error, 2, parsed.kinds)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (keeps the interpreter from flushing into the pipe again)
        return 1
    except (RequestError, QueueFullError, EngineDeadError, OSError) as error:
        return _fail(error, 1)
    except ValueError as error:
        if type(error) is ValueError:  # not one of our named errors (CheckpointError, TokenizerError): a bug
            raise
        return _fail(error, 1)


def _fail(error: BaseException, status: int, kinds: Sequence[type] = ()) -> int:
    text = as_flags(" ".join(str(error).split()), *kinds)
    print(f"jaxserve: error: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxserve", description="An LLM inference engine in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_generate(commands)
    _add_convert(commands)
    detect.add(commands.add_parser("detect", help="tell whether texts were marked"))
    return parser


def _check_engine(parsed: argparse.Namespace) -> None:
    """Raise ConfigError or UsageError before anything is loaded."""
    config = EngineConfig.from_options(parsed.model, given(parsed, EngineConfig))
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
        if not os.access(config.cache_path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"--cache-dir {config.cache_path}: {error.strerror}") from None


# -- serve ------------------------------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    from serve.options import ServerOptions

    parser = commands.add_parser("serve", help="serve a model by an OpenAI-style HTTP API")
    parser.add_argument("model", nargs="?", default=EngineConfig.model, help=MODEL_HELP)
    add_options(parser, ServerOptions, title="server")
    names = {"served_name": ("--served-model-name", "--served-name")}
    add_options(parser, EngineConfig, title="engine", skip=("model",), flags=names)
    parser.set_defaults(command=_serve, kinds=(ServerOptions, EngineConfig))


def _serve(parsed: argparse.Namespace) -> int:
    _check_engine(parsed)
    import serve

    try:
        chosen = given(parsed, serve.ServerOptions)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()
        }
        options = serve.ServerOptions(**fields)
        bound = serve.bind(options)  # before the model is loaded: a port in use is known at once
    except ValueError as error:
        raise UsageError(error) from None
    ended = serve.run(lambda on_phase: _load(parsed, on_phase=on_phase), options, bound=bound)
    if not ended.clean:  # threads are left that may never come back
        logging.shutdown()
        sys.stdout.flush()
        os._exit(ended.status)
    return ended.status


def _load(parsed: argparse.Namespace, **more: Any) -> Any:
    """The ``LLM``, a context manager. jax is imported here and no sooner."""
    import jaxserve

    return jaxserve.LLM(parsed.model, **given(parsed, EngineConfig), **more)


# -- generate ---------------------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or answer chat messages, without a server",
        description="One prompt is streamed to the terminal; several give JSON lines, in order, and a progress bar.",
    )
    parser.add_argument("model", nargs="?", default=EngineConfig.model, help=MODEL_HELP)
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
    parser.set_defaults(command=_generate, kinds=(SamplingParams, EngineConfig))


def _generate(parsed: argparse.Namespace) -> int:
    _check_engine(parsed)
    try:
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, **given(parsed, SamplingParams)})
    except RequestError as error:
        raise UsageError(error) from None
    prompts = _prompts(parsed)
    try:
        output = open(parsed.output, "w", encoding="utf-8") if parsed.output else nullcontext(sys.stdout)  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--output {parsed.output}: {error.strerror}") from None
    with output as out, _load(parsed) as llm:
        if len(prompts) == 1 and params.n == 1 and not parsed.json:
            for delta in llm.stream(prompts[0], params):
                if delta.error is not None:
                    raise EngineDeadError(delta.error)
                print(delta.text, end="", file=out, flush=True)
            print(file=out)
            return 0
        return _generate_many(llm, prompts, params, out)


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


# -- convert ----------------------------------------------------------------------------------------------------------


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert", help="write a checkpoint as a sharded tree that needs no conversion to serve"
    )
    parser.add_argument("source", help=MODEL_HELP)
    parser.add_argument("target", type=Path, help="folder to write; it must not exist or be empty")
    add_options(parser, EngineConfig, title="layout", only=("tensor_parallel", "dtype"))
    parser.set_defaults(command=_convert, kinds=(EngineConfig,))


def _convert(parsed: argparse.Namespace) -> int:
    options = given(parsed, EngineConfig)
    EngineConfig.from_options(str(parsed.source), options)
    if parsed.target.exists() and (not parsed.target.is_dir() or any(parsed.target.iterdir())):
        raise UsageError(f"{parsed.target} exists and is not an empty folder")
    from jaxserve.convert import convert

    convert(parsed.source, parsed.target, **options)
    return 0
