// Exports of a model that are being made: shows how far they are, then what the server says of the finished ones.
import { json } from "./api.js";
import { localTimes } from "./times.js";

const PAUSE_MS = 2000;
const pending = (one) => ["queued", "running"].includes(one?.status) || (one?.status === "ready" && !one.signature);
const card = document.querySelector("[data-exports]");

async function refresh() {
  const answer = await fetch(location.pathname);
  if (!answer.ok || answer.redirected) return location.reload();
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-exports]");
  card.innerHTML = fresh.innerHTML;
  localTimes(card);
}

while (card.querySelector("[data-pending]")) {
  await new Promise((done) => setTimeout(done, PAUSE_MS));
  if (document.hidden) continue;
  const { data } = await json("GET", `/v1/adapters/${card.dataset.exports}/exports`).catch(() => ({ data: null }));
  if (!data) continue;
  const rows = [...card.querySelectorAll("[data-pending]")], found = (row) => data.find((one) => one.id === row.dataset.export);
  if (rows.some((row) => !pending(found(row)) || (found(row).status === "ready" && row.querySelector("[data-stage]")))) await refresh();
  else for (const row of rows) {
    const { progress } = found(row);
    if (progress) row.querySelector("[data-stage]").textContent = `${progress.stage}, ${Math.round(progress.seconds)} s`;
  }
}
