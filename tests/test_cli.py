"""The command line, on a fake engine: options out of dataclasses, texts and JSON lines, one-line errors."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import jaxserve
from jaxserve.cli import COMMANDS, main
from jaxserve.config import EngineConfig
from jaxserve.options import Parser, add_options, field_docs, given
from jaxserve.request import SamplingParams, StructuredOutputs
from serve.options import ServerOptions
from tests.fake_llm import FakeLLM
from tests.tiny import FIXTURES

TEXT = "Hello, wörld! 😀"


@dataclasses.dataclass(frozen=True)
class Example:
    count: int = dataclasses.field(default=3, metadata={"help": "How many, in 100 % of cases."})
    share: float | None = None
    """A docstring
    over two lines."""
    name: str | None = None
    loud: bool = True
    words: Sequence[str] | str = ()
    ids: Sequence[int] | None = None
    bias: Mapping[int, float] | None = None
    keys: tuple[str, ...] = ()
    language: StructuredOutputs | None = None


def parse(*arguments: str, **options) -> dict:
    parser = Parser(prog="example")
    add_options(parser, Example, title="example", **options)
    return given(parser.parse_args(list(arguments)), Example)


def test_options_that_are_not_given_leave_no_trace():
    assert parse() == {}
    assert parse("--count", "5") == {"count": 5}


def test_every_kind_of_field():
    line = ["--count=1", "--share=0.5", "--name=x", "--no-loud", "--words=a", "--words=b", "--ids=1,-2", "--keys=k"]
    assert parse(*line, "--bias", '{"5": 1.5}') == {
        "count": 1,
        "share": 0.5,
        "name": "x",
        "loud": False,
        "words": ["a", "b"],
        "ids": [1, -2],
        "bias": {"5": 1.5},
        "keys": ["k"],
    }


def test_flags_and_selections():
    assert parse("--amount", "2", flags={"count": ("--amount",)}) == {"count": 2}
    with pytest.raises(SystemExit):
        parse("--count", "2", only=("share",))
    with pytest.raises(SystemExit):
        parse("--share", "2", skip=("share",))


def test_a_dataclass_is_given_as_json():
    assert parse("--language", '{"choice": ["a", "b"]}') == {"language": StructuredOutputs(choice=["a", "b"])}


def test_help_comes_from_metadata_and_docstrings(capsys):
    assert field_docs(Example) == {"share": "A docstring over two lines."}
    with pytest.raises(SystemExit):
        parse("--help", defaults={"loud": False})
    shown = " ".join(capsys.readouterr().out.split())
    assert "How many, in 100 % of cases. (default: 3)" in shown
    assert "A docstring over two lines." in shown
    assert "(default: off)" in shown


@pytest.mark.parametrize("kind", [EngineConfig, ServerOptions, SamplingParams])
def test_every_field_of_ours_has_a_form_on_the_command_line(kind):
    parser = Parser(prog="example")
    add_options(parser, kind, title="all")
    assert given(parser.parse_args([]), kind) == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--count", "x"], "--count"),
        (["--cou", "1"], "--cou"),
        (["--ids", "1,x"], "--ids"),
        (["--bias", "[1]"], "--bias"),
        (["--bias", "{"], "--bias"),
        (["--language", "{}"], "needs exactly one of"),
        (["--language", '{"word": 1}'], "unknown field 'word'"),
        (["--language", '{"regex": 1}'], "structured_outputs.regex"),
        (["--nothing"], "--nothing"),
    ],
)
def test_bad_options_are_one_line(arguments, named, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


# The commands.


class PublicLLM(FakeLLM):
    """The fake with what the command line asks beyond what the server does."""

    made: list["PublicLLM"]
    answer_to: Callable[[str], str]

    def __init__(self, model: str, **fields):
        super().__init__()
        self.model, self.fields = model, fields
        self.made.append(self)

    def stream(self, prompt, params):
        import queue

        deltas = queue.SimpleQueue()
        self.submit(prompt, params, on_delta=deltas.put)
        while True:
            delta = deltas.get()
            yield delta
            if delta.request_done:
                return

    def submit(self, prompt, params, **more):
        if not isinstance(prompt, str) and isinstance(prompt[0], dict):
            prompt = self.tokenizer.apply_chat_template(prompt)
        return super().submit(prompt, params, **more)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


@pytest.fixture
def made(monkeypatch) -> list[PublicLLM]:
    """The engines that the command line makes."""
    PublicLLM.made = []
    monkeypatch.setattr(jaxserve, "LLM", PublicLLM, raising=False)
    return PublicLLM.made


def test_generate_streams_one_prompt(made, capsys):
    assert (
        main(["generate", "some-model", "--prompt", "Hi", "--seed", "5", "--engine-seed", "6", "--page-size", "8"]) == 0
    )
    assert capsys.readouterr().out == TEXT + "\n"
    (llm,) = made
    assert (llm.model, llm.fields) == ("some-model", {"seed": 6, "page_size": 8, "needs_tokenizer": True})
    assert llm.submitted[0].params == SamplingParams(max_tokens=256, seed=5)


def test_generate_by_chat(made, capsys):
    assert main(["generate", "--chat", "Hi", "--system", "S", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert bytes(made[0].submitted[0].prompt).decode() == "<system>S<user>Hi<assistant>"


def test_a_tokenizer_is_needed_where_every_prompt_is_in_words(made, tmp_path):
    for number, prompts in enumerate((["a", [98]], [[98]], ["a", [{"role": "user", "content": "b"}]])):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(map(json.dumps, prompts)))
        assert main(["generate", "--prompts-file", str(path), "--max-tokens", "1"]) == 0
    assert [llm.fields["needs_tokenizer"] for llm in made] == [False, False, True]


def test_what_cannot_be_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    from jaxserve import build

    monkeypatch.setattr(build, "mesh_of", lambda config: pytest.fail("the device was started"))
    file = tmp_path / "file"
    file.write_text("")
    for arguments, status, named in (
        (["--disk-kv-path", "/proc/x"], 2, "--disk-kv-path: /proc/x: No such file"),
        (["--disk-kv-path", str(file)], 2, f"--disk-kv-path: {file}: File exists"),
        (["--disk-kv-path", str(file / "x")], 2, f"--disk-kv-path: {file / 'x'}: Not a directory"),
        ([str(FIXTURES / "llama3")], 1, "no tokenizer.json; give prompts as token ids"),
    ):
        assert main(["generate", *arguments, "--prompt", "Hi", "--cache-dir", str(tmp_path / "cache")]) == status
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1


def test_generate_from_standard_input(made, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert main(["generate", "--max-tokens", "5"]) == 0
    assert bytes(made[0].submitted[0].prompt).decode() == "from a pipe"
    assert capsys.readouterr().out == "Hello\n"


def test_generate_many_as_json_lines_in_order(made, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    prompts = [
        "a",
        [98],
        {"prompt": "c"},
        [{"role": "user", "content": "d"}],
        {"messages": [{"role": "user", "content": "e"}]},
    ]
    path.write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
    out = tmp_path / "out.jsonl"
    line = [
        "generate",
        "--prompts-file",
        str(path),
        "--output",
        str(out),
        "--n",
        "2",
        "--max-tokens",
        "5",
        "--logprobs",
        "0",
    ]
    assert main(line) == 0
    assert capsys.readouterr().out == ""
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [item["index"] for item in found] == list(range(5))
    assert found[0]["prompt"] == "a"
    for item in found:
        assert [one["text"] for one in item["outputs"]] == ["Hello", "Hello"]
        assert [one["finish_reason"] for one in item["outputs"]] == ["length", "length"]
        assert item["outputs"][0]["logprobs"] == [-0.25] * 5
    sent = [bytes(job.prompt).decode() for job in made[0].submitted]
    assert sent == ["a", "b", "c", "<user>d<assistant>", "<user>e<assistant>"]


def test_generate_goes_on_after_a_bad_prompt(made, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("a\n" + "x" * 600 + "\nb\n")
    assert main(["generate", "--prompts-file", str(path), "--max-tokens", "5"]) == 1
    shown = capsys.readouterr()
    found = [json.loads(line) for line in shown.out.splitlines()]
    assert ["error" in item for item in found] == [False, True, False]
    assert "600 tokens" in found[1]["error"]
    assert "1 of 3" in shown.err


def test_a_window_smaller_than_the_work_still_does_all(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxserve.commands.generate.WINDOW", 2)
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(20)))
    assert main(["generate", "--prompts-file", str(path), "--max-tokens", "2"]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == [
        f"prompt {i}" for i in range(20)
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["generate", "--prompt", "Hi", "--temperature", "nan"], 2, "temperature"),
        (["generate", "--prompt", "Hi", "--max-tokens", "-1"], 2, "--max-tokens must"),
        (["generate", "--prompt", "Hi", "--n", "0"], 2, "n must"),
        (["generate", "--prompt", "Hi", "--dtype", "int3"], 2, "dtype"),
        (["generate", "--prompt", "Hi", "--page-size", "0"], 2, "--page-size must"),
        (["generate", "--prompts-file", "/nonexistent/file"], 2, "/nonexistent/file"),
        (["generate", "--system", "S", "--prompt", "Hi"], 2, "--system"),
        (["generate", "--prompt", "x" * 600], 1, "600 tokens"),
        (["serve", "--port", "70000"], 2, "port"),
        (["serve", "--api-key", ""], 2, "--api-key must"),
        (["serve", "--host", "256.0.0.1"], 1, "256.0.0.1"),
        (["convert", "smollm2-135m", str(Path(__file__).parent)], 2, "not an empty folder"),
        (["convert", "smollm2-135m", "/tmp/x", "--tensor-parallel", "0"], 2, "--tensor-parallel must"),
        (["generate", "--prompt", "Hi", "--output", "/nonexistent/x"], 2, "--output /nonexistent/x: No such file"),
        (["generate", "--prompt", "Hi", "--cache-dir", "/dev/null/x"], 2, "--cache-dir /dev/null/x: Not a directory"),
        (["serve", "--tls-cert", "a"], 2, "--tls-cert and --tls-key"),
        (["serve", "--tls-cert", "/nonexistent", "--tls-key", "b"], 2, "--tls-cert /nonexistent cannot be read"),
        (["serve", "--api-key-file", "/nonexistent"], 2, "--api-key-file /nonexistent cannot be read"),
        (["serve", "--access-log", "loud"], 2, "--access-log must"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_commands_are_one_line(made, arguments, status, named, capsys):
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("jaxserve: error: ")
    assert named in error


@pytest.mark.parametrize("line", ["", "{", "5", "{}", '{"prompt": ""}', "[]"])
def test_bad_lines_of_a_prompts_file_are_named(made, tmp_path, line, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'"fine"\n{line}\n' if line else "\n")
    assert main(["generate", "--prompts-file", str(path)]) == 2
    error = capsys.readouterr().err
    assert "prompt 2" in error or "no prompt" in error
    assert made == []


HEAVY = ("jax", "aiohttp", "prometheus_client", "llguidance", "tokenizers", "orbax", "gguf")
"""Libraries that show in the time a process takes to start."""


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words) or "none")
def test_help_loads_nothing_heavy(command):
    script = "import sys; from jaxserve.cli import main\n"
    script += f"try: main({[*command, '--help']!r})\nexcept SystemExit as e: assert e.code == 0\n"
    script += f"loaded = sorted(set({HEAVY}) & set(sys.modules))\n"
    script += "loaded += [m for m in sys.modules if m.startswith('jaxserve.commands.')]\n"
    script += "print('loaded:', *loaded, file=sys.stderr)"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: jaxserve" in done.stdout
    expected = ["jaxserve.commands.common", *(f"jaxserve.commands.{name}" for name in command)]
    assert done.stderr.split() == ["loaded:", *expected]


def test_every_command_has_a_module_and_a_line_of_help(capsys):
    folder = Path(jaxserve.__file__).parent / "commands"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "common"} == set(COMMANDS)
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert name in shown
        assert text in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "named"), [([], "required: COMMAND"), (["dance"], "'dance'"), (["--loud", "serve"], "--loud")]
)
def test_a_line_without_a_known_command_is_refused(arguments, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error
