// The card that shows, for the token under the pointer or the focus, what else the model might have said.

import { label, tokensOf } from "./tokens.js";

const card = document.getElementById("alternatives");
const MARGIN = 8;

function create(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function percent(probability) {
  if (probability >= 0.9995) return "100 %";
  return probability < 0.001 ? "< 0.1 %" : `${(probability * 100).toFixed(1)} %`;
}

function row(entry, chosen) {
  const line = create("div", chosen ? "choice chosen" : "choice");
  const probability = Math.exp(entry.logprob);
  line.style.setProperty("--share", probability.toFixed(4));
  line.append(create("span", "what", label(entry)), create("span", "chance", percent(probability)));
  if (chosen) line.append(create("span", "hidden", " (chosen)"));
  return line;
}

const same = (one, other) => one.token === other.token && String(one.bytes) === String(other.bytes);

/** The alternatives at one token, the likeliest first, and the chosen one wherever it ranks. */
function table(token) {
  const top = token.top_logprobs ?? [];
  const block = create("div", "choices");
  block.append(...top.map((entry) => row(entry, same(entry, token))));
  if (!top.some((entry) => same(entry, token))) block.append(row(token, true));
  return block;
}

function place(span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(MARGIN, at.left), document.documentElement.clientWidth - width - MARGIN);
  const above = at.top - height - 6;
  card.style.left = `${left}px`;
  card.style.top = `${above >= MARGIN ? above : at.bottom + 6}px`;
}

let current = null;

function show(span) {
  if (!document.body.classList.contains("show-logprobs") || span === current) return;
  hide();
  current = span;
  span.setAttribute("aria-describedby", card.id);
  card.replaceChildren(...tokensOf(span).map(table));
  card.hidden = false;
  place(span);
}

function hide() {
  current?.removeAttribute("aria-describedby");
  current = null;
  card.hidden = true;
}

const tokenAt = (event) => event.target.closest?.(".token");

/** Arrow keys walk along a message's tokens, so that each message is one stop for the tab key. */
function walk(event) {
  const span = tokenAt(event);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") hide();
  if (!span || !step) return;
  const spans = [...span.parentElement.querySelectorAll(".token")];
  const next = spans[spans.indexOf(span) + step];
  if (!next) return;
  event.preventDefault();
  span.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/** Show alternatives for the tokens anywhere in `root`. */
export function startAlternatives(root) {
  root.addEventListener("pointerover", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", (event) => tokenAt(event) && show(tokenAt(event)));
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", walk);
  root.parentElement.addEventListener("scroll", hide);
  addEventListener("resize", hide);
}
