// Parts that the server renders again while the page is seen: all wording stays on the server.
import { localTimes } from "./times.js";

const REFRESH_MS = 5000;
const KEPT = "a[href], .scroll";

const shown = new WeakMap();

// Puts new content into a part, and returns whether the part now shows it: a link or a scrolled table that has the focus keeps it, and a
// form that is being filled in, or a text that is being selected, stays until later.
export function exchange(part, html) {
  if (shown.get(part) === html) return true;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  if ((focused && !focused.matches(KEPT)) || isInUse(part)) return false;
  const place = focused && [...part.querySelectorAll(KEPT)].filter((one) => isSame(one, focused)).indexOf(focused);
  const scrolled = [...part.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  shown.set(part, html);
  part.innerHTML = html;
  if (focused) [...part.querySelectorAll(KEPT)].filter((one) => isSame(one, focused))[place]?.focus({ preventScroll: true });
  part.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
  localTimes(part);
  return true;
}

const isSame = (one, other) => one.tagName === other.tagName && one.getAttribute("href") === other.getAttribute("href");

function isInUse(part) {
  const selection = getSelection();
  const isSelected = !selection.isCollapsed && part.contains(selection.anchorNode);
  return isSelected || [...part.querySelectorAll("input, textarea")].some((field) => field.value !== field.defaultValue);
}

// Does so for every part with a name that is in both documents.
export function exchangeParts(fresh) {
  const parts = [...document.querySelectorAll("[data-live]")].map((part) => [part, fresh.querySelector(`[data-live="${part.dataset.live}"]`)]);
  return parts.filter(([, now]) => now).map(([part, now]) => exchange(part, now.innerHTML)).every(Boolean);
}

export const parsed = (html) => new DOMParser().parseFromString(html, "text/html");

async function refresh(part) {
  const answer = await fetch(part.dataset.refresh).catch(() => null);
  if (answer?.redirected) location.reload();
  else if (answer?.ok) exchange(part, await answer.text());
}

// A page with a mark is requested as a whole; the server answers without a body while nothing has changed.
const mark = document.querySelector('meta[name="live-mark"]');

async function refreshPage() {
  const answer = await fetch(location.href, { headers: { "if-none-match": mark.content } }).catch(() => null);
  if (answer?.redirected) return location.reload();
  if (!answer?.ok) return; // nothing new, or the server restarts
  const fresh = parsed(await answer.text());
  if (exchangeParts(fresh)) mark.content = fresh.querySelector('meta[name="live-mark"]').content;
}

function repeat(task) {
  const ifSeen = () => { if (!document.hidden) task(); };
  setInterval(ifSeen, REFRESH_MS);
  document.addEventListener("visibilitychange", ifSeen);
}

for (const part of document.querySelectorAll("[data-refresh]")) repeat(() => refresh(part));
if (mark) repeat(refreshPage);
