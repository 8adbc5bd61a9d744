// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's applies.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
