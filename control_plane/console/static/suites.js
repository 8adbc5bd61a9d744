// Adding a contamination list: offers the fields of the chosen file, and shows why a list is refused beside the form.
import { call } from "./api.js";

const HEAD_BYTES = 65_536;
const form = document.querySelector("[data-suite]"), find = (name) => form.querySelector(`[data-${name}]`);

async function fieldsOf(file) {
  const line = (await file.slice(0, HEAD_BYTES).text()).replace(/^\uFEFF/, "").split(/\r?\n/)[0];
  if (/\.[ct]sv$/i.test(file.name)) return line.split(/\.tsv$/i.test(file.name) ? "\t" : ",").map((name) => name.trim().replace(/^"(.*)"$/, "$1"));
  try { return Object.keys(JSON.parse(line)); } catch { return []; } // compressed, Parquet, or one JSON document
}

form.elements.file.addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  const { name, field } = form.elements, names = await fieldsOf(file);
  if (!name.value) name.value = file.name.split(".")[0].replace(/[^\w-]+/g, "-");
  form.querySelector("datalist").replaceChildren(...names.map((one) => new Option(one)));
  if (names.length) find("fields").textContent = `The file has ${names.join(", ")}.`;
  if (names.length && !names.includes(field.value)) field.value = names[0];
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  find("refused").hidden = true;
  find("progress").textContent = "Reading the file";
  try {
    await call("POST", "/v1/suites", new FormData(form));
    location.assign(`${location.pathname}?notice=suite-added`);
  } catch (error) {
    find("why").textContent = error.message;
    find("refused").hidden = false;
    find("progress").textContent = "";
    button.disabled = false;
  }
});
