// The openai package of Node: a streamed answer, a structured one, a call of a tool, and errors.
// OPENAI_BASE_URL and MODEL say where.

import OpenAI from "openai";

const client = new OpenAI({ apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const ask = (content, fields) =>
  client.chat.completions.create({ model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 60, ...fields });

const pieces = [];
const stream = await ask("What is the capital of France?", { stream: true, stream_options: { include_usage: true } });
let usage = null;
for await (const event of stream) {
  if (event.choices.length) pieces.push(event.choices[0].delta.content ?? "");
  else usage = event.usage;
}

const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const person = await ask("Ada Lovelace is 36 years old. Who is she?", {
  response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
});

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const called = await ask("What is the weather in Paris?", {
  tools: [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters } }],
  tool_choice: "required",
});

const response = await client.responses.create({ model, input: "What is the capital of France?", temperature: 0 });
const models = (await client.models.list()).data.map((one) => one.id);
const refused = await ask("Hi", { temperature: -1 }).catch((error) => ({ status: error.status, param: error.param }));

console.log(JSON.stringify({
  text: pieces.join(""), usage, person: JSON.parse(person.choices[0].message.content),
  call: called.choices[0].message.tool_calls[0].function, response: response.output_text, models, refused,
}));
