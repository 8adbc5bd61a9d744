// A file that is being validated: marks the stage that it is in and how far that is, then shows the report.
import { follow } from "./stream.js";
import { amount } from "./progress.js";

const card = document.querySelector("[data-file]");

function show(progress) {
  const bar = card.querySelector("progress"), stages = [...card.querySelectorAll("[data-stage]")];
  const now = stages.findIndex((stage) => stage.dataset.stage === progress.stage);
  if (now >= 0) stages.forEach((stage, i) => { stage.className = i < now ? "done" : i === now ? "now" : ""; });
  if (progress.total_bytes) { bar.max = progress.total_bytes; bar.value = progress.bytes; } else bar.removeAttribute("value");
  card.querySelector("[data-amount]").textContent = amount(progress);
}

if (card) {
  const onEvent = ({ status, progress }) => { if (status !== "uploaded") location.reload(); else if (progress) show(progress); };
  follow(`/v1/files/${card.dataset.file}/events`, { onEvent, onOver: () => location.reload() });
}
