// A job: new steps extend the curves, other events refresh what the server renders. A finished job asks for nothing.
import { follow, chunks } from "./stream.js";
import { addPoint, interactive } from "./charts.js";
import { exchangeParts, parsed } from "./live.js";

const card = document.querySelector("[data-job]"), id = card.dataset.job;
const api = `/v1/fine_tuning/jobs/${id}`;
const QUEUE_REFRESH_MS = 15_000, REFRESH_PAUSE_MS = 1000, MOST_COMPARED = 3;
let isDue = false;

interactive(document.querySelector("[data-charts]"));
document.querySelectorAll("[data-zoom-bar]").forEach((bar) => { bar.hidden = !document.querySelector("[data-charts] svg"); });

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (!answer || answer.status >= 500) return refreshSoon(); // the server restarts
  if (!answer.ok || answer.redirected) return location.reload();
  const fresh = parsed(await answer.text());
  exchangeParts(fresh);
  const charts = fresh.querySelector("[data-charts]"), shown = document.querySelector("[data-charts]");
  if (charts.childElementCount !== shown.childElementCount) {
    shown.innerHTML = charts.innerHTML;
    document.querySelector("[data-none]")?.remove();
    document.querySelectorAll("[data-zoom-bar]").forEach((bar) => { bar.hidden = false; });
  }
  card.dataset.state = fresh.querySelector("[data-job]").dataset.state;
}

function refreshSoon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => { isDue = false; refresh(); }, REFRESH_PAUSE_MS);
}

function measured({ step, total_steps: total, ...values }) {
  if (!document.querySelector("[data-charts] svg")) return refreshSoon();
  addPoint(step, { ...values, loss: values.train_loss, eval_loss: values.valid_loss });
  const show = (name, text) => { const at = document.querySelector(`[data-${name}]`); if (at) at.textContent = text; };
  show("step", step);
  if (values.train_loss != null) show("loss", values.train_loss.toFixed(4));
  if (values.tokens_per_s != null) show("speed", Math.round(values.tokens_per_s).toLocaleString());
  const bar = document.querySelector("[data-progress]");
  bar.value = step;
  if (total) bar.max = total;
}

if (!("over" in card.dataset)) {
  const onEvent = (event) => (event.type === "metrics" ? measured(event.data) : refreshSoon());
  follow(`${api}/events?stream=true`, { after: card.dataset.last, onEvent, onOver: refresh });
  setInterval(() => { if (!document.hidden && ["queued", "preempted"].includes(card.dataset.state)) refresh(); }, QUEUE_REFRESH_MS);
}

document.querySelector("[data-compare]")?.addEventListener("change", (event) => {
  const boxes = [...event.currentTarget.querySelectorAll("input")], isFull = boxes.filter((box) => box.checked).length >= MOST_COMPARED;
  boxes.forEach((box) => { box.disabled = isFull && !box.checked; });
});

document.querySelector("[data-open-log]").addEventListener("click", async (event) => {
  event.target.remove();
  const log = document.querySelector("[data-log]");
  log.hidden = false;
  log.textContent = "";
  const answer = await fetch(`${api}/logs${"over" in card.dataset ? "" : "?follow=true"}`);
  if (!answer.ok) { log.textContent = (await answer.json()).error.message; return; }
  for await (const text of chunks(answer.body)) {
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.append(text);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
});
