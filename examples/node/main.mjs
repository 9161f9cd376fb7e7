// What a client can do, one command each. Every line that it prints is a JSON value.
//
//   node main.mjs ENDPOINT stream   '{"prompt": "The capital of France is"}' '{"max_tokens": 8, "temperature": 0}'
//   node main.mjs ENDPOINT generate '{"messages": [{"role": "user", "content": "Hi"}]}' '{"n": 2, "seed": 1}'
//   node main.mjs ENDPOINT abort    '{"prompt": "Once"}' '{"max_tokens": 500}' 10       # after ten deltas
//   node main.mjs ENDPOINT embed    '{"prompt": "A text"}'
//   node main.mjs ENDPOINT stats
//
// ENDPOINT is `endpoint` (or `tcp`) of the group's group.json, which is also the first line that `procengine serve` prints.

import { Client } from "./client.mjs";

const [endpoint, command, ...rest] = process.argv.slice(2);
const [body, params, count] = rest.map((text) => JSON.parse(text));
const print = (value) => console.log(JSON.stringify(value));

const commands = {
  async stream(client) {
    for await (const delta of client.stream(body, params)) print(delta);
  },
  async generate(client) {
    print(await client.generate(body, params));
  },
  async abort(client) {
    const control = new AbortController();
    let seen = 0;
    for await (const delta of client.stream(body, params, { signal: control.signal })) {
      print(delta);
      if (++seen === count) control.abort();
    }
  },
  async embed(client) {
    print(Array.from(await client.embed(body)));
  },
  async stats(client) {
    print(await client.stats());
  },
};

let client;
try {
  client = await Client.connect(endpoint, { patienceMs: 10_000 });
  print(client.welcome);
  await commands[command](client);
} catch (error) {
  print({ error: error.code ?? error.name, message: error.message });
  process.exitCode = 1;
} finally {
  await client?.close();
}
