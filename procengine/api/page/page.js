"use strict";
// The page at "/": a chat, and the group as it is now. It talks to the routes that everybody has, and to nothing else.

const $ = id => document.getElementById(id);
const POLL_MS = 1000, HISTORY = 60, ALTERNATIVES = 5;
const saved = {
  get: (name, otherwise) => { try { return JSON.parse(sessionStorage.getItem(`procengine.${name}`)) ?? otherwise; } catch { return otherwise; } },
  set: (name, value) => { try { sessionStorage.setItem(`procengine.${name}`, JSON.stringify(value)); } catch { /* full, or not allowed */ } },
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// --- the server

let key = saved.get("key", "");
let asking = null; // for a key: whoever is refused meanwhile waits for the same answer

async function ask(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (sent === key && !(await askKey(Boolean(sent)))) return response;
  }
}

function askKey(isWrong) {
  asking ??= new Promise(resolve => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !isWrong;
    $("show-key").hidden = false;
    $("key").value = "";
    const done = given => { asking = null; dialog.close(); resolve(given); };
    $("key-form").onsubmit = event => { event.preventDefault(); key = $("key").value; saved.set("key", key); done(true); };
    $("key-later").onclick = dialog.oncancel = () => done(false);
    dialog.showModal();
  });
  return asking;
}

const post = (path, body, signal) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

async function errorOf(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return text || `status ${response.status}`; }
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the connection was lost before the end");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

// --- tokens: which piece of the text each is

// Texts come as pieces, tokens as bytes; some tokens have no text (the end of a turn), some half a character.
class Tokens {
  constructor() {
    this.pieces = []; // { text, logprob, top }; without a logprob: text of no known token
    this.text = "";
    this.waiting = [];
    this.position = 0;
    this.decoder = new TextDecoder();
  }

  add(text, entries) {
    this.text += text;
    for (const entry of entries) {
      const piece = this.decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      if (piece) this.waiting.push({ piece, entry });
    }
    return this.take(false);
  }

  end() { return this.take(true); }

  take(isLast) {
    const taken = [];
    const put = (end, entry) => {
      const text = this.text.slice(this.position, end);
      this.position = end;
      taken.push({ text, ...(entry ? { logprob: entry.logprob, top: entry.top_logprobs } : {}) });
    };
    while (this.waiting.length) {
      const { piece, entry } = this.waiting[0];
      const at = this.find(piece);
      const isToCome = at < 0 && !isLast && piece.startsWith(this.text.slice(this.position));
      if (isToCome) break;
      this.waiting.shift();
      if (at < 0) continue;
      if (at > this.position) put(at);
      put(at + (this.text.startsWith(piece, at) ? piece : piece.trimStart()).length, entry);
    }
    if (this.position < this.text.length && (isLast || !this.waiting.length)) put(this.text.length);
    this.pieces.push(...taken);
    return taken;
  }

  find(piece) {
    if (this.text.startsWith(piece, this.position)) return this.position;
    const short = piece.trimStart();
    if (short && short !== piece && this.position === 0 && this.text.startsWith(short)) return 0;
    const at = this.text.indexOf(piece, this.position);
    return at >= 0 && at - this.position < 32 ? at : -1;
  }
}

const shareOf = logprob => Math.exp(logprob);
const percent = share => share >= 0.9995 ? "100 %" : share >= 0.1 ? `${(share * 100).toFixed(1)} %` : share >= 0.0001 ? `${(share * 100).toPrecision(2)} %` : "< 0.01 %";
const rough = share => `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %`;
const visible = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");

function span(piece) {
  const made = element("span", {}, piece.text);
  if (piece.logprob === undefined) return made;
  const share = shareOf(piece.logprob);
  made.className = `token${share < 0.2 ? " low" : share < 0.5 ? " mid" : ""}`;
  made.piece = piece;
  return made;
}

// --- the tooltip

function showTip(token) {
  const { text, logprob, top } = token.piece;
  const rows = [...(top ?? [])];
  const isChosen = row => row.logprob === logprob && row.token.trim() === text.trim();
  if (!rows.some(isChosen)) rows.push({ token: text, logprob });
  const table = element("table", {}, ...rows.map(row => element("tr", isChosen(row) ? { class: "chosen" } : {},
    element("td", {}, element("code", {}, visible(row.token) || "∅")),
    element("td", {}, element("progress", { max: 1, value: shareOf(row.logprob) })),
    element("td", {}, percent(shareOf(row.logprob))))));
  const tip = $("tip");
  tip.replaceChildren(element("span", { class: "dim" }, top?.length ? "chosen in bold" : "its probability"), table);
  tip.hidden = false;
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${at.top > height + 8 ? at.top - height - 6 : at.bottom + 6}px`;
}

const hideTip = () => { $("tip").hidden = true; document.querySelector(".token.current")?.classList.remove("current"); };

function walk(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") hideTip();
  if (!step) return;
  event.preventDefault();
  const tokens = [...event.currentTarget.querySelectorAll(".token")];
  const was = tokens.findIndex(one => one.classList.contains("current"));
  const next = tokens[was < 0 ? (step > 0 ? 0 : tokens.length - 1) : Math.max(0, Math.min(tokens.length - 1, was + step))];
  if (!next) return;
  hideTip();
  next.classList.add("current");
  next.scrollIntoView({ block: "nearest" });
  showTip(next);
  $("said").textContent = `${next.piece.text.trim() || "space"}: ${percent(shareOf(next.piece.logprob))}`;
}

// --- the conversation

let turns = saved.get("turns", []); // { role, content, pieces?, about?, error? }
let running = null; // the answer that is coming: an AbortController

const keep = () => saved.set("turns", turns);

function draw(turn) {
  const text = element("div", { class: "text" });
  const article = element("article", { class: turn.role, "aria-label": turn.role === "user" ? "You" : "Answer" }, text);
  if (turn.role === "user") text.append(turn.content);
  else {
    text.append(...(turn.pieces ?? []).map(span));
    text.addEventListener("keydown", walk);
    text.addEventListener("blur", hideTip);
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Answer; arrow keys go through its tokens");
    if (turn.about || turn.error) article.append(foot(turn));
  }
  $("log").append(article);
  return { article, text };
}

function foot(turn) {
  const parts = [];
  if (turn.error) parts.push(element("span", { class: "error", role: "alert" }, turn.error));
  if (turn.about) parts.push(element("span", {}, turn.about));
  if (turn.content) parts.push(element("button", { type: "button", click: event => copy(turn.content, event.target) }, "Copy"));
  parts.push(element("button", { type: "button", class: "again", click: () => again(turn) }, "Try again"));
  return element("div", { class: "about" }, ...parts);
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Not allowed"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function redraw() {
  $("log").replaceChildren();
  turns.forEach(draw);
  settle();
}

function settle() {
  $("empty").hidden = turns.length > 0;
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  const last = turns.at(-1);
  document.querySelectorAll(".again").forEach((button, at, all) => { button.hidden = Boolean(running) || at < all.length - 1 || last?.role === "user"; });
}

function again(turn) {
  if (running) return;
  turns = turns.slice(0, turns.indexOf(turn));
  redraw();
  answer();
}

function bodyOf() {
  const fields = $("fields").elements, body = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  const system = fields.system.value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.map(({ role, content }) => ({ role, content }))];
  for (const field of fields) if (field.type === "number" && field.value !== "") body[field.name] = Number(field.value);
  const stops = fields.stop.value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (fields.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}

async function answer() {
  const body = bodyOf(), conversation = turns;
  const turn = { role: "assistant", content: "", pieces: [] };
  const { article, text } = draw(turn);
  const tokens = new Tokens(), log = $("log"), controller = running = new AbortController();
  const sentAt = performance.now();
  let firstAt = 0, usage = null, reason = "";
  article.classList.add("busy");
  log.setAttribute("aria-busy", "true");
  log.scrollTop = log.scrollHeight;
  settle();
  const show = pieces => {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    text.append(...pieces.map(span));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  try {
    const response = await post("v1/chat/completions", body, controller.signal);
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const entries = choice.logprobs?.content ?? [];
      if (!firstAt && (choice.delta.content || entries.length)) firstAt = performance.now();
      show(tokens.add(choice.delta.content ?? "", entries));
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    if (controller.signal.aborted) reason = "stopped";
    else turn.error = error.message || String(error);
  }
  show(tokens.end());
  Object.assign(turn, { content: tokens.text, pieces: tokens.pieces, about: aboutOf(sentAt, firstAt, usage, reason) });
  if (running === controller) running = null;
  log.setAttribute("aria-busy", "false");
  if (turns !== conversation) return; // a new one was begun meanwhile
  article.classList.remove("busy");
  article.append(foot(turn));
  log.scrollTop = log.scrollHeight;
  turns.push(turn);
  keep();
  settle();
}

function aboutOf(sentAt, firstAt, usage, reason) {
  const now = performance.now(), parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (firstAt) parts.push(`first after ${Math.round(firstAt - sentAt)} ms`);
  if (usage && usage.completion_tokens > 1 && now > firstAt) parts.push(`${((usage.completion_tokens - 1) / (now - firstAt) * 1000).toFixed(1)} tok/s`);
  if (reason) parts.push(reason);
  return parts.join(" · ");
}

function send(event) {
  event?.preventDefault();
  const content = $("prompt").value.trim();
  if (!content || running || !$("fields").reportValidity()) return;
  if (turns.at(-1)?.error && !turns.at(-1).content) turns.splice(-2); // of a question that came to nothing, the new one takes the place
  turns.push({ role: "user", content });
  $("prompt").value = "";
  grow();
  keep();
  redraw();
  answer();
}

const stop = () => running?.abort();
const grow = () => { const box = $("prompt"); box.style.height = "auto"; box.style.height = `${box.scrollHeight}px`; };

// --- the group

const rates = Array(HISTORY).fill(0);
const BAD = new Set(["silent", "dead", "stuck", "failed"]);

function showProcesses(processes) {
  $("processes").replaceChildren(...processes.map(({ name, state, ...more }) => {
    const about = more.pid ? `${name}: ${state}, pid ${more.pid}, ${Math.round(more.rss_bytes / 2 ** 20)} MB` : `${name}: ${state}`;
    return element("li", { class: state === "ready" ? "ready" : BAD.has(state) ? "bad" : "", title: about }, name,
      state === "ready" ? element("span", { class: "hidden" }, " is ready") : ` ${state}`);
  }));
}

function showFrame(frame) {
  const sum = name => frame.workers.reduce((total, worker) => total + worker[name], 0);
  const most = (of, name) => Math.max(0, ...of.map(one => one[name]));
  showProcesses(frame.processes);
  rates.push(frame.window.output_tokens);
  rates.shift();
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, at) => `${at * 120 / (HISTORY - 1)},${19 - rate / top * 18}`);
  $("spark").firstElementChild.setAttribute("points", points.join(" "));
  $("rate").textContent = Math.round(frame.window.output_tokens).toLocaleString("en");
  $("running").textContent = sum("num_running");
  $("waiting").textContent = sum("num_waiting");
  $("in-flight").textContent = sum("num_steps_in_flight");
  $("kv-meter").value = most(frame.workers, "kv_usage");
  $("kv").textContent = rough(most(frame.workers, "kv_usage"));
  $("bubble").textContent = rough(most(frame.window.workers, "bubble"));
}

function note(text) {
  $("strip-note").textContent = text;
  $("strip-note").hidden = !text;
  $("strip").classList.toggle("stale", Boolean(text));
}

async function look() {
  const response = await ask("top");
  if (response.ok) {
    showFrame(await response.json());
    note("");
  } else if (response.status === 404) { // a group that keeps no spans
    $("figures").hidden = true;
    const { processes } = await (await ask("health")).json();
    showProcesses(Object.entries(processes).map(([name, state]) => ({ name, state })));
  } else note(response.status === 401 ? "a key is needed" : await errorOf(response));
  return response.status !== 401;
}

let isWatching = false;
async function watch() {
  if (isWatching) return;
  isWatching = true;
  for (let goesOn = true; goesOn;) {
    if (!document.hidden) {
      try { goesOn = await look(); } catch { note("the server does not answer"); }
    }
    if (goesOn) await new Promise(resolve => setTimeout(resolve, POLL_MS));
  }
  isWatching = false;
}

async function begin() {
  try {
    const response = await ask("v1/models");
    if (!response.ok) throw new Error(await errorOf(response));
    const models = (await response.json()).data;
    $("model").replaceChildren(...models.map(({ id }) => element("option", {}, id)));
    $("model").disabled = models.length < 2;
    document.title = `${models[0].id} – procengine`;
  } catch (error) { note(error.message); }
  watch();
}

// --- what the user does

$("composer").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); });
$("new").addEventListener("click", () => { stop(); running = null; turns = []; keep(); redraw(); $("prompt").focus(); });
$("show-key").addEventListener("click", async () => { if (await askKey(false)) begin(); });
$("show-parameters").addEventListener("click", event => {
  const isShown = $("parameters").hidden;
  $("parameters").hidden = !isShown;
  event.currentTarget.setAttribute("aria-expanded", isShown);
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && running) stop(); });
$("log").addEventListener("pointerover", event => { if (event.target.piece) showTip(event.target); });
$("log").addEventListener("pointerout", event => { if (event.target.piece) hideTip(); });
$("log").addEventListener("click", event => { if (event.target.piece) showTip(event.target); });
$("log").addEventListener("scroll", hideTip);

function keepFields() {
  const values = {};
  for (const field of $("fields").elements) if (field.name) values[field.name] = field.type === "checkbox" ? field.checked : field.value;
  saved.set("fields", values);
  $("log").classList.toggle("shaded", $("fields").elements.shade.checked);
}
for (const [name, value] of Object.entries(saved.get("fields", {}))) {
  const field = $("fields").elements[name];
  if (field) field[field.type === "checkbox" ? "checked" : "value"] = value;
}
$("fields").addEventListener("input", keepFields);
$("fields").addEventListener("reset", () => setTimeout(keepFields));

keepFields();
if (turns.at(-1)?.role === "user") $("prompt").value = turns.pop().content; // the tab was closed before the answer
redraw();
begin();
