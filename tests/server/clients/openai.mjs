// Sends requests with OpenAI's client for Node; prints what its types make of the answers as JSON, one entry a case.
// Arguments: the address of the API, and as JSON the model, the prompt, the fields that all requests share, and a
// regular expression of an answer with a tool call.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, given] = process.argv.slice(2);
const { model, prompt, seeded, answer: regex } = JSON.parse(given);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const completion = { model, prompt, ...seeded };
const chat = { model, messages, ...seeded };
const usage = { stream: true, stream_options: { include_usage: true } };
const Agreed = z.object({ agreed: z.boolean(), x: z.union([z.literal(1), z.literal(2)]) });
const parameters = {
  type: "object", properties: { x: { enum: [1, 2] } }, required: ["x"], additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "f", parameters } }];

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function errorOf(promise) {
  try {
    return { answer: await promise };
  } catch (error) {
    const { status, param, code, type, message } = error;
    return { kind: error.constructor.name, status, param, code, type, message };
  }
}

const cases = {
  models: async () => (await client.models.list()).data,
  completion: () => client.completions.create(completion),
  completion_stream: async () => all(await client.completions.create({ ...completion, ...usage })),
  completions_n: () => client.completions.create({ ...completion, prompt: [prompt, prompt], n: 2, logprobs: 1 }),
  chat: () => client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 }),
  chat_stream: async () => all(await client.chat.completions.create({ ...chat, ...usage })),
  chat_helper: async () => {
    const pieces = [];
    const stream = client.chat.completions.stream({ ...chat, ...usage });
    stream.on("content", (piece) => pieces.push(piece));
    const completion = await stream.finalChatCompletion();
    return { pieces, content: await stream.finalContent(), usage: await stream.totalUsage(), completion };
  },
  parsed: async () => {
    const format = { response_format: zodResponseFormat(Agreed, "agreed") };
    const whole = await client.chat.completions.parse({ ...chat, ...format });
    const streamed = await client.chat.completions.stream({ ...chat, ...format }).finalChatCompletion();
    return [whole, streamed].map((one) => one.choices[0].message.parsed);
  },
  run_tools: async () => {
    const taken = [];
    const run = (args) => { taken.push(args); return `got ${args.x}`; };
    const tool = { type: "function", function: { ...tools[0].function, function: run, parse: JSON.parse } };
    const tool_choice = { type: "function", function: { name: "f" } };
    const results = [];
    for (const more of [{}, { stream: true }]) {
      const runner = client.chat.completions.runTools({ ...chat, ...more, tools: [tool], tool_choice });
      results.push(await runner.finalFunctionToolCallResult());
    }
    return { taken, results };
  },
  calls: async () => {
    const request = { ...chat, tools, structured_outputs: { regex } };
    const whole = await client.chat.completions.create(request);
    const streamed = await client.chat.completions.stream(request).finalChatCompletion();
    return [whole.choices[0], streamed.choices[0]];
  },
  conversation: async () => {
    const call = { id: "call_1", type: "function", function: { name: "f", arguments: '{"x": 1}' } };
    const more = [
      { role: "assistant", content: null, refusal: null, tool_calls: [call] },
      { role: "tool", tool_call_id: "call_1", content: "got 1" },
    ];
    return { tools, answer: await client.chat.completions.create({ ...chat, tools, messages: [...messages, ...more] }) };
  },
  response: async () => {
    const request = { model, input: prompt, temperature: seeded.temperature, seed: seeded.seed };
    request.max_output_tokens = seeded.max_tokens;
    const whole = await client.responses.create(request);
    const events = await all(await client.responses.create({ ...request, stream: true }));
    const final = await client.responses.stream(request).finalResponse();
    const { max_output_tokens, ...free } = request;
    const parsed = await client.responses.parse({ ...free, text: { format: zodTextFormat(Agreed, "agreed") } });
    return { whole, events, final: final.output_text, parsed: parsed.output_parsed };
  },
  bad_field: () => errorOf(client.chat.completions.create({ ...chat, temperature: -1 })),
  bad_stream: () => errorOf(client.chat.completions.create({ ...chat, stream: true, temperature: -1 })),
  bad_model: () => errorOf(client.completions.create({ ...completion, model: "other" })),
  left: async () => {
    const stream = await client.completions.create({ ...completion, max_tokens: 400, stream: true, ignore_eos: true });
    for await (const chunk of stream) return chunk; // leaving the loop closes the connection
  },
};

const results = {};
for (const [name, run] of Object.entries(cases)) results[name] = await errorOf(run());
console.log(JSON.stringify(results));
