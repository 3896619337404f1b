"""The load generator against a small server whose timing is known."""

import asyncio
import itertools
import json

import pytest
from aiohttp import web

from benchmarks.load import Prompt, arrival_times, dataset_prompts, random_prompts
from benchmarks.serving import Load, Outcome, first_model, run_load
from benchmarks.stats import summary

GAP = 0.02


class FakeServer:
    """Streams ``max_tokens`` chunks, the first after two gaps, the others a gap apart."""

    def __init__(self, fault: str | None = None):
        self.fault = fault
        self.at_once = self.most_at_once = 0
        self.bodies: list[dict] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.stream(request, body)
        finally:
            self.at_once -= 1

    async def stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        if self.fault == "status":
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        await asyncio.sleep(GAP)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(GAP)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            if self.fault == "stream":
                await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                return response
        if self.fault != "cut":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response


def load(server: FakeServer, prompts, times, concurrency=None) -> Load:
    async def scenario() -> Load:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await run_load(f"http://127.0.0.1:{port}", {"model": "m"}, prompts, times, concurrency, timeout=20)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def prompts(count, output_len=5):
    return [Prompt({"prompt": [1, 2, 3]}, output_len)] * count


def test_times_are_those_of_the_definitions():
    run = load(FakeServer(), prompts(3), [0.0] * 3)
    for outcome in run.outcomes:
        assert outcome.error is None
        assert outcome.output_tokens == 5
        assert len(outcome.itl) == 4
        assert outcome.ttft >= 2 * GAP
        assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itl))
        assert outcome.tpot == pytest.approx(sum(outcome.itl) / 4)
        assert outcome.tpot >= 0.9 * GAP
    figures = run.figures({})
    assert (figures["completed"], figures["failed"]) == (3, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (9, 15)
    assert figures["output_throughput"] == pytest.approx(15 / run.duration)
    assert figures["e2el_ms"]["mean"] == pytest.approx(1e3 * sum(o.latency for o in run.outcomes) / 3)


def test_closed_loop_keeps_its_limit_and_uses_it():
    server = FakeServer()
    run = load(server, prompts(9, output_len=2), [0.0] * 9, concurrency=3)
    assert run.most_at_once == 3
    assert server.most_at_once <= 3
    assert not [o.error for o in run.outcomes if o.error]


def test_open_loop_sends_at_the_given_times():
    times = [0.0, 0.1, 0.25]
    run = load(FakeServer(), prompts(3, output_len=1), times)
    starts = [o.started - run.outcomes[0].started for o in run.outcomes]
    assert all(start >= time - 0.02 for start, time in zip(starts, times, strict=True))


@pytest.mark.parametrize(
    ("fault", "message"), [("status", "HTTP 503"), ("stream", "engine died"), ("cut", "without [DONE]")]
)
def test_failures_are_counted_and_named(fault, message):
    run = load(FakeServer(fault), prompts(2), [0.0] * 2)
    figures = run.figures({"ttft": 1e9})
    assert (figures["completed"], figures["failed"]) == (0, 2)
    assert all(message in o.error for o in run.outcomes)
    assert figures["ttft_ms"] == {}
    assert figures["request_goodput"] == 0


def test_an_unreachable_server_is_a_failure_not_a_crash():
    run = asyncio.run(run_load("http://127.0.0.1:1", {}, prompts(1), [0.0], None, timeout=5))
    assert "Connect" in run.outcomes[0].error


def test_goodput_counts_only_requests_within_every_goal():
    fast = Outcome(ttft=0.1, latency=0.3, output_tokens=3, itl=[0.1, 0.1], chunk_times=[0.1, 0.2, 0.3])
    slow = Outcome(ttft=0.9, latency=1.1, output_tokens=3, itl=[0.1, 0.1], chunk_times=[0.9, 1.0, 1.1])
    run = Load([fast, slow], duration=2.0, most_at_once=2)
    assert run.figures({"ttft": 500})["request_goodput"] == 0.5
    assert run.figures({"ttft": 500, "tpot": 50})["request_goodput"] == 0
    assert run.figures({"ttft": 1000, "tpot": 150})["request_goodput"] == 1.0
    assert run.figures({})["request_goodput"] is None


def test_requests_ask_for_a_stream_with_usage():
    server = FakeServer()
    load(server, prompts(1, output_len=7), [0.0])
    body = server.bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 7


def test_first_model_is_asked_for():
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def scenario() -> str:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await first_model(f"http://127.0.0.1:{runner.addresses[0][1]}", None)
        finally:
            await runner.cleanup()

    assert asyncio.run(scenario()) == "tiny"


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_the_seed(burstiness):
    times = arrival_times(50, 10.0, burstiness, seed=1)
    assert list(times) == sorted(times)
    assert times[-1] == pytest.approx(5.0)
    assert times == arrival_times(50, 10.0, burstiness, seed=1)
    assert times != arrival_times(50, 10.0, burstiness, seed=2)
    assert arrival_times(3, float("inf"), burstiness, seed=1) == [0.0, 0.0, 0.0]


def test_less_burstiness_is_more_uneven():
    def spread(burstiness):
        times = arrival_times(2000, 1.0, burstiness, seed=0)
        return summary([b - a for a, b in itertools.pairwise(times)])["std"]

    assert spread(0.25) > spread(1.0) > spread(16.0)


def test_random_prompts_keep_their_lengths_and_prefix():
    made = random_prompts(40, input_len=100, output_len=10, spread=0.5, prefix_len=7, vocab_size=500, seed=0)
    bodies = [p.body["prompt"] for p in made]
    assert {tuple(ids[:7]) for ids in bodies} == {tuple(bodies[0][:7])}
    assert all(57 <= len(ids) <= 157 and min(ids) >= 100 and max(ids) < 500 for ids in bodies)
    assert all(5 <= p.output_len <= 15 for p in made)
    assert len({len(ids) for ids in bodies}) > 5
    assert len({tuple(ids[7:20]) for ids in bodies}) == 40


def test_dataset_takes_prompts_and_chats_and_names_a_bad_line(tmp_path):
    file = tmp_path / "data.jsonl"
    lines = ['{"prompt": "hi", "output_len": 3}', "", '{"messages": [{"role": "user", "content": "hi"}]}']
    file.write_text("\n".join(lines))
    made = dataset_prompts(file, 4, output_len=9, seed=0)
    assert sorted((p.endpoint, p.output_len) for p in made) == [
        ("/v1/chat/completions", 9),
        ("/v1/chat/completions", 9),
        ("/v1/completions", 3),
        ("/v1/completions", 3),
    ]
    file.write_text('{"prompt": "a"}\n{"text": "b"}')
    with pytest.raises(ValueError, match="line 2"):
        dataset_prompts(file, 1, output_len=9, seed=0)


def test_summary_is_in_the_wanted_unit_and_empty_for_nothing():
    figures = summary([1.0, 2.0, 3.0, 10.0], 1e3)
    assert (figures["mean"], figures["median"], figures["p50"]) == (4000.0, 2500.0, 2500.0)
    assert figures["p99"] == pytest.approx(9790.0)
    assert summary([]) == {}
