// The official npm client against a running server: node try_openai.mjs URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const question = "What is the capital of France?";
const messages = [{ role: "system", content: "You are helpful." }, { role: "user", content: question }];
const short = { model, max_tokens: 24, temperature: 0 };
const weather = {
  name: "get_weather",
  description: "The weather in a city, today.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
    required: ["city", "unit"],
    additionalProperties: false,
  },
};
// A small model that may call once more never stops doing so.
const oneCall = {
  model,
  max_tokens: 200,
  temperature: 0,
  tools: [{ type: "function", function: weather }],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const city = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, size: { enum: ["small", "large"] } },
  required: ["name", "size"],
  additionalProperties: false,
};

function checkWeather(text) {
  const found = JSON.parse(text);
  assert.deepEqual(Object.keys(found).sort(), ["city", "unit"]);
  assert.ok(["celsius", "fahrenheit"].includes(found.unit));
  return text;
}

function checkCity(text) {
  const found = JSON.parse(text);
  assert.deepEqual(Object.keys(found).sort(), ["name", "size"]);
  return found;
}

const checks = {
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert.ok(ids.includes(model));
    return (await client.models.retrieve(model)).id;
  },
  async chat() {
    const answer = await client.chat.completions.create({ ...short, messages });
    assert.ok(answer.usage.completion_tokens <= 24);
    return answer.choices[0].message.content;
  },
  async "chat with fields of no effect"() {
    const answer = await client.chat.completions.create({
      ...short, messages, store: false, metadata: { a: "b" }, service_tier: "auto", parallel_tool_calls: true, user: "z",
      response_format: { type: "text" }, n: 1, logit_bias: {}, presence_penalty: 0, frequency_penalty: 0, stop: null,
    });
    return answer.choices[0].message.content;
  },
  async "chat streamed"() {
    const whole = await client.chat.completions.create({ ...short, messages });
    const asked = { ...short, messages, stream: true, stream_options: { include_usage: true } };
    const ids = new Set();
    let text = "", usage = null, reason = null;
    for await (const chunk of await client.chat.completions.create(asked)) {
      ids.add(chunk.id);
      usage = chunk.usage ?? usage;
      text += chunk.choices[0]?.delta.content ?? "";
      reason = chunk.choices[0]?.finish_reason ?? reason;
    }
    assert.equal(ids.size, 1);
    assert.deepEqual(usage, whole.usage);
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(reason, whole.choices[0].finish_reason);
    return text;
  },
  async "chat by the stream helper"() {
    const stream = client.chat.completions.stream({ ...short, messages });
    let text = "";
    stream.on("content", (piece) => (text += piece));
    assert.equal(await stream.finalContent(), text);
    return text;
  },
  async "chat parsed"() {
    const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: city } };
    const answer = await client.chat.completions.parse({ ...short, max_tokens: 200, messages, response_format: format });
    return checkCity(answer.choices[0].message.content);
  },
  async "tool called"() {
    const answer = await client.chat.completions.create({ ...oneCall, messages });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    return checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async "tool called while streamed"() {
    const stream = client.chat.completions.stream({ ...oneCall, messages });
    const call = await stream.finalFunctionToolCall();
    return checkWeather(call.arguments);
  },
  async "tools run by the client"() {
    const runner = client.chat.completions.runTools({
      ...oneCall,
      messages,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [{
        type: "function",
        function: { ...weather, parse: JSON.parse, function: ({ city }) => `Rain in ${city}` },
      }],
    }, { maxChatCompletions: 2 });
    await runner.done();
    return await runner.finalFunctionToolCallResult();
  },
  async completions() {
    const answer = await client.completions.create({ ...short, prompt: ["The sky is", "Grass is"], max_tokens: 4 });
    assert.equal(answer.choices.length, 2);
    let text = "";
    for await (const chunk of await client.completions.create({ ...short, prompt: "The sky is", stream: true })) {
      text += chunk.choices[0].text;
    }
    return text;
  },
  async responses() {
    const answer = await client.responses.create({ model, input: question, max_output_tokens: 24, temperature: 0 });
    assert.ok(answer.output_text);
    return answer.output_text;
  },
  async "responses streamed"() {
    const stream = client.responses.stream({ model, input: question, max_output_tokens: 24, temperature: 0 });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal((await stream.finalResponse()).output_text, text);
    return text;
  },
  async "responses parsed"() {
    const format = { type: "json_schema", name: "city", strict: true, schema: city };
    const asked = { model, input: question, max_output_tokens: 200, temperature: 0, text: { format } };
    return checkCity((await client.responses.parse(asked)).output_text);
  },
  async "responses with a tool"() {
    const tools = [{ type: "function", strict: true, ...weather }];
    const asked = { model, input: question, tools, tool_choice: "required", max_output_tokens: 200, temperature: 0 };
    const answer = await client.responses.create({ ...asked, parallel_tool_calls: false });
    return checkWeather(answer.output.find((item) => item.type === "function_call").arguments);
  },
  async refusals() {
    await assert.rejects(client.embeddings.create({ model, input: "Hi" }), OpenAI.NotFoundError);
    await assert.rejects(client.completions.create({ model: "no", prompt: "Hi" }), OpenAI.NotFoundError);
    const bad = client.chat.completions.create({ ...short, messages, temperature: -1 });
    await assert.rejects(bad, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    return "404, 404, 400";
  },
  async "an abandoned stream"() {
    const stream = await client.chat.completions.create({ ...short, messages, stream: true, max_tokens: 500 });
    for await (const _ of stream) break;
    return await checks.chat();
  },
};

console.log(`openai ${VERSION} (npm)`);
for (const [name, check] of Object.entries(checks)) {
  console.log(`  ${name}: ${JSON.stringify(await check())}`.slice(0, 118));
}
