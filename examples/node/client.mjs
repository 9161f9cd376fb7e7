// A client of a procengine group over its own protocol, without HTTP. Written from docs/PROTOCOL.md alone.
//
//   const client = await Client.connect("ipc:///run/user/1000/procengine/smollm2-135m/frontend.sock");
//   for await (const delta of client.stream({ prompt: "The capital of France is" })) process.stdout.write(delta.text);
//   const [choice] = await client.generate({ messages: [{ role: "user", content: "Hi" }] }, { temperature: 0 });
//   await client.close();
//
// The group may restart its processes: streams pause and go on, and what is lost with a frontend is sent again if nobody
// has seen anything of it.

import { randomUUID } from "node:crypto";

import { ChoiceCursor } from "./choice_cursor.mjs";
import { Link } from "./link.mjs";

const VERSION = 1;
const ATTACH_AGAIN_MS = 500;
const FIRST_KEY_OF_EPOCH = 2 ** 40;

/** `code` is one of the protocol's, or `request_failed`, `lost`, `timeout`. */
export class GroupError extends Error {
  constructor(code, message, retryAfterS = 0) {
    super(message);
    this.name = "GroupError";
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

export class Client {
  #routingId = randomUUID();
  #requests = new Map(); // by id
  #waiting = new Map(); // who waits for the next message of this tag
  #numIds = 0;
  #numSent = 0; // submits and marks, in the order they are sent
  #epoch = 0;
  #frontend;
  #output;
  #silence = null;
  #patienceMs;
  welcome;

  /** Connect to a group's frontend. A group that is away for longer than `patienceMs` counts as gone. */
  static async connect(endpoint, { patienceMs = 30_000 } = {}) {
    const client = new Client(patienceMs);
    try {
      await client.#connect(endpoint);
    } catch (error) {
      await client.close();
      throw error;
    }
    return client;
  }

  constructor(patienceMs) {
    this.#patienceMs = patienceMs;
  }

  async #connect(endpoint) {
    const onAnswer = (message) => {
      if (this.#silence) this.#silence = clearTimeout(this.#silence); // outputs may come from a group without frontend
      this.#receive(message);
    };
    this.#frontend = new Link(endpoint, this.#routingId, onAnswer, () => this.#onDisconnect());
    const welcomed = this.#next("welcome");
    this.#frontend.send("hello", VERSION);
    this.welcome = await this.#inTime(welcomed);
    if (this.welcome.version !== VERSION) {
      throw new GroupError("protocol", `the group speaks version ${this.welcome.version}, not ${VERSION}`);
    }
    const address = reachableFrom(endpoint, this.welcome.outputEndpoint);
    this.#output = new Link(address, this.#routingId, (it) => this.#receive(it));
    const attached = this.#next("attached");
    const attach = () => this.#output.send("attach", VERSION);
    const again = setInterval(attach, ATTACH_AGAIN_MS); // whoever took the first one may have died with it
    attach();
    await this.#inTime(attached).finally(() => clearInterval(again));
  }

  /** The deltas of a request as they come. Leaving the loop, or `signal`, aborts it. */
  async *stream(body, samplingParams = {}, { signal } = {}) {
    const request = this.#submit("generate", { ...body, sampling_params: samplingParams }, samplingParams.n ?? 1);
    const abort = () => this.#abort(request);
    signal?.addEventListener("abort", abort);
    if (signal?.aborted) abort();
    try {
      for (;;) {
        while (request.items.length) yield request.items.shift();
        if (request.error) throw request.error;
        if (!request.numOpen) return;
        await new Promise((resolve) => (request.wake = resolve));
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      this.#abort(request);
    }
  }

  /** The choices of a request, whole: their last deltas. */
  async generate(body, samplingParams = {}, options = {}) {
    const choices = [];
    const params = { ...samplingParams, output_kind: "final" };
    for await (const delta of this.stream(body, params, options)) choices[delta.index] = delta;
    return choices;
  }

  /** The vector of a text or of token ids, as a Float32Array. */
  async embed(body) {
    const request = this.#submit("embed", body, 1);
    while (request.numOpen && !request.error) await new Promise((resolve) => (request.wake = resolve));
    if (request.error) throw request.error;
    const [{ data }] = request.items;
    return new Float32Array(Uint8Array.from(data).buffer); // a copy: the bytes may stand anywhere in their message
  }

  /** The group's counters. */
  async stats() {
    const answer = this.#next("stats");
    this.#frontend.send("get_stats");
    return (await this.#inTime(answer)).values;
  }

  async close() {
    clearTimeout(this.#silence);
    for (const request of this.#requests.values()) this.#abort(request);
    await Promise.all([this.#frontend?.close(), this.#output?.close()]);
    this.#failAll(new GroupError("lost", "the client is closed"));
  }

  #submit(workflow, body, numChoices) {
    const request = {
      id: `r${this.#numIds++}`, workflow, body, numChoices,
      number: 0, epoch: 0, minKey: -1, hasBegun: false,
      numOpen: numChoices, cursors: new Map(), items: [], error: null, wake: () => {},
    };
    this.#requests.set(request.id, request);
    this.#send(request);
    return request;
  }

  #send(request) {
    request.number = ++this.#numSent;
    request.epoch = this.#epoch;
    this.#frontend.send("submit", request.id, request.workflow, request.body, 0, "", this.#epoch);
  }

  #abort(request) {
    if (this.#requests.has(request.id)) this.#frontend.send("abort", request.id);
  }

  #receive([tag, ...fields]) {
    if (tag === "outputs") for (const item of fields[0]) this.#takeItem(item);
    else if (tag === "lost") this.#takeLost(fields);
    else if (tag === "received") this.#takeReceived(fields);
    else if (tag === "rejected") this.#takeRejection(fields);
    else this.#takeAnswer(tag, fields);
  }

  #takeItem([tag, ...fields]) {
    const item = tag === "delta" ? readDelta(fields) : readEmbedding(fields);
    const request = this.#requests.get(item.requestId);
    if (!request || item.key < request.minKey) return; // over, or of its life before
    request.hasBegun = true;
    let fresh = item;
    if (tag === "delta") {
      if (!request.cursors.has(item.index)) request.cursors.set(item.index, new ChoiceCursor());
      try {
        fresh = request.cursors.get(item.index).take(item);
      } catch (error) {
        this.#abort(request);
        return this.#end(request, new GroupError("protocol", error.message));
      }
    }
    if (!fresh) return;
    const isFailure = fresh.finishReason === "error" || (tag === "embedding" && fresh.finishReason !== "stop");
    if (isFailure) {
      this.#abort(request); // its other choices
      return this.#end(request, new GroupError("request_failed", fresh.error ?? fresh.finishReason));
    }
    request.items.push(fresh);
    if (fresh.finishReason !== null && !--request.numOpen) this.#requests.delete(request.id);
    request.wake();
  }

  #takeReceived([requestId, epoch]) {
    this.#epoch = Math.max(this.#epoch, epoch);
    const request = this.#requests.get(requestId);
    if (request) request.epoch = epoch;
  }

  #takeRejection([requestId, code, message, retryAfterS]) {
    const error = new GroupError(code, message, retryAfterS);
    if (requestId === "") return this.#failAll(error);
    const request = this.#requests.get(requestId);
    if (request) this.#end(request, error);
  }

  #takeLost([epoch, requestIds, message]) {
    for (const id of requestIds) {
      const request = this.#requests.get(id);
      if (request && request.epoch <= epoch) this.#lose(request, epoch + 1, message);
    }
  }

  #takeAnswer(tag, fields) {
    const answer = { welcome: readWelcome, stats: readStats, attached: readStats }[tag]?.(fields);
    if (tag === "welcome") this.#takeWelcome(answer);
    this.#waiting.get(tag)?.shift()?.resolve(answer);
  }

  /** Answers to a `hello` with a mark: what was sent before and is not known to this frontend died with another. */
  #takeWelcome({ epoch, mark, instance }) {
    if (this.welcome && instance !== this.welcome.instance) {
      return this.#failAll(new GroupError("engine_dead", "another group has taken the place of this one"));
    }
    this.#epoch = Math.max(this.#epoch, epoch);
    for (const request of [...this.#requests.values()]) {
      if (request.epoch < epoch && request.number < mark) this.#lose(request, epoch, "the frontend died");
    }
  }

  /** It died with its frontend. Its keys in `epoch` and later ones are of its next life. */
  #lose(request, epoch, message) {
    const minKey = epoch * FIRST_KEY_OF_EPOCH;
    if (request.minKey >= minKey) return; // it was sent again for this very reason
    if (request.hasBegun) return this.#end(request, new GroupError("lost", message));
    request.minKey = minKey;
    this.#send(request);
  }

  #onDisconnect() {
    this.#silence ??= setTimeout(
      () => this.#failAll(new GroupError("engine_dead", "the group is gone")), this.#patienceMs,
    );
    this.#frontend.send("hello", VERSION, ++this.#numSent); // waits in the socket until there is a frontend again
  }

  #end(request, error) {
    request.error = error;
    this.#requests.delete(request.id);
    request.wake();
  }

  #failAll(error) {
    for (const request of [...this.#requests.values()]) this.#end(request, error);
    for (const waiting of this.#waiting.values()) for (const one of waiting.splice(0)) one.reject(error);
  }

  #next(tag) {
    return new Promise((resolve, reject) => {
      if (!this.#waiting.has(tag)) this.#waiting.set(tag, []);
      this.#waiting.get(tag).push({ resolve, reject });
    });
  }

  async #inTime(answer) {
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new GroupError("timeout", "the group does not answer")), this.#patienceMs);
    });
    return Promise.race([answer, late]).finally(() => clearTimeout(timer));
  }
}

const readWelcome = ([version, group, model, outputEndpoint, maxModelLen, vocabSize, workflows, maxRequestBytes,
  toolCallParser = "none", epoch = 0, mark = 0, labels = [],
  instance = 0]) => ({
  version, group, model, outputEndpoint, maxModelLen, vocabSize, workflows, maxRequestBytes, toolCallParser, epoch, mark,
  labels, instance,
});

const readStats = ([values]) => ({ values });

const readDelta = ([requestId, index, text, tokenIds, finishReason = null, stopReason = null, logprobs = null,
  promptTokenIds = null, numCachedTokens = null, error = null, promptLogprobs = null, times = null,
  tokenOffset = -1, textOffset = -1, key = -1]) => ({
  requestId, index, text, tokenIds, finishReason, stopReason, logprobs,
  promptTokenIds, numCachedTokens, error, promptLogprobs, times, tokenOffset, textOffset, key,
});

const readEmbedding = ([requestId, data, promptTokenIds, finishReason = "stop", error = null, times = null, key = -1]) => ({
  requestId, data, promptTokenIds, finishReason, error, times, key,
});

/** Where outputs come from: a host that means all addresses stands for the one that we are connected to. */
function reachableFrom(endpoint, outputEndpoint) {
  return outputEndpoint.replace(/^tcp:\/\/(0\.0\.0\.0|\[::\]):/, `${endpoint.slice(0, endpoint.lastIndexOf(":"))}:`);
}
