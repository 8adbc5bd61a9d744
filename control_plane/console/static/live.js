// Parts that the server renders again while the page is seen: all wording stays on the server.
import { localTimes } from "./times.js";

const REFRESH_MS = 5000;

const shown = new WeakMap();

// Puts new content into a part; a link that has the focus keeps it, and a form that is being filled in stays.
export function exchange(part, html) {
  if (shown.get(part) === html) return;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  if (focused && !focused.matches("a[href]")) return;
  shown.set(part, html);
  part.innerHTML = html;
  if (focused) [...part.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === focused.getAttribute("href"))?.focus();
  localTimes(part);
}

async function refresh(part) {
  if (document.hidden) return;
  const answer = await fetch(part.dataset.refresh).catch(() => null);
  if (answer?.redirected) location.reload();
  else if (answer?.ok) exchange(part, await answer.text());
}

for (const part of document.querySelectorAll("[data-refresh]")) {
  setInterval(() => refresh(part), REFRESH_MS);
  document.addEventListener("visibilitychange", () => refresh(part));
}
