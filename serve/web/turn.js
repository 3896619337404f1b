// One turn of the conversation: what the user said, and the answer as it arrives.

import { TokenText } from "./tokens.js";

const template = document.getElementById("turn-template");
const ENDS = {
  stop: "finished",
  length: "cut at the token limit",
  tool_calls: "calls a tool",
  content_filter: "filtered",
  stopped: "stopped",
};

export class Turn {
  constructor(user) {
    this.user = user;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.querySelector(".user p").textContent = user;
    this.answer = this.element.querySelector(".answer");
    this.body = this.answer.querySelector(":scope > .text");
    this.reset();
  }

  part(selector) {
    return this.answer.querySelector(selector);
  }

  /** Forget the answer, for another try. */
  reset() {
    this.part(".reasoning .text").replaceChildren();
    this.body.replaceChildren();
    this.part(".tools").replaceChildren();
    this.part(".reasoning").hidden = true;
    this.part(".error").hidden = true;
    this.part(".facts").textContent = "waiting for the first token";
    this.part(".copy").hidden = this.part(".again").hidden = true;
    this.body.classList.add("waiting");
    this.answer.setAttribute("aria-busy", "true");
    this.content = new TokenText(this.body);
    this.reasoning = new TokenText(this.part(".reasoning .text"));
    Object.assign(this, { calls: [], usage: null, end: null, chunks: 0, begun: performance.now(), first: null });
    this.current = this.content;
  }

  /** The messages this turn adds to a prompt; none where nothing was answered. */
  messages() {
    if (!this.content.text) return [];
    return [this.question(), { role: "assistant", content: this.content.text }];
  }

  question() {
    return { role: "user", content: this.user };
  }

  /** Take a chunk of the stream. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const { delta = {}, logprobs, finish_reason: end } of chunk.choices ?? []) {
      const tokens = [...(logprobs?.content ?? []), ...(logprobs?.refusal ?? [])];
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      const text = (delta.content ?? "") + (delta.refusal ?? "");
      if (thought) this.current = this.reasoning;
      else if (text) this.current = this.content;
      if (thought || text || tokens.length) this.#arrived();
      if (thought) this.#think(thought, text ? [] : tokens);
      if (text || (!thought && tokens.length)) (text ? this.content : this.current).push(text, tokens);
      for (const call of delta.tool_calls ?? []) this.#call(call);
      if (end) this.end = end;
    }
  }

  #arrived() {
    this.chunks += 1;
    this.first ??= performance.now();
    this.body.classList.remove("waiting");
    this.part(".facts").textContent = `${this.chunks} chunks · ${duration(performance.now() - this.begun)}`;
  }

  #think(text, tokens) {
    this.part(".reasoning").hidden = false;
    this.reasoning.push(text, tokens);
  }

  #call({ index = 0, function: named = {} }) {
    this.first ??= performance.now();
    this.body.classList.remove("waiting");
    this.calls[index] ??= this.#toolBox();
    const [name, args] = this.calls[index].children;
    name.textContent += named.name ?? "";
    args.textContent += named.arguments ?? "";
  }

  #toolBox() {
    const box = document.createElement("div");
    box.className = "tool";
    box.append(document.createElement("strong"), document.createElement("pre"));
    this.part(".tools").append(box);
    return box;
  }

  /** The answer ends: as the stream said, by the user (`stopped`), or by an error. Returns what to tell the user. */
  finish({ stopped = false, error = null } = {}) {
    this.content.finish();
    this.reasoning.finish();
    for (const text of this.element.querySelectorAll(".text")) {
      const first = text.querySelector(".token");
      if (first) first.tabIndex = 0;
    }
    this.body.classList.remove("waiting");
    if (stopped) this.end = "stopped";
    if (error) {
      this.end = "failed";
      this.part(".error").textContent = describe(error);
      this.part(".error").hidden = false;
    }
    this.part(".facts").textContent = this.#facts();
    this.part(".copy").hidden = !this.content.text;
    this.answer.setAttribute("aria-busy", "false");
    return error ? `Error: ${describe(error)}` : `Answer ${ENDS[this.end] ?? "finished"}.`;
  }

  #facts() {
    const facts = [];
    const made = this.usage?.completion_tokens;
    if (made !== undefined) {
      facts.push(`${made} tokens`, `prompt ${this.usage.prompt_tokens}`);
      const seconds = (performance.now() - this.first) / 1000;
      if (made > 1 && this.first !== null) facts.push(`${((made - 1) / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`);
    }
    if (made === undefined && this.chunks) facts.push(`${this.chunks} chunks`);
    if (this.first !== null) facts.push(`first after ${duration(this.first - this.begun)}`);
    if (this.end) facts.push(ENDS[this.end] ?? this.end);
    return facts.join(" · ");
  }
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** An error in a sentence: its status and field, where it has them. */
function describe(error) {
  const field = error.param && !error.message.includes(error.param) ? ` (field ${error.param})` : "";
  return `${error.status >= 400 ? `${error.status}: ` : ""}${error.message}${field}`;
}
