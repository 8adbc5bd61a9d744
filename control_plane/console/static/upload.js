// Uploads files in parts. What was sent is kept in this browser, so that an upload goes on after a lost connection or a closed page.
import { json } from "./api.js";
import { follow } from "./stream.js";

const PART_BYTES = 8 * 2 ** 20, MOST_PAUSE_MS = 30_000;
const drop = document.querySelector("[data-drop]"), list = document.querySelector("[data-uploads]"), input = document.querySelector("#files");
const size = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 2 ** 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

class Row {
  constructor(file) {
    list.hidden = false;
    this.element = document.querySelector("[data-row]").content.cloneNode(true).firstElementChild;
    list.querySelector("ul").prepend(this.element);
    this.part("name").textContent = file.name;
    this.part("size").textContent = size(file.size);
  }
  part(name) { return this.element.querySelector(`[data-${name}]`); }
  state(word, tone = "info") { const badge = this.part("state"); badge.className = `badge ${tone}`; badge.textContent = word; }
  detail(text) { this.part("detail").textContent = text; }
  progress(share) { const bar = this.element.querySelector("progress"); if (share === null) bar.removeAttribute("value"); else bar.value = share; }
  done() { this.element.querySelector("progress").remove(); }
  link(href, text) { const link = this.part("link"); link.href = href; link.textContent = text; link.hidden = false; }
}

// A failure of the network is tried again; a refusal of the API is not.
async function patiently(row, action) {
  for (let pause = 1000; ; pause = Math.min(2 * pause, MOST_PAUSE_MS)) {
    try { return await action(); } catch (error) {
      if (error.status && error.status < 500 && error.status !== 429) throw error;
      row.state("Waiting for the connection", "warn");
      await wait(pause);
    }
  }
}

async function begun(row, file, settings, key) {
  const kept = JSON.parse(localStorage.getItem(key) ?? "null");
  if (kept) {
    const found = await patiently(row, () => json("GET", `/v1/uploads/${kept.id}`)).catch(() => null);
    if (found?.status === "pending") return kept;
  }
  const body = { filename: file.name, bytes: file.size, mime_type: file.type || "application/octet-stream", purpose: "fine-tune", ...settings };
  return { id: (await patiently(row, () => json("POST", "/v1/uploads", body))).id, parts: [] };
}

async function send(row, file, settings) {
  const key = `upload:${file.name}:${file.size}:${file.lastModified}:${JSON.stringify(settings)}`;
  const upload = await begun(row, file, settings, key);
  for (let at = upload.parts.length; at * PART_BYTES < file.size; at += 1) {
    row.state("Uploading");
    row.progress((at * PART_BYTES) / file.size);
    row.detail(`${size(at * PART_BYTES)} of ${size(file.size)}`);
    const form = new FormData();
    form.append("data", file.slice(at * PART_BYTES, (at + 1) * PART_BYTES), "part");
    upload.parts.push((await patiently(row, () => json("POST", `/v1/uploads/${upload.id}/parts`, form))).id);
    localStorage.setItem(key, JSON.stringify(upload));
  }
  row.state("Validating");
  row.progress(null);
  row.detail("");
  const done = await patiently(row, () => json("POST", `/v1/uploads/${upload.id}/complete`, { part_ids: upload.parts }));
  localStorage.removeItem(key);
  return done.file;
}

function validated(row, file) {
  if (file.status !== "uploaded") return Promise.resolve(file);
  return new Promise((done) => {
    const onEvent = ({ progress }) => progress && row.detail(`${progress.stage}, ${progress.rows.toLocaleString()} rows`);
    follow(`/v1/files/${file.id}/events`, { onEvent, onOver: async () => done(await json("GET", `/v1/files/${file.id}`)) });
  });
}

async function run(row, file, mapping) {
  const chosen = (id) => document.querySelector(`#${id}`).value;
  const settings = {};
  if (chosen("model")) settings.model = chosen("model");
  if (chosen("pii")) settings.policies = { pii: chosen("pii") };
  if (mapping) settings.column_map = mapping;
  try {
    const made = await validated(row, await send(row, file, settings));
    row.done();
    if (made.status === "processed") {
      row.state("Valid", "good");
      row.detail("");
      row.link(`/console/datasets/${made.dataset_id}`, "Open dataset");
      return;
    }
    row.state("Not valid", "bad");
    row.detail(made.status_details);
    row.link(`/console/files/${made.id}`, "Read report");
    await offerMapping(row, file, made);
  } catch (error) {
    row.state("Refused", "bad");
    row.detail(error.message);
    const again = row.part("again");
    again.hidden = false;
    again.onclick = () => { row.element.remove(); run(new Row(file), file, mapping); };
  }
}

// The report suggests which column is which where it can tell; the reader decides.
async function offerMapping(row, file, made) {
  const report = await json("GET", `/v1/datasets/${made.id}/report`).catch(() => null);
  const suggested = report?.problems?.map((p) => p.command?.match(/--map (\S+)/)?.[1]).find(Boolean);
  if (!suggested) return;
  const form = row.part("mapping"), place = row.part("columns");
  for (const [column, field] of suggested.split(",").map((pair) => pair.split("="))) {
    const label = place.appendChild(document.createElement("label")), choice = document.createElement("select");
    label.className = "field";
    label.append(column, choice);
    choice.dataset.column = column;
    for (const name of new Set([field, "prompt", "completion", "messages", "text", "chosen", "rejected", "label", ""])) choice.add(new Option(name || "leave out", name));
  }
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const mapping = Object.fromEntries([...place.querySelectorAll("select")].filter((s) => s.value).map((s) => [s.dataset.column, s.value]));
    row.element.remove();
    run(new Row(file), file, mapping);
  });
}

const take = (files) => { for (const file of files) run(new Row(file), file); };
input.addEventListener("change", () => { take(input.files); input.value = ""; });
for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
