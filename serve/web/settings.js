// The controls beside the chat: remembered between visits, and turned into the fields of a request.

const STORE = "jaxserve.settings";
const form = document.getElementById("settings");
const schemaError = document.getElementById("schema-error");

/** What asks for nothing, so that it need not be sent: the server's own defaults. */
const NEUTRAL = { temperature: 1, top_p: 1, min_p: 0, repetition_penalty: 1 };
const WHOLE = ["top_k", "max_tokens", "seed"];

const field = (name) => form.elements.namedItem(name);
const fields = () => [...form.elements].filter((element) => element.name);
const valueOf = (element) => (element.type === "checkbox" ? element.checked : element.value);

function remember() {
  const values = Object.fromEntries(fields().map((element) => [element.name, valueOf(element)]));
  try {
    localStorage.setItem(STORE, JSON.stringify(values));
  } catch {
    // Private windows may have no storage; the settings then last as long as the page.
  }
}

function restore() {
  let values = {};
  try {
    values = JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return;
  }
  for (const element of fields()) {
    const value = values[element.name];
    if (element.type === "checkbox") element.checked = value === true;
    else if (typeof value === "string") element.value = value;
  }
}

/** Show slider values, the schema's fault and whether tokens are coloured. */
function show() {
  for (const output of form.querySelectorAll("output")) {
    output.value = Number(field(output.htmlFor.value).value).toFixed(2);
  }
  document.body.classList.toggle("show-logprobs", field("logprobs").checked);
  try {
    schema();
    schemaError.textContent = "";
  } catch (error) {
    schemaError.textContent = error.message;
  }
  field("schema").setAttribute("aria-invalid", String(schemaError.textContent !== ""));
}

/** The schema as an object, null where none is given. Raises Error with a sentence for the user. */
function schema() {
  const text = field("schema").value.trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Error("The schema must be a JSON object.");
  }
  return value;
}

/** A whole number as JSON prints it. Raises Error that names the field. */
function whole(name) {
  const input = field(name);
  if (input.value === "" && !input.validity.badInput) return null;
  const value = Number(input.value);
  if (!input.validity.valid || !Number.isSafeInteger(value)) {
    const label = form.querySelector(`label[for=${name}]`).textContent;
    throw new Error(`${label} must be a whole number${input.min && ` from ${input.min} on`}.`);
  }
  return value;
}

/** The lines of the stop box, with \n, \t, \r and \\ read as in most programming languages. */
function stops() {
  const signs = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  const lines = field("stop").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([ntr\\])/g, (_, sign) => signs[sign]));
}

/** The request fields that the controls ask for. Raises Error with a sentence for the user. */
export function requestFields() {
  const found = {};
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = Number(field(name).value);
    if (value !== neutral) found[name] = value;
  }
  for (const name of WHOLE) {
    const value = whole(name);
    if (value !== null) found[name] = value;
  }
  if (stops().length) found.stop = stops();
  const wanted = schema();
  if (wanted) {
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted, strict: true } };
  }
  if (field("logprobs").checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  return found;
}

export function systemMessages() {
  const content = field("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

export function startSettings() {
  restore();
  show();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    show();
    remember();
  });
  document.getElementById("defaults").addEventListener("click", () => {
    form.reset();
    show();
    remember();
  });
}
