// One conversation with two models. Its state is in the address, so that a link reproduces it.
import { call } from "./api.js";
import { chunks } from "./stream.js";
import { curl, openai, quoted } from "./code.js";

const form = document.querySelector("[data-chat]"), fields = form.elements, SIDES = ["left", "right"];
const at = (name) => document.querySelector(`[data-${name}]`);
const KEPT = ["left", "right", "temperature", "max_tokens", "system", "schema", "message"];
const MOST_IN_LINK = 8000, SHORTEST_MS = 50;
const turns = { left: [], right: [] };
let stop, language = "curl";

const side = (name) => document.querySelector(`[data-side="${name}"]`);
const used = () => SIDES.filter((name) => fields[name].value);

function add(name, role, content) {
  const turn = side(name).querySelector(".turns").appendChild(document.createElement("div"));
  turn.className = `turn ${role}`;
  const label = turn.appendChild(document.createElement("span")), text = turn.appendChild(document.createElement("p"));
  label.className = "soft small";
  label.textContent = role === "user" ? "You" : "Model";
  text.textContent = content;
  return text;
}

function names() {
  for (const name of SIDES) side(name).querySelector("[data-name]").textContent = fields[name].value;
  side("right").hidden = !fields.right.value;
}

function schema() {
  const text = fields.schema.value.trim();
  return text ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } } : {};
}

function request(name, messages) {
  const system = fields.system.value.trim() ? [{ role: "system", content: fields.system.value }] : [];
  return { model: fields[name].value, messages: [...system, ...messages], temperature: Number(fields.temperature.value), max_tokens: Number(fields.max_tokens.value), ...schema() };
}

async function* events(body) {
  let rest = "";
  for await (const piece of chunks(body)) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

// What the answer took: tokens as the server counts them, and their speed from the first one on.
function measured({ began, first, usage, isStopped }) {
  const now = performance.now(), parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (usage?.completion_tokens > 1 && now - first > SHORTEST_MS) parts.push(`${Math.round((1000 * (usage.completion_tokens - 1)) / (now - first))} tokens/s`);
  if (first) parts.push(`first token after ${((first - began) / 1000).toFixed(1)} s`);
  return [...parts, `${((now - began) / 1000).toFixed(1)} s`, ...(isStopped ? ["stopped"] : [])].join(", ");
}

// A tool call is shown as a line with its name and its arguments.
const written = (delta) => (delta.content ?? "") + (delta.tool_calls ?? []).map(({ function: f }) => (f?.name ? `\n${f.name} ` : "") + (f?.arguments ?? "")).join("");

async function answer(name) {
  const shown = add(name, "assistant", ""), found = { began: performance.now() };
  let text = "";
  try {
    const body = { ...request(name, turns[name]), stream: true, stream_options: { include_usage: true } };
    const reply = await call("POST", "/v1/chat/completions", body, { signal: stop.signal });
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = written(event.choices?.[0]?.delta ?? {});
      if (piece) found.first ??= performance.now();
      found.usage = event.usage ?? found.usage;
      shown.textContent = text += piece;
    }
  } catch (error) {
    if (error.name === "AbortError") found.isStopped = true;
    else { shown.textContent = text ? `${text}\n${error.message}` : error.message; shown.classList.add("bad"); }
  }
  if (!text.trim() && !found.isStopped && !shown.classList.contains("bad")) shown.textContent = "(empty answer)";
  if (text) turns[name].push({ role: "assistant", content: text });
  side(name).querySelector("[data-time]").textContent = measured(found);
}

async function ask() {
  stop = new AbortController();
  at("send").disabled = true;
  at("stop").hidden = false;
  at("retry").hidden = true;
  await Promise.all(used().map(answer));
  at("send").disabled = false;
  at("stop").hidden = true;
  at("retry").hidden = false;
  code();
}

function send(message) {
  for (const name of used()) {
    if (turns[name].at(-1)?.role === "user") turns[name].pop(); // it was not answered
    turns[name].push({ role: "user", content: message });
    add(name, "user", message);
  }
  return ask();
}

function retry() {
  for (const name of used()) {
    if (turns[name].at(-1)?.role === "assistant") turns[name].pop();
    side(name).querySelector(".turn.assistant:last-child")?.remove();
  }
  return ask();
}

const CODE = {
  curl: (body) => curl("POST", `${location.origin}/v1/chat/completions`, body),
  python: (body) => `${openai("chat.completions.create", Object.entries(body))}\nprint(answer.choices[0].message.content)`,
  ft: ({ model, messages, temperature, max_tokens: most, response_format: wanted }) => {
    const system = messages[0]?.role === "system" ? ` --system ${quoted(messages[0].content)}` : "", missing = messages.filter((one) => one.role === "user").length > 1 ? "the earlier turns" : wanted ? "the JSON schema" : "";
    return `ft chat ${quoted(model)} ${quoted(messages.findLast((one) => one.role === "user")?.content ?? "")}${system} --temperature ${temperature} --max-tokens ${most}${missing ? `\n# ft has no option for ${missing}; use curl or Python` : ""}`;
  },
};

// The next request to the first model; without a new message, the last one.
function code() {
  const next = fields.message.value.trim(), history = turns.left.at(-1)?.role === "assistant" && !next ? turns.left.slice(0, -1) : turns.left;
  try { at("code").textContent = CODE[language](request("left", next ? [...history, { role: "user", content: next }] : history)); } catch (error) { at("code").textContent = error.message; }
}

function checkSchema() {
  try { schema(); fields.schema.setCustomValidity(""); } catch (error) { fields.schema.setCustomValidity(`This is not JSON: ${error.message}`); }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const message = fields.message.value.trim();
  if (!message || at("send").disabled) return;
  fields.message.value = "";
  send(message).then(() => fields.message.focus());
});
at("stop").addEventListener("click", () => stop.abort());
at("retry").addEventListener("click", retry);
fields.message.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
at("clear").addEventListener("click", () => {
  for (const name of SIDES) { turns[name] = []; side(name).querySelector(".turns").replaceChildren(); side(name).querySelector("[data-time]").textContent = ""; }
  at("retry").hidden = true;
  code();
});
at("share").addEventListener("click", async (event) => {
  const state = new URLSearchParams(KEPT.filter((name) => fields[name].value).map((name) => [name, fields[name].value]));
  const said = JSON.stringify(turns);
  if (turns.left.length && said.length <= MOST_IN_LINK) state.set("turns", said);
  history.replaceState(null, "", `#${state}`);
  await navigator.clipboard.writeText(location.href);
  event.target.textContent = "Copied";
});
for (const button of document.querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => {
    language = button.dataset.language;
    document.querySelectorAll("[data-language]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    code();
  });
}

function conversation(text) {
  try { return JSON.parse(text ?? "{}"); } catch { return {}; } // a link that was cut
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of state) {
    if (!KEPT.includes(name)) continue;
    const field = fields[name], isModel = SIDES.includes(name);
    if (isModel && ![...field.options].some((one) => one.value === value)) field.add(new Option(value, value)); // a name that is not listed
    field.value = value;
  }
  if (state.get("system") || state.get("schema")) form.querySelector("details").open = true;
  for (const name of SIDES) {
    for (const { role, content } of conversation(state.get("turns"))[name] ?? []) {
      const turn = { role: role === "user" ? "user" : "assistant", content: String(content) };
      turns[name].push(turn);
      add(name, turn.role, turn.content);
    }
  }
  at("retry").hidden = !turns.left.length;
}

form.addEventListener("input", () => { checkSchema(); code(); });
form.addEventListener("change", names);
restore();
names();
checkSchema();
code();
