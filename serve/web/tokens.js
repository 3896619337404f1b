// Text that arrives in pieces, and the tokens it is made of.
//
// The server sends text and tokens in the same chunks, but they need not end together: a character may be spread over
// several tokens, text is held back while it may become a stop string, and special tokens are in no text at all. What
// is shown as text is always exactly the text that was sent; tokens are laid over it where they match.

const encoder = new TextEncoder();
const decoder = new TextDecoder();
const graphemes = new Intl.Segmenter(undefined, { granularity: "grapheme" });

const RESYNC = 16; // characters to look ahead where text and tokens disagree

/** How many bytes at the end begin a character that is not whole yet. */
export function unfinished(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) === 0x80) continue;
    const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

/** Whether two pieces of text meet inside of what a reader sees as one character (an accent, a flag, a family). */
function meetsInside(before, after) {
  if (!before || !after || after.codePointAt(0) < 0x300) return false;
  const tail = before.slice(-32);
  return graphemes.segment(tail + after).containing(tail.length).index !== tail.length;
}

const bytesOf = (token) => token.bytes ?? [...encoder.encode(token.token)];

/** One element of a message: plain text, or spans that each know their tokens (`tokensOf`). */
export class TokenText {
  #element;
  #text = "";
  #shown = 0; // characters of #text that are on the page
  #groups = []; // whole characters with their tokens, not laid over the text yet
  #open = { bytes: [], tokens: [] }; // tokens whose last character is not whole
  #last = null; // the last piece, if it is a token's span

  constructor(element) {
    this.#element = element;
  }

  get text() {
    return this.#text;
  }

  /** Take a chunk: its text, and its tokens as the API describes them (none where they were not asked for). */
  push(text, tokens = []) {
    for (const token of tokens) {
      this.#open.tokens.push(token);
      this.#open.bytes.push(...bytesOf(token));
      if (!unfinished(this.#open.bytes)) this.#closeGroup();
    }
    this.#text += text;
    this.#settle(false);
  }

  /** No more will come: what is still held shows as it is. */
  finish() {
    if (this.#open.tokens.length) this.#closeGroup();
    this.#settle(true);
  }

  #closeGroup() {
    const { bytes, tokens } = this.#open;
    this.#groups.push({ text: decoder.decode(new Uint8Array(bytes)), tokens });
    this.#open = { bytes: [], tokens: [] };
  }

  #settle(end) {
    while (this.#groups.length && this.#lay(this.#groups[0], end)) this.#groups.shift();
    if (end || (!this.#groups.length && !this.#open.tokens.length)) this.#plain(this.#text.length);
  }

  /** Lay a group over the text that comes next. False where more text must come first. */
  #lay(group, end) {
    const rest = this.#text.slice(this.#shown);
    const stripped = this.#shown === 0 && /^\S/.test(rest); // some tokenizers begin with a space that no text has
    const text = stripped ? group.text.trimStart() : group.text;
    if (text && rest.startsWith(text)) return this.#span(text, group.tokens);
    if (text.startsWith(rest) && text) {
      if (!end) return false;
      return rest ? this.#span(rest, group.tokens) : this.#ghost(group);
    }
    const ahead = text ? rest.slice(0, RESYNC + text.length).indexOf(text) : -1;
    if (ahead < 0) return this.#ghost(group);
    this.#plain(this.#shown + ahead);
    return this.#span(text, group.tokens);
  }

  #plain(until) {
    if (until <= this.#shown) return;
    this.#element.append(this.#text.slice(this.#shown, until));
    this.#shown = until;
    this.#last = null;
  }

  #span(text, tokens) {
    this.#shown += text.length;
    if (this.#last && meetsInside(this.#last.textContent, text)) {
      this.#last.textContent += text;
      dress(this.#last, [...tokensOf(this.#last), ...tokens]);
    } else {
      this.#last = dress(document.createElement("span"), tokens);
      this.#last.textContent = text;
      this.#element.append(this.#last);
    }
    return true;
  }

  /** A token that is in no text, such as the one that ends the answer: shown only beside coloured tokens. */
  #ghost({ text, tokens }) {
    const span = dress(document.createElement("span"), tokens);
    span.classList.add("ghost");
    span.textContent = visible(text || tokens.map((token) => token.token).join(""));
    this.#element.append(span);
    return true;
  }
}

const owned = new WeakMap();

export const tokensOf = (span) => owned.get(span);

/** Make a span a token's: how sure the model was becomes its colour (`--p`, from 0 to 1). */
function dress(span, tokens) {
  owned.set(span, tokens);
  const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
  span.className = "token";
  span.tabIndex = -1;
  span.style.setProperty("--p", Math.exp(logprob).toFixed(3));
  return span;
}

/** A token's text with its spaces and line ends to be seen; bytes that are no character in hexadecimal. */
export function label(token) {
  const bytes = bytesOf(token);
  const text = decoder.decode(new Uint8Array(bytes));
  if (!text.includes("\ufffd")) return visible(text || token.token) || "(nothing)";
  return bytes.map((byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join(" ");
}

function visible(text) {
  const signs = { " ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥" };
  const edges = /^ +| +$|[\n\r\t]/g;
  const shown = text.replace(edges, (found) => [...found].map((sign) => signs[sign]).join(""));
  return shown.replace(/\p{Cc}/gu, (sign) => `\\x${sign.charCodeAt(0).toString(16).padStart(2, "0")}`);
}
