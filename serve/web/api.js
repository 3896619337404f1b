// Talking to the server: the key, requests, errors, and the events of a streamed answer.
// All addresses are relative, so the page also works behind a proxy that adds a path.

const KEY = "jaxserve.key";

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function storeKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Without storage the key holds for no longer than the request that it was typed for.
  }
}

/** What the server, or the way to it, has against a request. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** An error object as the server writes it, `{message, param, code}`, as an ApiError. */
function fromObject(status, error) {
  const message = typeof error === "string" ? error : error?.message;
  return new ApiError(status, message || `The server answered ${status}.`, error ?? {});
}

async function failure(reply) {
  let error = null;
  try {
    error = (await reply.json()).error;
  } catch {
    // Not our server's error object: a proxy's page, or a connection cut short.
  }
  const found = fromObject(reply.status, error);
  const wait = reply.headers.get("Retry-After");
  if (reply.status === 503 && wait) found.message += ` (try again in ${wait} s)`;
  return found;
}

/** `fetch` with the key. Raises ApiError for whatever is no success, and AbortError where `signal` says so. */
export async function request(path, { key = storedKey(), ...options } = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!reply.ok) throw await failure(reply);
  return reply;
}

/** The `data` of every server-sent event in a body, however its bytes are cut into chunks. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A carriage return that ends the chunk may be half of a line's end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a chat completion. Raises ApiError, also for an error that comes in mid-stream. */
export async function* streamChat(body, signal) {
  const reply = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of eventsOf(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw fromObject(reply.status, chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke in the middle of the answer.");
  }
  throw new ApiError(0, "The answer broke off before its end.");
}
