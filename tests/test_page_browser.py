"""The page in a real browser, headless, over a fake engine."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from jaxserve.watermark import Scheme
from jaxserve.watermark.config import WatermarkConfig
from tests.fake_llm import FakeLLM, Health
from tests.serving import Server, serving
from tests.watermarked import marked

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
FAMILY = "e\u0301 👨‍👩‍👧 🇫🇷 漢 😀!"
"""Characters of several bytes, and of several code points that a reader sees as one."""


@pytest.fixture(scope="module")
def browser():
    if (program := shutil.which("chromium")) is None:
        pytest.skip("no chromium on the path: install the distribution's package to try the page")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Tab:
    """A fresh browser window on a server's page, and what it complained of."""

    page: object
    server: Server
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self) -> None:
        self.page.goto(self.server.url + "/")

    def say(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def answered(self) -> str:
        """The whole text of the last answer, once it is done."""
        self.page.wait_for_selector(".turn:last-child .answer[aria-busy=false]")
        return self.text()

    def text(self) -> str:
        """The text of the last answer, without tokens that stand for no text."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll(".turn:last-child .answer > .text")].at(-1).cloneNode(true)"""
            """.childNodes.values().filter((n) => !n.classList?.contains("ghost"))"""
            """.map((n) => n.textContent).toArray().join("")"""
        )

    def shown(self, selector: str) -> str:
        return self.page.locator(selector).last.text_content()

    def set(self, name: str, value: str) -> None:
        """Put a value into a control of the settings."""
        self.page.evaluate(
            """([name, value]) => { const one = document.forms.settings.elements[name]; one.value = value;
               one.dispatchEvent(new Event("input", {bubbles: true})); }""",
            [name, value],
        )

    def until(self, script: str, seconds: float = 10.0) -> None:
        """Wait until ``script`` is true. (Playwright's own way needs ``eval``, which the page forbids.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(script):
            assert time.monotonic() < end, f"not in {seconds} s: {script}"
            self.page.wait_for_timeout(20)


type Open = Callable[..., Tab]


@pytest.fixture
def open_tab(browser) -> Iterator[Open]:
    """Opens the page over a fake engine. At the end nothing may have failed in it, nor gone to another host."""
    with contextmanager(_tabs)(browser) as opened:
        yield opened


def _tabs(browser) -> Iterator[Open]:
    closers, tabs = [], []

    def open_tab(llm: FakeLLM | None = None, width: int = 1200, **options) -> Tab:
        served = serving(llm, **options)
        server = served.__enter__()
        closers.append(lambda: served.__exit__(None, None, None))
        context = browser.new_context(viewport={"width": width, "height": 800})
        closers.append(context.close)
        tab = Tab(context.new_page(), server)
        tabs.append(tab)
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("console", lambda line: line.type in ("error", "warning") and tab.complaints.append(line.text))
        tab.page.on("request", lambda request: tab.asked.append(request.url))
        tab.open()
        return tab

    try:
        yield open_tab
        for tab in tabs:
            assert all(url.startswith(tab.server.url + "/") for url in tab.asked)
            # What a refused request leaves in the console is no fault of the page.
            assert [text for text in tab.complaints if "Failed to load resource" not in text] == []
    finally:
        for close in reversed(closers):
            close()


def test_it_loads_without_complaint(open_tab):
    tab = open_tab()
    tab.until("document.getElementById('light').dataset.state === 'ready'")
    tab.until("document.querySelector('.tile .value').textContent === '0'")
    assert tab.shown("#model") == "tiny"
    assert tab.page.locator(".tile").count() == 6
    assert tab.complaints == []
    assert {url.removeprefix(tab.server.url) for url in tab.asked} >= {"/", "/web/app.js", "/metrics", "/health"}


def test_an_answer_appears_piece_by_piece(open_tab):
    tab = open_tab(FakeLLM(answer="0123456789" * 3, step_seconds=0.03))
    tab.page.evaluate(
        """() => { window.seen = new Set(); new MutationObserver(() =>
           seen.add(document.querySelector(".answer > .text")?.textContent)).observe(
           document.getElementById("turns"), {subtree: true, childList: true, characterData: true}); }"""
    )
    tab.say("Count.")
    assert tab.answered() == "0123456789" * 3
    seen = {text for text in tab.page.evaluate("[...seen]") if text}
    assert len(seen) > 5
    assert all(("0123456789" * 3).startswith(text) for text in seen)
    facts = tab.shown(".facts")
    assert "30 tokens" in facts
    assert "finished" in facts


def test_a_long_answer_does_not_slow_the_page_down(open_tab):
    """Thousands of tokens that come as fast as they can be sent: laying each out alone would take minutes."""
    answer = "word é 😀 " * 400
    tab = open_tab(FakeLLM(answer=answer, max_model_len=10**5))
    tab.page.check("input[name=logprobs]")
    begun = time.monotonic()
    tab.say("Go on.")
    assert tab.answered() == answer
    assert time.monotonic() - begun < 20


def test_stop_aborts_and_keeps_what_came(open_tab):
    llm = FakeLLM(answer="again and " * 500, step_seconds=0.02, max_model_len=10**6)
    tab = open_tab(llm)
    tab.say("Go on for ever.")
    tab.until("document.querySelector('.answer > .text')?.textContent.length > 3")
    assert tab.page.locator("#send").is_hidden()
    tab.page.click("#stop-button")
    text = tab.answered()
    assert 3 < len(text) < 3000
    assert ("again and " * 500).startswith(text)
    assert "stopped" in tab.shown(".facts")
    assert tab.page.locator("#send").is_visible()
    llm.wait_idle()
    assert llm.aborted


def test_a_conversation_is_sent_whole_made_anew_and_cleared(open_tab):
    llm = FakeLLM(answer="Aye.")
    tab = open_tab(llm)
    tab.set("system", "Be brief.")
    tab.say("One")
    tab.answered()
    tab.page.fill("#input", "Two")
    tab.page.press("#input", "Shift+Enter")
    tab.page.type("#input", "lines")
    tab.page.press("#input", "Enter")
    tab.answered()
    asked = "<system>Be brief.<user>One<assistant>Aye.<user>Two\nlines<assistant>"
    assert bytes(llm.submitted[-1].prompt).decode() == asked
    assert tab.page.locator(".again:visible").count() == 1
    tab.page.locator(".again:visible").click()
    tab.until("document.querySelector('.turn:last-child .answer').ariaBusy === 'false'")
    assert len(llm.submitted) == 3
    assert bytes(llm.submitted[-1].prompt).decode() == asked
    assert tab.page.locator(".turn").count() == 2
    tab.page.click("#clear")
    assert tab.page.locator(".turn").count() == 0
    tab.say("New")
    tab.answered()
    assert bytes(llm.submitted[-1].prompt).decode() == "<system>Be brief.<user>New<assistant>"


def test_controls_are_sent_and_remembered(open_tab):
    llm = FakeLLM(answer="Aye.")
    tab = open_tab(llm)
    for name, value in {
        **{"temperature": "0.7", "top_p": "0.9", "min_p": "0.05", "repetition_penalty": "1.1", "top_k": "40"},
        **{"max_tokens": "3", "seed": "7", "stop": "END\n\\n\\n"},
    }.items():
        tab.set(name, value)
    for _ in range(2):
        tab.say("Hi")
        assert tab.answered() == "Aye"
        sent = llm.submitted[-1].params
        found = (sent.temperature, sent.top_p, sent.min_p, sent.repetition_penalty, sent.top_k, sent.max_tokens)
        assert found == (0.7, 0.9, 0.05, 1.1, 40, 3)
        assert sent.seed == 7
        assert tuple(sent.stop) == ("END", "\n\n")
        assert "limit" in tab.shown(".facts")
        tab.page.reload()
    tab.page.click("#defaults")
    tab.say("Hi")
    assert tab.answered() == "Aye."
    assert (llm.submitted[-1].params.temperature, llm.submitted[-1].params.seed) == (1.0, None)


def test_a_schema_is_sent_and_a_broken_one_is_not(open_tab):
    tab = open_tab()
    bodies = []
    tab.page.route("**/v1/chat/completions", lambda route: (bodies.append(route.request.post_data_json), stream(route)))
    tab.set("schema", '{"type": ')
    assert "not JSON" in tab.shown("#schema-error")
    tab.say("Hi")
    tab.answered()
    assert "not JSON" in tab.shown(".error")
    assert bodies == []
    tab.set("schema", '{"type": "object"}')
    assert tab.shown("#schema-error") == ""
    tab.say("Hi")
    tab.answered()
    assert bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def stream(route, *deltas: dict) -> None:
    """Answer as the server would stream ``deltas``."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = ": alive\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_reasoning_and_tool_calls_are_shown(open_tab):
    tab = open_tab()
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}
    deltas = [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": text} for text in ("Hm, ", "rain?")),
        {"content": "Let me look."},
        {"tool_calls": [call]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"city": ', '"Oslo"}')),
    ]
    tab.page.route("**/v1/chat/completions", lambda route: stream(route, *deltas))
    tab.say("Weather?")
    assert tab.answered() == "Let me look."
    assert tab.shown(".reasoning .text") == "Hm, rain?"
    assert tab.page.locator(".reasoning").is_visible()
    assert tab.shown(".tool strong") == "weather"
    assert json.loads(tab.shown(".tool pre")) == {"city": "Oslo"}


def test_tokens_are_coloured_and_show_their_alternatives(open_tab):
    tab = open_tab(FakeLLM(answer="Aye."))
    tab.page.check("input[name=logprobs]")
    tab.say("Hi")
    assert tab.answered() == "Aye."
    tokens = tab.page.locator(".answer > .text .token:not(.ghost)")
    assert tokens.all_text_contents() == list("Aye.")
    colour = "one => getComputedStyle(one).backgroundColor"
    assert tokens.first.evaluate(colour) != "rgba(0, 0, 0, 0)"
    assert float(tokens.first.evaluate("one => one.style.getPropertyValue('--p')")) == pytest.approx(0.779)
    tokens.first.hover()
    assert tab.page.locator("#alternatives").is_visible()
    assert tab.page.locator(".choice .what").all_text_contents() == list("ABCDE")
    assert tab.page.locator(".choice.chosen .what").all_text_contents() == ["A"]
    assert tab.page.locator(".choice .chance").all_text_contents()[:2] == ["77.9 %", "28.7 %"]
    # The same by keyboard: one stop for the tab key, arrows from token to token.
    tokens.first.focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator(".choice.chosen .what").all_text_contents() == ["y"]
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("#alternatives").is_hidden()
    tab.page.uncheck("input[name=logprobs]")
    assert tokens.first.evaluate(colour) == "rgba(0, 0, 0, 0)"


def test_characters_spread_over_tokens_stay_whole(open_tab):
    tab = open_tab(FakeLLM(answer=FAMILY))
    tab.page.check("input[name=logprobs]")
    tab.say("Hi")
    assert tab.answered() == FAMILY
    shown = tab.page.locator(".answer > .text .token:not(.ghost)").all_text_contents()
    assert shown == ["e\u0301", " ", "👨‍👩‍👧", " ", "🇫🇷", " ", "漢", " ", "😀", "!"]
    tab.page.locator(".token", has_text="😀").hover()
    assert tab.page.locator(".choices").count() == 4
    assert tab.page.locator(".choices").first.locator(".chosen .what").text_content() == "F0"
    tab.page.uncheck("input[name=logprobs]")
    tab.say("Hi")
    assert tab.answered() == FAMILY


def test_text_is_shown_as_sent_however_tokens_lie_under_it(open_tab):
    """Random texts cut into tokens anywhere between bytes; text is held back, or cut; special tokens stand between.

    Where all text came, none before its tokens, and no special token, every token lies under its text.
    """
    tab = open_tab()
    faults = tab.page.evaluate(
        """async () => {
          const { TokenText } = await import("/web/tokens.js");
          let state = 1;
          const random = (n) => (state = (state * 48271) % 2147483647) % n;
          const signs = [..."ab <&\\n", "é", "e\\u0301", "漢", "😀", "👨‍👩‍👧", "🇫🇷", "\\ufffd"];
          const faults = [];
          for (let round = 0; round < 400; round++) {
            const whole = Array.from({length: random(30)}, () => signs[random(signs.length)]).join("");
            const bytes = [...new TextEncoder().encode(whole)];
            const points = [...whole], text = points.slice(0, points.length - random(3)).join("");
            const element = document.createElement("div"), view = new TokenText(element);
            const special = random(2), hasty = random(2), decoder = new TextDecoder();
            let sent = 0, known = 0;
            while (bytes.length) {
              const tokens = Array.from({length: random(3)}, () => bytes.splice(0, 1 + random(5)))
                .filter((one) => one.length).map((bytes) => ({token: "?", bytes, logprob: -1}));
              if (special && !random(4)) tokens.push({token: "<|x|>", bytes: random(2) ? [] : null, logprob: -1});
              for (const one of tokens)
                known += decoder.decode(new Uint8Array(one.bytes ?? []), {stream: true}).length;
              const more = Math.max(0, Math.min(text.length - sent, random(9), hasty ? 99 : known - sent));
              view.push(text.slice(sent, sent + more), tokens);
              sent += more;
            }
            view.push(text.slice(sent));
            view.finish();
            const shown = [...element.childNodes].filter((one) => !one.classList?.contains("ghost"))
              .map((one) => one.textContent).join("");
            const ghosts = element.querySelectorAll(".ghost").length;
            const bare = [...element.childNodes].filter((one) => one.nodeType === Node.TEXT_NODE).length;
            const unlaid = !special && !hasty && text === whole && ghosts + bare;
            if (shown !== text || view.text !== text || unlaid) faults.push([text, shown, ghosts, bare]);
          }
          return faults;
        }"""
    )
    assert faults == []


def test_events_are_read_however_the_bytes_are_cut(open_tab):
    tab = open_tab()
    text = (
        ': alive\n\ndata: {"a": "é漢😀"}\n\ndata:one\r\ndata: two\r\n\r\n\nevent: x\ndata: \u2028\r\rdata: [DONE]\n\n'
    )
    expected = ['{"a": "é漢😀"}', "one\ntwo", "\u2028", "[DONE]"]
    for size in (1, 2, 3, 7, 1000):
        found = tab.page.evaluate(
            """async ([text, size]) => {
              const { eventsOf } = await import("/web/api.js");
              const bytes = new TextEncoder().encode(text);
              const body = new ReadableStream({ start(to) {
                for (let i = 0; i < bytes.length; i += size) to.enqueue(bytes.slice(i, i + size));
                to.close();
              } });
              const found = [];
              for await (const data of eventsOf(body)) found.push(data);
              return found;
            }""",
            [text, size],
        )
        assert found == expected


def test_markup_in_an_answer_stays_text(open_tab):
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'
    tab = open_tab(FakeLLM(answer=evil))
    for _ in range(2):
        tab.say(evil)
        assert tab.answered() == evil
        assert tab.page.locator("#turns img, #turns script").count() == 0
        tab.page.check("input[name=logprobs]")
    assert tab.page.title() == "tiny · jaxserve"


def test_the_fence_holds(open_tab):
    """Even code on the page itself can neither make markup of text nor reach another host."""
    tab = open_tab()
    other = tab.server.url.replace("127.0.0.1", "localhost")
    tries = {
        "markup": "() => { document.body.innerHTML = '<b>'; }",
        "program": "() => { const one = document.createElement('script'); one.text = '1'; document.body.append(one); }",
        "request": f"() => fetch('{other}/health', {{mode: 'no-cors'}})",
        "image": f"""() => new Promise((loaded, failed) => {{
            const one = new Image(); one.onload = loaded; one.onerror = () => failed(new TypeError("no")); one.src =
            '{other}/web/icon.svg'; }})""",
    }
    for script in tries.values():
        found = tab.page.evaluate(f"Promise.resolve().then({script}).then(() => 'done', (error) => error.name)")
        assert found == "TypeError", script
    tab.complaints.clear()
    tab.asked.clear()


def test_gauges_move(open_tab):
    llm = FakeLLM()
    llm.report = lambda: {"limits": {"max_num_seqs": 8}, "kv cache": {"pages": 200}}
    tab = open_tab(llm)
    tile = ".tile:nth-child({}) .{}"
    tab.until("document.querySelector('.tile .value').textContent === '0'")
    llm._metrics.step(5, 3, 2, 0.5)
    llm._metrics.preempted(4)
    llm._metrics.tokens([None] * 1000)
    tab.until("parseFloat(document.querySelector('.tile:nth-child(4) .value').textContent) > 0")
    assert [tab.shown(tile.format(i, "value")) for i in (1, 2, 3, 6)] == ["3", "2", "50 %", "4"]
    assert [tab.shown(tile.format(i, "note")) for i in (1, 3)] == ["of 8", "100 of 200"]
    assert "L" in tab.page.locator(".tile:nth-child(1) .line").get_attribute("d")


def test_metrics_are_read_under_any_prefix(open_tab):
    tab = open_tab()
    sums = tab.page.evaluate(
        """async () => Object.fromEntries((await import("/web/engine.js")).parseMetrics(
             '# HELP x y\\nvllm:num_requests_running{model_name="a } b"} 2.0\\nvllm:num_requests_running{e="1"} 1\\n'
             + 'plain 3 1700000000\\nbad{} NaN\\n'))"""
    )
    assert sums == {"num_requests_running": 3, "plain": 3}


def test_the_light_tells_of_a_stalled_engine(open_tab):
    llm = FakeLLM()
    llm.health = lambda: Health(idle=False, seconds_since_progress=999.0)
    tab = open_tab(llm)
    tab.until("document.getElementById('light').dataset.state === 'stalled'")


def test_a_wrong_key_is_told_and_the_right_one_opens(open_tab):
    llm = FakeLLM(answer="Aye.")
    tab = open_tab(llm, api_key=("secret",))
    tab.page.wait_for_selector("#key-dialog[open]")
    tab.page.fill("#key", "wrong")
    tab.page.keyboard.press("Enter")
    tab.until("document.getElementById('key-error').textContent.includes('refuses')")
    tab.page.fill("#key", "secret")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#key-dialog", state="hidden")
    tab.say("Hi")
    assert tab.answered() == "Aye."
    tab.until("document.querySelector('.tile .value').textContent === '0'")
    assert tab.page.evaluate("[JSON.stringify(localStorage), document.cookie].join()").count("secret") == 0
    tab.page.reload()
    tab.until("document.getElementById('model').textContent === 'tiny'")


@pytest.mark.parametrize(
    ("fields", "said", "words"),
    [
        ({}, "raise", ["400", "the template says no"]),
        ({"most": 0}, "Hi", ["503", "queue is full", "try again in 1 s"]),
        ({"explode_at": 3}, "Hi", ["boom"]),
    ],
)
def test_errors_are_shown_and_the_next_message_is_free_of_them(open_tab, fields, said, words):
    llm = FakeLLM(answer="Hello.", **fields)
    tab = open_tab(llm)
    tab.say(said)
    came = tab.answered()
    assert all(word in tab.shown(".error") for word in words)
    assert came == ("Hel" if "explode_at" in fields else "")
    llm.most, llm.explode_at = 100, None
    tab.say("Hi there")
    assert tab.answered() == "Hello."
    assert tab.page.locator(".turn:last-child .error").is_hidden()
    before = "<user>Hi<assistant>Hel" if came else ""
    assert bytes(llm.submitted[-1].prompt).decode() == before + "<user>Hi there<assistant>"


def test_a_server_that_goes_away_is_told(open_tab):
    tab = open_tab()
    tab.until("document.getElementById('light').dataset.state === 'ready'")
    tab.page.route("**/*", lambda route: route.abort())
    tab.say("Hi")
    tab.answered()
    assert "cannot be reached" in tab.shown(".error")
    tab.until("document.getElementById('light').dataset.state === 'unreachable'")


@pytest.mark.parametrize("width", [320, 400, 900, 1400])
def test_it_fits_any_width(open_tab, width):
    tab = open_tab(FakeLLM(answer="x" * 400), width=width)
    tab.say("y" * 300)
    tab.answered()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if width < 960:
        assert tab.page.locator("#settings").is_hidden()
        tab.page.click("#settings-button")
    assert tab.page.locator("#temperature").is_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_marked_text_is_told_and_its_tokens_are_coloured(open_tab):
    config = WatermarkConfig.read({"keys": [{"id": "mine", "key": 7}]})
    text = "".join(map(chr, marked(160, Scheme(key=7), seed=1, vocab=range(33, 127))))
    plain = "A person wrote this sentence by hand, and nobody has marked any of its words."
    tab = open_tab(FakeLLM(answer=plain, watermark=config), width=1200)
    tab.page.wait_for_selector("#mark-button:visible")
    tab.say("Hi")
    tab.answered()
    tab.page.click("#mark-button")
    tab.page.fill("#mark-text", plain + text + plain)
    tab.page.click("#mark-look")
    tab.until("document.querySelectorAll('.piece').length > 0")
    assert tab.shown("#mark-map") == plain + text + plain
    assert "Marked with key mine" in tab.shown("#mark-verdict")
    within = tab.page.evaluate("[...document.querySelectorAll('.piece')].map((p) => p.classList.contains('within'))")
    assert all(within[len(plain) + 12 : len(plain) + 148])
    assert not any(within[: len(plain) - 12] + within[len(plain) + 172 :])
    script = "[...document.querySelectorAll('.piece.within')].map((p) => +p.style.getPropertyValue('--s'))"
    heats = tab.page.evaluate(script)
    assert sum(heats) / len(heats) > 0.6
    tab.page.click("#mark-last")
    tab.until("document.getElementById('mark-verdict').textContent.startsWith('No mark')")
    assert tab.shown("#mark-map") == plain


def test_detection_is_offered_only_where_there_is_some(open_tab):
    config = WatermarkConfig.read({"keys": [{"id": "mine", "key": 7}]})
    for more in ({"llm": FakeLLM()}, {"llm": FakeLLM(watermark=config), "watermark_detection": "off"}):
        tab = open_tab(**more)
        tab.until("document.getElementById('model').textContent === 'tiny'")
        tab.page.wait_for_timeout(100)
        assert tab.page.locator("#mark-button").is_hidden()
    tab = open_tab(FakeLLM(watermark=config), watermark_detection="verdicts")
    tab.page.wait_for_selector("#mark-button:visible")
    tab.page.click("#mark-button")
    tab.page.fill("#mark-text", "Some text that is long enough to be looked at by anybody.")
    tab.page.click("#mark-look")
    tab.until("document.getElementById('mark-verdict').textContent.startsWith('No mark')")
    assert tab.page.locator(".piece").count() == 0
