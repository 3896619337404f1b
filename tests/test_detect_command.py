"""``jaxserve detect``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import main
from jaxserve.watermark import Scheme
from tests.watermarked import marked

KEY = 31337313373133731


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "mark.json"
    path.write_text(json.dumps({"keys": [{"id": "a", "key": 5}, {"id": "b", "key": KEY, "active_from": "2020-01-01"}]}))
    return str(path)


def run(capsys, *words) -> tuple[int, str, str]:
    status = main(["detect", *map(str, words)])
    said = capsys.readouterr()
    assert str(KEY) not in said.out + said.err
    assert hex(KEY)[2:] not in said.out + said.err
    return status, said.out, said.err


def test_documents_are_told_apart_in_order(capsys, tmp_path, config):
    lines = [
        {"token_ids": marked(100, Scheme(key=KEY), seed=1).tolist()},
        list(range(100)),
        {"token_ids": [1, 2, 3]},
        {"token_ids": marked(100, Scheme(key=5), seed=2, stream=3).tolist()},
    ]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    status, out, _ = run(capsys, path, "--watermark-config", config)
    assert status == 0
    found = out.splitlines()
    assert found[0].startswith(f"{path}:1: marked with key b (p = ")
    assert ": no mark found in 8 streams of each key (p = " in found[1]
    assert ": too short to tell (p = " in found[2]
    assert ": marked with key a, completion 3 (p = " in found[3]
    status, out, _ = run(capsys, path, "--watermark-config", config, "--json", "--key-id", "b", "--streams", "1")
    facts = [json.loads(line) for line in out.splitlines()]
    assert [one["is_watermarked"] for one in facts] == [True, False, False, False]
    assert {one["num_candidates"] for one in facts} == {1}


def test_a_text_is_read_with_the_models_tokenizer(capsys, tmp_path, speaking):
    text = "".join(map(chr, marked(150, Scheme(key=KEY), seed=3, vocab=range(97, 123))))
    path, key = tmp_path / "text.txt", tmp_path / "key"
    path.write_text("Before it came plain words, which are many more than enough. " + text)
    key.write_text(f"0x{KEY:x}\n")
    key.chmod(0o600)
    status, out, _ = run(capsys, path, "--model", speaking, "--key-file", key, "--spans", "--tokens")
    assert status == 0
    facts = json.loads(out)
    assert "".join(token["text"] for token in facts["tokens"]) == path.read_text()
    assert facts["num_tokens"] == len(path.read_text())
    [span] = facts["spans"]
    assert span["text"] in path.read_text()
    assert len(set(span["text"]) - set(text)) < 6


def test_a_json_file_may_be_one_list_of_ids_and_is_a_text_otherwise(capsys, tmp_path, config, speaking):
    path = tmp_path / "old.json"
    ids = marked(100, Scheme(key=KEY), seed=1).tolist()
    path.write_text(json.dumps(ids))
    status, out, _ = run(capsys, path, "--model", tmp_path / "nothing", "--watermark-config", config)
    assert status == 0
    assert "marked with key b" in out
    for text in ('{"name": "x"}', "[]", '[1, "a"]', "[1,"):
        path.write_text(text)
        status, out, _ = run(capsys, path, "--model", speaking, "--watermark-config", config)
        assert (status, f"of {len(text)} tokens" in out) == (0, bool(text))


def test_token_ids_need_no_model(capsys, tmp_path):
    key, path = tmp_path / "key", tmp_path / "ids.jsonl"
    key.write_text("7")
    key.chmod(0o600)
    path.write_text(json.dumps(marked(90, Scheme(key=7, alpha=0.2, context_width=2), seed=4).tolist()))
    more = ("--alpha", 0.2, "--context-width", 2)
    status, out, _ = run(capsys, path, "--model", tmp_path / "nothing", "--key-file", key, *more)
    assert status == 0
    assert "marked with key default" in out
    status, _, err = run(capsys, tmp_path / "key", "--model", tmp_path / "nothing", "--key-file", key)
    assert status == 1
    assert "no such file or folder" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --watermark-config or --key-file"),
        (("--watermark-config", "CONFIG", "--key-file", "x"), "and not both"),
        (("--watermark-config", "CONFIG", "--alpha", "0.1"), "--alpha goes with --key-file"),
        (("--watermark-config", '{"key": 5, "context_width": 0}'), "--watermark-config: context_width"),
        (("--watermark-config", "CONFIG", "--key-id", "c"), "--key-id: keys[0]: no key has the id 'c'"),
        (("--watermark-config", "CONFIG", "--streams", "0"), "--streams must be"),
        (("--watermark-config", "CONFIG", "--threshold", "2"), "--threshold must be"),
        (("--watermark-config", "CONFIG", "nothing.txt"), "nothing.txt: No such file"),
        (("--watermark-config", "CONFIG", "BAD"), "bad.jsonl:1 is not valid JSON"),
        (("--watermark-config", "CONFIG", "ODD"), "odd.jsonl:1: token_ids[1] must be a token id"),
        (("--key-file", hex(KEY)), "--key-file: key default: key_file names no file; a key belongs into key"),
        (("--key-file", KEY), "--key-file: key default: key_file names no file"),
        (("--watermark-config", "CONFIG", "--key-id", KEY), "--key-id: keys[0]: no key has the id what looks like"),
        (("--key-file", "nothing"), "--key-file: key default: key_file 'nothing'"),
    ],
)
def test_bad_command_lines_are_one_line_that_names_the_option(capsys, tmp_path, config, words, said):
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "odd.jsonl").write_text("[1, 2.5]")
    places = {"CONFIG": config, "BAD": tmp_path / "bad.jsonl", "ODD": tmp_path / "odd.jsonl"}
    given = [str(places.get(word, word)) for word in words]
    if not any(word in ("BAD", "ODD", "nothing.txt") for word in words):
        (tmp_path / "ids.jsonl").write_text("[1, 2]")
        given.append(tmp_path / "ids.jsonl")
    status, out, err = run(capsys, *given)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_it_imports_no_jax(tmp_path, config):
    (tmp_path / "ids.jsonl").write_text("[1, 2]")
    words = ["detect", str(tmp_path / "ids.jsonl"), "--watermark-config", config]
    code = f"import sys; from jaxserve.cli import main; main({words!r}); print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
