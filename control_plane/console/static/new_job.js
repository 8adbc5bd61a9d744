// Builds the body of a job from the form, estimates it while the reader types, shows it as code, and submits it.
import { call, json } from "./api.js";
import { python, quoted } from "./code.js";
import { expected, localTimes } from "./times.js";

const PAUSE_MS = 400;
const form = document.querySelector("[data-form]"), at = (name) => document.querySelector(`[data-${name}]`);
const dollars = (micros) => `$${(micros / 1e6).toFixed(micros && micros < 10_000 ? 4 : 2)}`;
const many = (number) => number.toLocaleString();
let language = "curl", timer, shownRecipe, asked = 0, added = 0;

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;

function typed(text) {
  if (text === "true" || text === "false") return text === "true";
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

// One file is OpenAI's training_file; several, or one that is read in another way, are a mixture.
function data() {
  const files = [...document.querySelectorAll("[data-source]")].map((row) => {
    const how = row.querySelector("[data-how]").value, much = row.querySelector("[data-much]").value;
    return { file: row.querySelector("[data-file]").value, ...(how && { [how]: typed(much.trim() || "1") }) };
  });
  return files.length === 1 && Object.keys(files[0]).length === 1 ? { training_file: files[0].file } : { training_files: files };
}

function body() {
  const value = (name) => form.elements[name].value, is = (name) => form.elements[name].checked;
  const hyperparameters = Object.fromEntries([...document.querySelectorAll("[data-hp]")].filter((f) => f.value.trim()).map((f) => [f.dataset.hp, typed(f.value)]));
  const limits = [...document.querySelectorAll("[data-limit]")], skip = [...document.querySelectorAll("[data-rule]:not(:checked)")].map((box) => box.dataset.rule);
  const owned = new Set(["approval", "mode", "skip", ...limits.map((field) => field.dataset.limit)]);
  const evaluation = {
    ...Object.fromEntries(Object.entries(JSON.parse(form.dataset.eval)).filter(([name]) => !owned.has(name))),
    ...(is("approval") && { approval: "required" }), ...(is("experiment") ? { mode: "experiment" } : is("monitor") && { mode: "monitor" }), ...(skip.length && { skip }),
    ...Object.fromEntries(limits.filter((field) => field.value.trim()).map((field) => [field.dataset.limit, typed(field.value)])),
  };
  return {
    model: value("model"), ...data(),
    ...(value("validation_file") && { validation_file: value("validation_file") }),
    ...(value("suffix") && { suffix: value("suffix") }),
    ...(value("method") !== "sft" && { method: value("method") }),
    ...(value("adapter") !== "lora" && { adapter: value("adapter") }),
    ...(Object.keys(hyperparameters).length && { hyperparameters }),
    ...(Object.keys(evaluation).length && { eval_config: evaluation }),
    ...(is("auto_promote") === is("experiment") && { auto_promote: is("auto_promote") }), // an experiment is not promoted by default
  };
}

const OPENAI = ["model", "training_file", "validation_file", "suffix"];
const CODE = {
  curl: (job) => `curl ${location.origin}/v1/fine_tuning/jobs \\\n  -H "Authorization: Bearer $FT_API_KEY" -H "Content-Type: application/json" \\\n  -d ${quoted(JSON.stringify(job, null, 2))}`,
  python: (job) => {
    const own = Object.entries(job).filter(([name]) => OPENAI.includes(name)).map(([name, value]) => `    ${name}=${python(value)},`);
    const other = Object.fromEntries(Object.entries(job).filter(([name]) => !OPENAI.includes(name)));
    if (job.training_files) own.push("    training_file=None,"); // which the client requires
    const extra = Object.keys(other).length ? [`    extra_body=${python(other)},`] : [];
    return `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1")  # the key is in OPENAI_API_KEY\njob = client.fine_tuning.jobs.create(\n${[...own, ...extra].join("\n")}\n)`;
  },
  ft: (job) => {
    const options = [["validation_file", "--validation-file"], ["suffix", "--suffix"], ["method", "--method"], ["adapter", "--adapter"]];
    const given = options.filter(([name]) => job[name]).map(([name, option]) => `${option} ${quoted(job[name])}`);
    const settings = Object.entries(job.hyperparameters ?? {}).map(([name, value]) => `--hp ${quoted(`${name}=${value}`)}`);
    const { mode, skip = [], suites = [], ...rest } = job.eval_config ?? {};
    const gate = [...(mode ? [mode === "experiment" ? "--experiment" : `--gate ${mode}`] : []), ...skip.map((rule) => `--skip ${rule}`), ...suites.map((suite) => `--suite ${suite}`)];
    const promote = job.auto_promote === undefined ? [] : [job.auto_promote ? "--promote" : "--no-promote"];
    const missing = Object.keys(rest).length ? `\n# ft has no option for ${Object.keys(rest).join(", ")} of eval_config; use curl or Python` : "";
    const files = (job.training_files ?? [{ file: job.training_file }]).map(({ file, weight, tokens }) => file + (weight ? `,weight=${weight}` : tokens ? `,tokens=${tokens}` : ""));
    return ["ft submit", ...files, `--model ${quoted(job.model)}`, ...given, ...settings, ...gate, ...promote, "--wait"].join(" ") + missing;
  },
};

function show(box, text) {
  box.hidden = !text;
  if (text) box.querySelector("p").textContent = text;
}

// The field that a refusal is about: `hyperparameters.rank`, `eval_config.max_items`, `suffix`.
function fieldOf(param) {
  const name = CSS.escape(param?.split(".").at(-1) ?? "");
  if (["training_file", "training_files"].includes(name)) return document.querySelector("[data-file]");
  return name ? form.querySelector(`[data-hp="${name}"], [data-limit="${name}"], [name="${name}"]:not([type="radio"]), [name="${name}"]:checked`) : null;
}

// A reason stands beside its field, and beside the button if it is about none.
function refuse(error, { focus = false } = {}) {
  form.querySelectorAll("[data-reason]").forEach((one) => one.remove());
  form.querySelectorAll("[aria-invalid]").forEach((one) => { one.removeAttribute("aria-invalid"); one.removeAttribute("aria-describedby"); });
  const field = error && (error.field ?? fieldOf(error.param)), place = field?.closest(".field, fieldset");
  if (!place) return show(at("refusal"), error && sentence(error.message));
  const reason = Object.assign(document.createElement("span"), { className: "hint bad", id: "reason", textContent: error.message });
  reason.dataset.reason = "";
  place.append(reason);
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", reason.id);
  field.closest("details")?.setAttribute("open", "");
  show(at("refusal"), `Change ${place.querySelector("label, legend").textContent.trim()}: the reason is beside it.`);
  if (focus) field.focus();
}

async function defaults(name) {
  const path = `/v1/recipes/${encodeURIComponent(name)}?method=${encodeURIComponent(form.elements.method.value)}`;
  if (shownRecipe === path) return;
  shownRecipe = path;
  const found = await json("GET", path);
  at("recipe").textContent = `Defaults of ${found.id}`;
  document.querySelectorAll("[data-hint]").forEach((hint) => { hint.textContent = ""; });
  for (const [key, { value, source }] of Object.entries(found.defaults)) {
    const field = document.querySelector(`[data-hp="${key}"]`), hint = document.querySelector(`[data-hint="${key}"]`);
    if (!field) continue;
    if (field.tagName === "INPUT") field.placeholder = `${value}`;
    else field.options[0].textContent = `Default (${value})`;
    hint.textContent = `Default ${value}: ${source}.`;
  }
}

function quotaWarnings(quota) {
  if (!quota.fits) return [`The monthly cap leaves ${quota.left_gpu_hours} GPU-hours, and this job needs ${quota.job_gpu_hours.toPrecision(3)}.`];
  return quota.goes_into_overage ? [`This job is expected to go ${quota.overage_gpu_hours.toPrecision(3)} GPU-hours over the soft limit.`] : [];
}

// What the report says about the data, which a job would train on all the same.
const reports = new Map();
async function dataWarnings(file) {
  if (!reports.has(file)) reports.set(file, json("GET", `/v1/datasets/${file}/report`).catch(() => ({})));
  const { warnings = [], review = [] } = await reports.get(file);
  return [...(review.length ? ["The dataset waits for your approval, and no job trains on it before."] : []), ...warnings.map(({ message }) => sentence(message))];
}

function showWarnings(found) {
  at("warning").hidden = !found.length;
  at("warning").querySelector("ul").replaceChildren(...found.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

// An earlier job may name a file that was deleted or does not validate: no other one takes its place.
function absent() {
  const option = [...form.querySelectorAll("option:checked")].find(({ disabled }) => disabled);
  return option && { message: `${option.textContent}. Choose another file.`, field: option.closest("select") };
}

async function estimate() {
  const job = body(), mine = ++asked;
  at("code").textContent = CODE[language](job);
  document.querySelectorAll("[data-price-of]").forEach((price) => { price.textContent = ""; });
  if (absent()) {
    at("estimate").hidden = at("wait").hidden = true;
    return refuse(absent());
  }
  const files = job.training_files?.map(({ file }) => file) ?? [job.training_file];
  if (!job.model || !files[0]) return;
  at("wait").textContent = "Estimating";
  try {
    const found = await json("POST", "/v1/fine_tuning/jobs/estimate", job);
    if (mine !== asked) return;
    const time = (seconds) => (seconds == null ? "cannot be foreseen" : expected(new Date(seconds * 1000)));
    at("price").textContent = dollars(found.price_micros);
    at("gpu").textContent = `${found.gpu_hours.toPrecision(3)} on ${found.num_gpus} GPU${found.num_gpus === 1 ? "" : "s"} (${found.gpu_type})`;
    at("tokens").textContent = `${many(found.tokens.total)}${found.tokens.counted ? "" : " (extrapolated)"}`;
    at("steps").textContent = `${many(found.total_steps)} over ${found.n_epochs} epochs`;
    at("start").textContent = time(found.estimated_start);
    at("finish").textContent = time(found.estimated_finish);
    at("estimate").hidden = false;
    at("wait").hidden = true;
    refuse(null);
    await defaults(found.recipe);
    const warnings = [...quotaWarnings(found.quota), ...(await Promise.all(files.map(dataWarnings))).flat()];
    if (mine === asked) showWarnings(warnings);
  } catch (error) {
    if (mine !== asked) return;
    at("estimate").hidden = true;
    at("wait").hidden = true;
    refuse(error);
  }
}

form.addEventListener("input", ({ target }) => {
  const { experiment, monitor, auto_promote: promote } = form.elements;
  if (target === experiment && experiment.checked) monitor.checked = promote.checked = false;
  if (target === monitor && monitor.checked) experiment.checked = false;
  at("code").textContent = CODE[language](body());
  clearTimeout(timer);
  timer = setTimeout(estimate, PAUSE_MS);
});

function showReadings() {
  const rows = document.querySelectorAll("[data-source]");
  for (const row of rows) row.querySelectorAll("[data-reading]").forEach((field) => { field.hidden = rows.length === 1 && !row.querySelector("[data-how]").value; });
  at("add-file").disabled = rows.length >= Number(at("sources").dataset.max);
}

at("add-file").addEventListener("click", () => {
  at("sources").insertAdjacentHTML("beforeend", at("another").innerHTML.replaceAll("-new\"", `-added-${++added}"`));
  localTimes(at("sources"));
  showReadings();
  at("sources").lastElementChild.querySelector("select").focus();
  form.dispatchEvent(new Event("input"));
});

at("sources").addEventListener("click", ({ target }) => {
  if (!("removeFile" in target.dataset)) return;
  target.closest("[data-source]").remove();
  showReadings();
  form.dispatchEvent(new Event("input"));
});

document.querySelector("[data-compare-prices]")?.addEventListener("click", async () => {
  const job = body(), mine = asked;
  for (const price of document.querySelectorAll("[data-price-of]")) {
    const found = await json("POST", "/v1/fine_tuning/jobs/estimate", { ...job, model: price.dataset.priceOf }).catch((error) => ({ refusal: error.message }));
    if (mine !== asked) return;
    price.textContent = found.refusal ?? `${dollars(found.price_micros)} for this data`;
  }
});

for (const button of document.querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => {
    language = button.dataset.language;
    document.querySelectorAll("[data-language]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    at("code").textContent = CODE[language](body());
  });
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (absent()) return refuse(absent(), { focus: true });
  const button = at("submit");
  button.disabled = true;
  try {
    const made = await (await call("POST", "/v1/fine_tuning/jobs", body())).json();
    location.assign(`/console/jobs/${made.id}`);
  } catch (error) {
    refuse(error, { focus: true });
    button.disabled = false;
  }
});

showReadings();
estimate();
