// One conversation with two models. Its state is in the address, so that a link reproduces it.
import { call } from "./api.js";
import { chunks } from "./stream.js";

const form = document.querySelector("[data-chat]"), fields = form.elements, SIDES = ["left", "right"];
const KEPT = ["left", "right", "temperature", "max_tokens", "system", "schema", "message"];
const turns = { left: [], right: [] };
let stop;

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

function request(name) {
  const system = fields.system.value.trim() ? [{ role: "system", content: fields.system.value }] : [];
  const schema = fields.schema.value.trim();
  return {
    model: fields[name].value, messages: [...system, ...turns[name]], temperature: Number(fields.temperature.value), max_tokens: Number(fields.max_tokens.value), stream: true,
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }),
  };
}

async function answer(name, message) {
  turns[name].push({ role: "user", content: message });
  add(name, "user", message);
  const shown = add(name, "assistant", ""), began = performance.now();
  let text = "", rest = "";
  try {
    const found = await call("POST", "/v1/chat/completions", request(name), { signal: stop.signal });
    for await (const piece of chunks(found.body)) {
      const lines = (rest + piece).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        text += event.choices?.[0]?.delta?.content ?? "";
      }
      shown.textContent = text;
    }
  } catch (error) {
    if (error.name !== "AbortError") { shown.textContent = text || error.message; shown.classList.toggle("bad", !text); }
  }
  turns[name].push({ role: "assistant", content: text });
  side(name).querySelector("[data-time]").textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const message = fields.message.value.trim(), send = document.querySelector("[data-send]"), halt = document.querySelector("[data-stop]");
  if (!message) return;
  stop = new AbortController();
  fields.message.value = "";
  send.disabled = true;
  halt.hidden = false;
  await Promise.all(used().map((name) => answer(name, message)));
  send.disabled = false;
  halt.hidden = true;
  fields.message.focus();
});
document.querySelector("[data-stop]").addEventListener("click", () => stop.abort());
fields.message.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
document.querySelector("[data-clear]").addEventListener("click", () => {
  for (const name of SIDES) { turns[name] = []; side(name).querySelector(".turns").replaceChildren(); side(name).querySelector("[data-time]").textContent = ""; }
});
document.querySelector("[data-share]").addEventListener("click", async (event) => {
  const state = new URLSearchParams(KEPT.filter((name) => fields[name].value).map((name) => [name, fields[name].value]));
  history.replaceState(null, "", `#${state}`);
  await navigator.clipboard.writeText(location.href);
  event.target.textContent = "Copied";
});
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (KEPT.includes(name)) fields[name].value = value;
form.addEventListener("change", names);
names();
