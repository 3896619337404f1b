// Was a text marked by this server? Its tokens are coloured by how much they speak for the mark.

import { request } from "./api.js";
import { label } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const [dialog, form, verdict, map] = [byId("mark-dialog"), byId("mark-form"), byId("mark-verdict"), byId("mark-map")];

let scores = false; // whether the server tells more than its verdict
let asked = 0;

/** 10 to a power, as people write it: 0.013, or 4.2 × 10⁻⁹. */
function chance(log10) {
  if (log10 > -3) return (10 ** log10).toPrecision(2);
  const power = Math.floor(log10);
  const digits = [...String(power)].map((sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(sign)]));
  return `${(10 ** (log10 - power)).toFixed(1)} × 10${digits.join("")}`;
}

function sentence(found) {
  const counted = `${found.num_scored_tokens} of ${found.num_tokens} tokens counted`;
  const start = found.is_watermarked ? "Marked" : found.enough_evidence ? `No mark found in ${found.num_streams} streams of each key` : "Too short to tell";
  if (found.log10_p_value === undefined) return `${start}: ${counted}.`;
  const under = found.is_watermarked ? ` with key ${found.key}` : "";
  return `${start}${under}: ${counted}, and chance alone does as well with probability ${chance(found.log10_p_value)}.`;
}

/** A token's share of the colour: what chance gives to one token in two has none. */
function heat(score) {
  const unlikely = 1 - Math.exp(-score);
  return Math.max(0, 2 * unlikely - 1).toFixed(3);
}

/** One token; `within` says whether it lies in a stretch that is marked as a whole. */
function piece(token, within) {
  const span = document.createElement("span");
  span.className = token.score === null ? "piece unscored" : "piece";
  span.classList.toggle("within", within);
  span.textContent = token.text;
  span.title = `${label({ token: token.text })}: ${token.score === null ? "came before, not counted" : token.score.toFixed(2)}`;
  if (token.score !== null) span.style.setProperty("--s", heat(token.score));
  return span;
}

function show(found) {
  verdict.textContent = sentence(found);
  verdict.dataset.marked = String(found.is_watermarked);
  const inside = (place) => (found.spans ?? []).some((span) => span.start <= place && place < span.end);
  map.replaceChildren(...(found.tokens ?? []).map((token, place) => piece(token, inside(place))));
}

async function look() {
  const turn = ++asked;
  const key = byId("mark-key").value;
  const body = { text: byId("mark-text").value, return_token_scores: scores, return_spans: scores };
  if (key) body.keys = [key];
  verdict.textContent = "Looking.";
  delete verdict.dataset.marked;
  map.replaceChildren();
  try {
    const reply = await request("v1/watermark/detect", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const answer = await reply.json();
    if (turn === asked) show(answer.data[0]);
  } catch (error) {
    if (turn === asked) verdict.textContent = error.message;
  }
}

/** Offer detection where the server has keys and tells what it finds. */
export async function showMark(key) {
  try {
    const known = await (await request("v1/watermark/keys", { key })).json();
    scores = known.detection === "scores";
    byId("mark-button").hidden = !known.keys.length || known.detection === "off";
    const all = new Option("all", "");
    byId("mark-key").replaceChildren(all, ...known.keys.map((id) => new Option(id, id)));
  } catch {
    byId("mark-button").hidden = true;
  }
}

/** `lastAnswer` gives the text of the last answer of the conversation. */
export function startMark(lastAnswer) {
  byId("mark-button").addEventListener("click", () => {
    byId("mark-last").disabled = !lastAnswer();
    dialog.showModal();
  });
  byId("mark-close").addEventListener("click", () => dialog.close());
  byId("mark-last").addEventListener("click", () => {
    byId("mark-text").value = lastAnswer();
    look();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
}
