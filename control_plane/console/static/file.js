// A file that is being validated: shows how far it is, then its report.
import { follow } from "./stream.js";

const card = document.querySelector("[data-file]");
const onEvent = ({ status, progress }) => {
  if (status !== "uploaded") return location.reload();
  if (progress) {
    card.querySelector("[data-stage]").textContent = `${progress.stage}, ${progress.rows.toLocaleString()} rows`;
    if (progress.total_bytes) { const bar = card.querySelector("progress"); bar.max = progress.total_bytes; bar.value = progress.bytes; }
  }
};
if (card.querySelector("progress")) follow(`/v1/files/${card.dataset.file}/events`, { onEvent, onOver: () => location.reload() });
