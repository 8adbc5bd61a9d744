// Examples that can be edited and run with the session of this browser; opens the operation that the address names.
import { chunks } from "./stream.js";
import { curl, openai, python } from "./code.js";

const MOST_SHOWN = 200_000;
let token;

// Every page of the console has the session's token. Without a session there is none.
async function csrf() {
  if (token) return token;
  const answer = await fetch("/console/datasets/new");
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  token = page.querySelector('meta[name="csrf-token"]')?.content;
  return token;
}

class Operation {
  constructor(element) {
    Object.assign(this, { element, ...element.dataset, language: "curl", inputs: [] });
    this.form = element.querySelector("form");
    this.shown = element.querySelector("[data-answer]");
    this.area = element.querySelector("[data-body] textarea");
    this.addInputs();
    for (const part of element.querySelectorAll("[data-inputs]:not(:empty), [data-body], [data-tools]")) part.hidden = false;
    for (const button of element.querySelectorAll("[data-language]")) button.addEventListener("click", () => this.speak(button));
    this.form.addEventListener("input", () => this.code());
    this.form.addEventListener("submit", (event) => this.submitted(event));
    element.querySelector("[data-stop]")?.addEventListener("click", () => this.stop.abort());
  }

  addInputs() {
    for (const row of this.element.querySelectorAll("tr[data-place]")) {
      const field = document.createElement("label"), input = document.createElement("input"), { name, place } = row.dataset;
      field.className = "field";
      input.required = "required" in row.dataset;
      Object.assign(input, { autocomplete: "off", spellcheck: false, placeholder: input.required ? "required" : "" });
      field.append(name, input);
      this.element.querySelector("[data-inputs]").append(field);
      this.inputs.push({ name, place, input });
    }
  }

  given(place) { return this.inputs.filter((one) => one.place === place && (place === "path" || one.input.value.trim())).map(({ name, input }) => [name, input.value.trim()]); }

  body() {
    if (!this.area || !this.area.value.trim()) return undefined;
    return JSON.parse(this.area.value);
  }

  filled(text, encode = (value) => value) { return this.given("path").reduce((made, [name, value]) => (value ? made.replaceAll(`{${name}}`, encode(value)) : made), text); }

  url() {
    const query = new URLSearchParams(this.given("query")).toString();
    return this.filled(this.path, encodeURIComponent) + (query ? `?${query}` : "");
  }

  speak(button) {
    this.language = button.dataset.language;
    for (const one of this.element.querySelectorAll("[data-language]")) one.setAttribute("aria-pressed", String(one === button));
    this.code();
  }

  code() {
    const shown = this.element.querySelector("[data-code]");
    try { shown.textContent = this[`as_${this.language}`](); } catch (error) { shown.textContent = `The body is not JSON: ${error.message}`; }
  }

  as_curl() {
    if (this.media && this.media !== "application/json") return this.element.querySelector("[data-code]").dataset.first;
    return curl(this.method, location.origin + this.url(), this.body(), this.path.startsWith("/v1/admin") ? "$FT_OPERATOR_KEY" : undefined);
  }

  as_python() {
    const path = this.given("path").map(([name, value]) => [name, value || `${name.toUpperCase()}`]), named = path.length > 1 ? path : path.map(([, value]) => ["", value]);
    const typed = (text) => (/^-?\d+$/.test(text) ? Number(text) : text);
    const query = this.given("query").map(([name, value]) => [name, typed(value)]);
    if (this.openai) {
      if (this.media?.startsWith("multipart")) return openai(this.openai, [...named, ...(this.openai.endsWith("parts.create") ? [["data", "..."]] : [["file", "..."], ["purpose", "fine-tune"]])]).replace(/(file|data)="\.\.\."/, '$1=open("FILE", "rb")');
      return openai(this.openai, [...named, ...query, ...Object.entries(this.body() ?? {})], { own: this.own.split(" ").filter(Boolean), extra: this.method === "GET" ? "extra_query" : "extra_body" });
    }
    const body = this.body(), key = this.path.startsWith("/v1/admin") ? "FT_OPERATOR_KEY" : "FT_API_KEY";
    const parts = [python(location.origin + this.filled(this.path, encodeURIComponent)), `headers={"Authorization": f"Bearer {os.environ['${key}']}"}`];
    if (query.length) parts.push(`params=${python(Object.fromEntries(query))}`);
    if (body !== undefined) parts.push(`json=${python(body)}`);
    return `import os\n\nimport httpx\n\nanswer = httpx.${this.method.toLowerCase()}(\n${parts.map((part) => `    ${part},\n`).join("")})\nprint(answer.json())`;
  }

  as_ft() { return this.filled(this.ft.replaceAll(/\{(\w+)\}/g, (whole, name) => (this.given("path").find(([one]) => one === name)?.[1] ? whole : name.toUpperCase()))); }

  // The question before a change comes from console.js, which submits the form again when it is answered.
  submitted(event) {
    if (this.form.dataset.confirm && !this.form.dataset.confirmed) {
      if (this.isComplete()) return;
      event.stopPropagation();
      event.preventDefault();
      return;
    }
    event.preventDefault();
    event.stopPropagation(); // so that the next run asks again
    delete this.form.dataset.confirmed;
    if (this.isComplete()) this.run();
  }

  isComplete() {
    try { this.body(); } catch (error) { this.show(`The body is not JSON: ${error.message}`); this.area.focus(); return false; }
    const missing = this.inputs.find(({ input }) => input.required && !input.value.trim());
    if (missing) { this.show(`Fill in ${missing.name} first.`); missing.input.focus(); }
    return !missing;
  }

  show(text) { this.shown.hidden = false; this.shown.textContent = text; }

  async run() {
    const halt = this.element.querySelector("[data-stop]"), body = this.body();
    this.show("...");
    this.stop = new AbortController();
    halt.hidden = false;
    try {
      const headers = this.method === "GET" ? {} : { "x-csrf-token": (await csrf()) ?? "" };
      if (body !== undefined) headers["content-type"] = "application/json";
      const answer = await fetch(this.url(), { method: this.method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: this.stop.signal });
      if (answer.status === 401) this.signIn();
      else await this.read(answer);
    } catch (error) {
      if (error.name !== "AbortError") this.show(error.message);
    } finally {
      halt.hidden = true;
    }
  }

  signIn() {
    const link = document.createElement("a");
    link.href = "/console/sign-in";
    link.textContent = "Sign in to the console";
    this.shown.replaceChildren(link, " first; then run the call.");
  }

  async read(answer) {
    const type = answer.headers.get("content-type") ?? "";
    if (!/json|text|yaml|^$/.test(type)) {
      this.stop.abort();
      const link = document.createElement("a");
      Object.assign(link, { href: this.url(), textContent: `Download ${type}`, download: "" });
      return this.shown.replaceChildren(`${answer.status}\n`, link);
    }
    let text = "";
    this.show(`${answer.status}\n`);
    for await (const piece of chunks(answer.body)) {
      text += piece;
      this.shown.append(piece);
      if (text.length > MOST_SHOWN) { this.shown.append("\n... the rest is not shown"); this.stop.abort(); return; }
    }
    if (type.includes("application/json")) this.show(`${answer.status}\n${JSON.stringify(JSON.parse(text), null, 2)}`);
  }
}

for (const element of document.querySelectorAll("details.operation")) {
  const code = element.querySelector("[data-code]");
  code.dataset.first = code.textContent;
  element.addEventListener("toggle", () => new Operation(element), { once: true });
}

function open() {
  const wanted = location.hash && document.getElementById(location.hash.slice(1));
  if (wanted instanceof HTMLDetailsElement) wanted.open = true;
}
addEventListener("hashchange", open);
open();
