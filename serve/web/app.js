// The page as a whole: the conversation, the message box, and the key.

import { startAlternatives } from "./alternatives.js";
import { ApiError, request, storedKey, storeKey, streamChat } from "./api.js";
import { startEngine } from "./engine.js";
import { showMark, startMark } from "./mark.js";
import { requestFields, startSettings, systemMessages } from "./settings.js";
import { Turn } from "./turn.js";

const byId = (id) => document.getElementById(id);
const [input, send, stop, scroll] = [byId("input"), byId("send"), byId("stop-button"), byId("scroll")];

let turns = [];
let running = null; // the AbortController of the answer under way

// The conversation.

function prompt(turn) {
  const before = turns.slice(0, turns.indexOf(turn));
  return [...systemMessages(), ...before.flatMap((one) => one.messages()), turn.question()];
}

const atBottom = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
const toBottom = () => (scroll.scrollTop = scroll.scrollHeight);

/** Change the conversation, and stay at its end if that is where the user is. */
function following(change) {
  const follow = atBottom();
  change();
  if (follow) toBottom();
}

/** Shows chunks as they come, but no oftener than the page can bear: a long answer takes long to lay out. */
class Painter {
  #waiting = [];
  #timer = null;
  #pause = 16; // milliseconds

  constructor(turn) {
    this.turn = turn;
  }

  add(chunk) {
    this.#waiting.push(chunk);
    this.#timer ??= setTimeout(() => this.flush(), this.#pause);
  }

  flush() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const begun = performance.now();
    following(() => this.#waiting.forEach((chunk) => this.turn.take(chunk)));
    this.#waiting = [];
    this.#pause = Math.max(16, 4 * (performance.now() - begun));
  }
}

/** Ask for a turn's answer, and show it as it comes. */
async function answer(turn) {
  const controller = (running = new AbortController());
  turn.reset();
  showButtons();
  toBottom();
  let outcome = {};
  const painter = new Painter(turn);
  try {
    const messages = prompt(turn);
    for await (const chunk of streamChat({ messages, ...requestFields() }, controller.signal)) painter.add(chunk);
  } catch (error) {
    outcome = error.name === "AbortError" ? { stopped: true } : { error };
    if (error instanceof ApiError && error.status === 401) askForKey(error);
  }
  painter.flush();
  following(() => (byId("status").textContent = turn.finish(outcome)));
  if (running === controller) running = null;
  showButtons();
}

function say(text) {
  const turn = new Turn(text);
  turn.part(".again").addEventListener("click", () => running || answer(turn));
  turn.part(".copy").addEventListener("click", () => copy(turn));
  turns.push(turn);
  byId("turns").append(turn.element);
  byId("status").textContent = "Answering.";
  answer(turn);
}

async function copy(turn) {
  const button = turn.part(".copy");
  try {
    await navigator.clipboard.writeText(turn.content.text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function clear() {
  running?.abort();
  turns = [];
  byId("turns").replaceChildren();
  byId("status").textContent = "The conversation is cleared.";
  showButtons();
  input.focus();
}

/** What can be pressed now: only the last answer can be made anew. */
function showButtons() {
  const hadFocus = [send, stop].includes(document.activeElement);
  send.disabled = input.value.trim() === "";
  send.hidden = running !== null;
  stop.hidden = running === null;
  if (hadFocus) (running ? stop : input).focus();
  byId("clear").disabled = turns.length === 0;
  byId("empty").hidden = turns.length > 0;
  for (const turn of turns) turn.part(".again").hidden = running !== null || turn !== turns.at(-1);
}

function submit() {
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  say(text);
}

function startComposer() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  input.addEventListener("input", showButtons);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  addEventListener("keydown", (event) => event.key === "Escape" && !byId("key-dialog").open && running?.abort());
  stop.addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  showButtons();
}

// The key, and what it opens.

function askForKey(error = null) {
  const dialog = byId("key-dialog");
  byId("key-error").textContent = error && storedKey() ? "The server refuses this key." : "";
  byId("key-button").hidden = false;
  if (!dialog.open) dialog.showModal();
}

/** Try a key; it is kept where the server takes it. */
async function tryKey(key) {
  try {
    await connect(key);
    storeKey(key);
    byId("key-dialog").close();
    input.focus();
  } catch (error) {
    byId("key-error").textContent = error.status === 401 ? "The server refuses this key." : error.message;
  }
}

/** Learn the model's name, which also shows whether the key is right. Raises ApiError. */
async function connect(key = storedKey()) {
  const models = await (await request("v1/models", { key })).json();
  const model = models.data[0].id;
  byId("model").textContent = model;
  document.title = `${model} · jaxserve`;
  showMark(key);
}

async function greet() {
  try {
    await connect();
  } catch (error) {
    if (error.status === 401) askForKey(error);
  }
}

function startKey() {
  byId("key-button").hidden = !storedKey();
  byId("key-button").addEventListener("click", () => askForKey());
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    tryKey(byId("key").value.trim());
  });
}

function startPanel() {
  const button = byId("settings-button");
  button.addEventListener("click", () => {
    const open = document.body.classList.toggle("settings-open");
    button.setAttribute("aria-expanded", String(open));
  });
}

startSettings();
startComposer();
startKey();
startPanel();
startMark(() => turns.at(-1)?.content.text ?? "");
startAlternatives(byId("turns"));
startEngine(greet);
