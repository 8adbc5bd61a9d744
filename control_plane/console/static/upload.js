// Uploads files in parts. What was sent is kept in this browser, so that an upload goes on after a lost connection or a closed page.
import { json } from "./api.js";
import { amount } from "./progress.js";
import { follow } from "./stream.js";

const PART_BYTES = 8 * 2 ** 20, MOST_PAUSE_MS = 30_000, KEPT = "upload:";
const keyOf = ({ name, size, lastModified }) => `${KEPT}${name}:${size}:${lastModified}`;
const kept = (key) => JSON.parse(localStorage.getItem(key) ?? "null");
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
  offer(name, action, text) { const button = this.part(name); button.hidden = false; button.onclick = action; if (text) button.textContent = text; }
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

async function isOpen(row, upload) {
  const found = await patiently(row, () => json("GET", `/v1/uploads/${upload.id}`)).catch(() => null);
  return found?.status === "pending";
}

async function begun(row, file, settings) {
  const earlier = kept(keyOf(file));
  if (earlier && JSON.stringify(earlier.settings) === JSON.stringify(settings) && await isOpen(row, earlier)) return earlier;
  const body = { filename: file.name, bytes: file.size, mime_type: file.type || "application/octet-stream", purpose: "fine-tune", ...settings };
  const { id } = await patiently(row, () => json("POST", "/v1/uploads", body));
  return { id, parts: [], settings, name: file.name, size: file.size };
}

async function send(row, file, settings) {
  const key = keyOf(file), upload = await begun(row, file, settings);
  for (let at = upload.parts.length; at * PART_BYTES < file.size; at += 1) {
    localStorage.setItem(key, JSON.stringify(upload));
    row.state("Uploading");
    row.progress((at * PART_BYTES) / file.size);
    row.detail(`${size(at * PART_BYTES)} of ${size(file.size)}`);
    const form = new FormData();
    form.append("data", file.slice(at * PART_BYTES, (at + 1) * PART_BYTES), "part");
    upload.parts.push((await patiently(row, () => json("POST", `/v1/uploads/${upload.id}/parts`, form))).id);
  }
  localStorage.setItem(key, JSON.stringify(upload));
  row.state("Validating");
  row.progress(null);
  row.detail("");
  const done = await patiently(row, () => json("POST", `/v1/uploads/${upload.id}/complete`, { part_ids: upload.parts }));
  localStorage.removeItem(key);
  return done.file;
}

const STAGES = { starting: "Fetching", fetching: "Fetching", reading: "Reading rows", duplicates: "Comparing rows", writing: "Storing rows" };

function validated(row, file) {
  if (file.status !== "uploaded") return Promise.resolve(file);
  return new Promise((done) => {
    const onEvent = ({ progress }) => {
      if (!progress) return;
      row.progress(progress.total_bytes ? progress.bytes / progress.total_bytes : null);
      row.detail([STAGES[progress.stage] ?? progress.stage, amount(progress)].filter(Boolean).join(": "));
    };
    follow(`/v1/files/${file.id}/events`, { onEvent, onOver: async () => done(await json("GET", `/v1/files/${file.id}`)) });
  });
}

function chosenSettings() {
  const chosen = (id) => document.querySelector(`#${id}`).value, settings = {}, policies = {}, mapping = JSON.parse(list.dataset.columnMap);
  if (Object.keys(mapping).length) settings.column_map = mapping;
  if (list.dataset.rowsAt) settings.rows_at = list.dataset.rowsAt;
  if (chosen("model")) settings.model = chosen("model");
  if (chosen("encoding")) settings.encoding = chosen("encoding");
  if (chosen("pii")) policies.pii = chosen("pii");
  if (document.querySelector("#bad_rows").checked) policies.bad_rows = "drop";
  return Object.keys(policies).length ? { ...settings, policies } : settings;
}

async function run(row, file, settings) {
  try {
    await conclude(row, await validated(row, await send(row, file, settings)), file, settings);
  } catch (error) {
    row.state("Refused", "bad");
    row.detail(error.message);
    row.offer("again", () => again(row, file, settings));
  }
}

function again(row, file, settings) {
  row.element.remove();
  run(new Row(file), file, settings);
}

async function conclude(row, made, file, settings) {
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
  if (file) await offerCorrections(row, file, made, settings);
}

// The report suggests how the file is to be read where it can tell; the reader decides.
async function offerCorrections(row, file, made, settings) {
  const report = await json("GET", `/v1/datasets/${made.id}/report`).catch(() => ({}));
  const inCommand = (option) => new RegExp(`--${option} (?:'([^']+)'|(\\S+))`);
  const suggested = (option) => report.problems?.map((p) => p.command?.match(inCommand(option))).filter(Boolean).map(([, quoted, plain]) => quoted ?? plain)[0];
  const encoding = suggested("encoding"), rows_at = suggested("rows-at"), mapping = suggested("map"), bad = report.stats?.bad_rows;
  if (encoding && encoding !== settings.encoding) row.offer("reread", () => again(row, file, { ...settings, encoding }), `Read it as ${encoding}`);
  else if (rows_at && rows_at !== settings.rows_at) row.offer("reread", () => again(row, file, { ...settings, rows_at }), `Read the rows at ${rows_at}`);
  if (mapping) offerMapping(row, file, settings, mapping);
  else if (bad && bad < report.rows) row.offer("drop-rows", () => again(row, file, { ...settings, policies: { ...settings.policies, bad_rows: "drop" } }), `Leave out ${bad.toLocaleString()} bad row${bad === 1 ? "" : "s"}`);
}

function offerMapping(row, file, settings, suggested) {
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
    again(row, file, { ...settings, column_map: mapping });
  });
}

// Uploads that were interrupted, and files that are still validated, from before the page was loaded.
async function listEarlier() {
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(KEPT))) {
    const upload = kept(key);
    if (!upload.name) { localStorage.removeItem(key); continue; }
    const row = new Row(upload);
    row.element.dataset.key = key;
    if (!(await isOpen(row, upload))) { localStorage.removeItem(key); row.element.remove(); continue; }
    if (!row.element.isConnected) continue;
    row.state("Interrupted", "warn");
    row.progress((upload.parts.length * PART_BYTES) / upload.size);
    row.detail(`${size(Math.min(upload.size, upload.parts.length * PART_BYTES))} of ${size(upload.size)} are here. Choose the file again to go on.`);
    row.offer("continue", () => input.click());
    row.offer("discard", async () => {
      row.element.remove();
      localStorage.removeItem(key);
      await json("POST", `/v1/uploads/${upload.id}/cancel`).catch(() => {});
    });
  }
}

for (const file of JSON.parse(list.dataset.validating)) {
  const row = new Row({ name: file.filename, size: file.bytes });
  row.state("Validating");
  row.progress(null);
  validated(row, file).then((made) => conclude(row, made));
}
listEarlier();

function take(files) {
  for (const file of files) {
    const key = keyOf(file), earlier = kept(key);
    list.querySelectorAll("[data-key]").forEach((row) => { if (row.dataset.key === key) row.remove(); });
    run(new Row(file), file, earlier?.settings ?? chosenSettings());
  }
}
input.addEventListener("change", () => { take(input.files); input.value = ""; });
for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files); });
