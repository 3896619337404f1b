// The engine's gauges, from /metrics once a second while the page can be seen, and the light that says how it is.

import { request, storedKey } from "./api.js";

const SAMPLES = 60;
const SECOND = 1000;
const HEALTH_EVERY = 5; // polls of the gauges

const section = document.getElementById("engine");
const light = document.getElementById("light");
const template = document.getElementById("tile-template");
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Sums of all samples by the name behind its prefix (`jaxserve:` or any other). */
export function parseMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const found = /^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (!found) continue;
    const name = found[1].slice(found[1].lastIndexOf(":") + 1);
    const value = Number(found[2]);
    if (Number.isFinite(value)) sums.set(name, (sums.get(name) ?? 0) + value);
  }
  return sums;
}

/** A value by its name, or by its name behind a prefix without a colon; null where it is not there. */
function read(sums, name) {
  if (sums.has(name)) return sums.get(name);
  for (const [key, value] of sums) if (key.endsWith(`_${name}`)) return value;
  return null;
}

/** Growth per second of a counter since the poll before; a restarted server counts anew from nothing. */
class Rate {
  #value = null;
  #time = 0;

  next(value, time) {
    const grown = this.#value === null || value < this.#value ? 0 : value - this.#value;
    const seconds = (time - this.#time) / SECOND;
    const first = this.#value === null;
    [this.#value, this.#time] = [value, time];
    return first || seconds <= 0 ? 0 : grown / seconds;
  }
}

class Tile {
  #history = [];

  constructor(name, floor) {
    this.floor = floor; // what the line's full height stands for at least
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.querySelector(".name").textContent = name;
    section.append(this.element);
  }

  show(value, text, note = "") {
    this.element.querySelector(".value").textContent = value === null ? "–" : text;
    this.element.querySelector(".note").textContent = note;
    this.#history = [...this.#history, value ?? 0].slice(-SAMPLES);
    this.#draw();
  }

  #draw() {
    const most = Math.max(this.floor, ...this.#history);
    const left = SAMPLES - this.#history.length;
    const points = this.#history.map((value, i) => `${left + i + 0.5},${(19 - (value / most) * 17).toFixed(2)}`);
    const line = `M${points.join("L")}`;
    this.element.querySelector(".line").setAttribute("d", line);
    this.element.querySelector(".area").setAttribute("d", `${line}V20H${left + 0.5}Z`);
  }
}

const rates = { made: new Rate(), read: new Rate() };
let tiles = null;
let limits = null; // slots and pages, from the start-up report

function makeTiles() {
  return {
    running: new Tile("Slots in use", 4),
    waiting: new Tile("Waiting", 4),
    pages: new Tile("KV pages", 0.1),
    made: new Tile("Tokens/s", 10),
    read: new Tile("Prompt tokens/s", 50),
    preemptions: new Tile("Preemptions", 4),
  };
}

async function readLimits() {
  const report = await (await request("v1/engine/report")).json();
  return { slots: report.limits?.max_num_seqs, pages: report["kv cache"]?.pages };
}

const speed = (value) => (value > 0 && value < 100 ? value.toFixed(1) : whole.format(value));

function showGauges(sums, time) {
  const running = read(sums, "num_requests_running");
  const usage = read(sums, "kv_cache_usage_perc");
  const { slots, pages } = limits;
  tiles.running.show(running, whole.format(running), slots ? `of ${slots}` : "");
  const waiting = read(sums, "num_requests_waiting");
  tiles.waiting.show(waiting, whole.format(waiting), "in the queue");
  const held = pages ? `${whole.format(Math.round(usage * pages))} of ${whole.format(pages)}` : "";
  tiles.pages.show(usage, `${(usage * 100).toFixed(usage > 0 && usage < 0.1 ? 1 : 0)} %`, held);
  for (const [name, counter] of [["made", "generation_tokens_total"], ["read", "prompt_tokens_total"]]) {
    const total = read(sums, counter);
    const rate = rates[name].next(total ?? 0, time);
    tiles[name].show(total === null ? null : rate, speed(rate), total === null ? "" : `${whole.format(total)} in all`);
  }
  const preemptions = read(sums, "num_preemptions_total");
  tiles.preemptions.show(preemptions, whole.format(preemptions), "since the start");
}

/** The server's own word for how it is, and "unreachable". */
function showState(state) {
  light.dataset.state = state.replace(" ", "-");
  const text = light.querySelector("span");
  const shown = state === "dead" ? "engine stopped" : state;
  if (text.textContent !== shown) text.textContent = shown;
}

async function statusOf(path) {
  try {
    const reply = await fetch(path, { cache: "no-store" });
    return (await reply.json()).status ?? (reply.ok ? "ok" : "unwell");
  } catch {
    return "unreachable";
  }
}

let state = null;
let whenReady = null;

async function checkHealth() {
  const health = await statusOf("health");
  const found = health === "ok" ? await statusOf("ready") : health;
  showState(found);
  if (found === "ready" && state !== "ready") whenReady();
  state = found;
}

let polls = 0;
let refused = null; // the key that opens nothing: not to be tried every second

async function poll() {
  if (polls++ % HEALTH_EVERY === 0) await checkHealth();
  if (refused === storedKey()) return;
  try {
    limits ??= await readLimits();
    const text = await (await request("metrics", { headers: { Accept: "text/plain" } })).text();
    showGauges(parseMetrics(text), performance.now());
    section.classList.remove("stale");
    refused = null;
  } catch (error) {
    section.classList.add("stale");
    limits = null; // after a restart they may be others
    if (error.status === 401) refused = storedKey();
    if (error.status === 0) polls = 0;
  }
}

let timer = null;

/** Poll now and every second from now on, for as long as the page is visible. */
async function run() {
  clearTimeout(timer);
  if (document.hidden) return;
  const begun = performance.now();
  await poll();
  clearTimeout(timer);
  timer = setTimeout(run, Math.max(0, SECOND - (performance.now() - begun)));
}

/** `onReady` is called whenever the server has become ready, also at first. */
export function startEngine(onReady) {
  whenReady = onReady;
  tiles = makeTiles();
  document.addEventListener("visibilitychange", run);
  run();
}
