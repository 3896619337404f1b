"""The comparison: workers in processes of their own, the floor, and which figures are compared."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import compare, workers
from benchmarks.floor import Machine, ModelSize
from benchmarks.workers import Contender, Job, Result, Worker, WorkerError

FAKE = """
import os, sys, time
from protocol import serve

def load(args):
    print("this goes to standard error")
    if args.options.get("fail") == "load":
        raise ValueError("no such weights")
    def run(prompts, max_tokens):
        if args.options.get("fail") == "job":
            sys.stderr.write("the tail of the log\\n")
            sys.stderr.flush()
            os._exit(3)
        short = args.options.get("short", 0)
        return [[sum(prompt)] * (max_tokens - short) for prompt in prompts], 0.25
    return {"engine": "fake", "version": "1", "vocab_size": 1000, "options": args.options}, run

serve(load)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A contender whose worker is a few lines of Python; called with engine options."""
    shutil.copy(workers.PEERS / "protocol.py", tmp_path)
    (tmp_path / "fake_worker.py").write_text(FAKE)
    monkeypatch.setattr(workers, "PEERS", tmp_path)

    def make(**options):
        options = {key: str(value) for key, value in options.items()}
        return Contender(engine="fake", model="none", options=options)

    return make


def start(contender, **changes):
    return Worker(contender, **({"threads": 1, "max_seqs": 4, "max_len": 64, "timeout": 30} | changes))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def test_a_worker_answers_jobs_and_is_stopped_in_between(fake):
    with start(fake(level=2)) as worker:
        assert worker.info["vocab_size"] == 1000
        assert worker.info["options"] == {"level": 2}
        for _ in range(2):
            result = worker.run([[1, 2], [3, 4]], 5)
            assert result.token_ids == [[3] * 5, [7] * 5]
            assert result.ttft == 0.25
            assert result.peak_rss > 1 << 20
            if os.path.exists("/proc"):
                wait_for(lambda: state(worker._process.pid) == "T")
    assert worker._process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_stopped_workers_end_with_a_driver_that_is_killed(fake):
    contender = fake()
    code = (
        "import pathlib, time\n"
        "from benchmarks import workers\n"
        f"workers.PEERS = pathlib.Path({str(workers.PEERS)!r})\n"
        "contender = workers.Contender(engine='fake', model='none')\n"
        "worker = workers.Worker(contender, threads=1, max_seqs=4, max_len=64)\n"
        "print(worker._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([contender.python, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        pid = int(driver.stdout.readline())
        wait_for(lambda: state(pid) == "T")
        driver.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}") or state(pid) == "Z")


def test_a_worker_that_cannot_load_says_why(fake):
    with pytest.raises(WorkerError, match="ValueError: no such weights"):
        start(fake(fail="load"))


def test_a_worker_that_dies_shows_the_end_of_its_log(fake):
    with start(fake(fail="job")) as worker, pytest.raises(WorkerError, match=r"(?s)code 3.*the tail of the log"):
        worker.run([[1]], 2)


def test_too_few_tokens_are_refused(fake):
    with start(fake(short=1)) as worker, pytest.raises(WorkerError, match="4"):
        worker.run([[1]], 5)


def test_an_absent_interpreter_is_named():
    contender = Contender(engine="jaxserve", model="none", python="/nowhere/python")
    with pytest.raises(WorkerError, match="/nowhere/python"):
        start(contender)


def test_rounds_alternate_and_a_failed_worker_is_left_out(fake, monkeypatch, capsys):
    with start(fake()) as good, start(fake(fail="job")) as bad:
        jobs = [Job(1, 4, 6), Job(2, 4, 6)]
        records = compare.run_rounds([good, bad], jobs, 3, 1000, seed=0)
    counts = {(r.job.batch, r.contender.options.get("fail")): len(r.results) for r in records}
    assert counts == {(1, None): 3, (2, None): 3, (1, "job"): 0, (2, "job"): 0}
    assert "code 3" in capsys.readouterr().out


def test_contenders_are_parsed_and_mistakes_named():
    contender = Contender.parse("vllm=/env/bin/python,model=/m,dtype=bfloat16,enforce_eager=true")
    assert (contender.engine, contender.python, contender.model) == ("vllm", "/env/bin/python", "/m")
    assert (contender.itemsize, contender.options) == (2, {"enforce_eager": "true"})
    for text, message in [("x=/p,model=/m", "unknown engine"), ("vllm=/p", "model=PATH"), ("vllm=/p,model", "key=")]:
        with pytest.raises(ValueError, match=message):
            Contender.parse(text)


def test_prompts_are_the_same_for_everyone_and_share_no_beginning():
    job = Job(16, 32, 8)
    prompts = job.prompts(1000, seed=3)
    assert prompts == job.prompts(1000, seed=3)
    assert prompts != job.prompts(1000, seed=4)
    assert len(prompts) == 16
    assert {len(p) for p in prompts} == {32}
    assert len({tuple(p[:4]) for p in prompts}) == 16


def record(engine, dtype, job, seconds):
    results = [Result(s, 0.5, [[1] * job.output_len] * job.batch, 1) for s in seconds]
    return compare.Record(job, Contender(engine=engine, model="m", dtype=dtype), results)


def test_ratios_take_medians_and_each_engine_in_its_quicker_dtype():
    job = Job(8, 16, 10)
    records = [
        record("jaxserve", "float32", job, [4.0, 2.0, 3.0]),
        record("jaxserve", "bfloat16", job, [1.0, 9.0, 2.0]),
        record("vllm", "float32", job, [8.0, 6.0, 7.0]),
        record("vllm", "bfloat16", job, [80.0, 60.0, 70.0]),
    ]
    assert records[0].score == pytest.approx(80 / 3)
    (ratio,) = compare.show_ratios(records, [job], "jaxserve")
    assert ratio["ratio"] == pytest.approx(7.0 / 2.0)


def test_a_lone_request_is_compared_by_decode_and_a_first_token_by_its_time():
    assert record("vllm", "float32", Job(1, 16, 11), [5.5]).score == pytest.approx(10 / 5.0)
    assert record("vllm", "float32", Job(1, 1024, 1), [0.6]).score == pytest.approx(1 / 0.5)


def test_the_floor_is_reading_for_one_and_arithmetic_for_many():
    machine = Machine(threads=2, read_bytes_per_second=15e9, float32_flops=242e9)
    size = ModelSize(parameters=134_515_008, head_parameters=49_152 * 576, kv_elements_per_token=2 * 30 * 3 * 64)
    one = 1 / size.step_seconds(machine, 1, 0, 4)
    assert one == pytest.approx(27.9, rel=0.01)
    assert 1 / size.step_seconds(machine, 1, 0, 2) == pytest.approx(2 * one)
    many = 1000 / size.step_seconds(machine, 1000, 0, 4)
    assert many == pytest.approx(242e9 / (2 * size.parameters))
    first = size.prefill_seconds(machine, 8, 128, 4)
    assert first == pytest.approx(8 * 2 * (106_203_456 * 128 + 49_152 * 576) / 242e9)
    assert size.job_seconds(machine, 8, 128, 128, 4) > first + 127 * size.step_seconds(machine, 8, 128, 4)


def test_the_best_of_two_measurements_is_taken_figure_by_figure():
    assert Machine(2, 10.0, 300.0).best(Machine(2, 15.0, 200.0)) == Machine(2, 15.0, 300.0)
