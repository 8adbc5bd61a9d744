// What every page does: theme, menu, local times, copying, and a question before a change that matters.
import { localTimes } from "./times.js";

localTimes(document);

const root = document.documentElement;
for (const button of document.querySelectorAll("[data-switch-theme]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
  });
}

const menu = document.querySelector("[data-menu]");
menu?.addEventListener("click", () => {
  const isOpen = document.querySelector(".side").classList.toggle("open");
  menu.setAttribute("aria-expanded", String(isOpen));
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = button.dataset.copy ? document.querySelector(button.dataset.copy) : button.parentElement.querySelector("pre");
  await navigator.clipboard.writeText(source.value ?? source.textContent);
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
});

for (const button of document.querySelectorAll("[data-print]")) {
  button.hidden = false;
  button.addEventListener("click", () => print());
}

// A change that cannot be undone waits until the name is typed; the server compares it, too.
for (const form of document.querySelectorAll("form[data-typed]")) {
  const button = form.querySelector("button"), typed = form.elements.confirm, check = () => { button.disabled = typed.value.trim() !== form.dataset.typed; };
  typed.addEventListener("input", check);
  check();
}

const dialog = document.querySelector("dialog[data-confirm-dialog]");
document.addEventListener("submit", (event) => {
  const form = event.target, submitter = event.submitter, question = form.dataset.confirm;
  if (!question || form.dataset.confirmed) return;
  event.preventDefault();
  dialog.querySelector("h2").textContent = question;
  const consequences = form.querySelector("[data-consequences]")?.content.cloneNode(true) ?? form.dataset.consequence ?? "";
  dialog.querySelector("[data-text]").replaceChildren(consequences);
  localTimes(dialog);
  const confirm = dialog.querySelector("[value=confirm]");
  confirm.textContent = submitter.textContent.trim();
  confirm.className = submitter.classList.contains("danger") ? "danger" : "primary";
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue !== "confirm") return;
    form.dataset.confirmed = "yes";
    form.requestSubmit(submitter);
  };
  dialog.showModal();
});
