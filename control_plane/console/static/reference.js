// Runs calls that only read, with the session of this browser, and opens the operation that the address names.
for (const button of document.querySelectorAll("[data-run]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const shown = button.closest(".body").querySelector("[data-answer]");
    shown.hidden = false;
    shown.textContent = "...";
    const answer = await fetch(button.dataset.run), text = await answer.text();
    try { shown.textContent = `${answer.status}\n${JSON.stringify(JSON.parse(text), null, 2)}`; } catch { shown.textContent = `${answer.status}\n${text}`; }
  });
}

function open() {
  const wanted = location.hash && document.getElementById(location.hash.slice(1));
  if (wanted instanceof HTMLDetailsElement) wanted.open = true;
}
addEventListener("hashchange", open);
open();
