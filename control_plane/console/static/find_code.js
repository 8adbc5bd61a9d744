// The page of error codes: shows the codes whose name or text has every word that is typed.
const box = document.querySelector("[data-find-code]"), input = box.querySelector("input"), found = box.querySelector("[data-found]");
const parts = [...document.querySelector("article.guide").children], codes = [], sections = [];
for (const part of parts) {
  if (part.matches("h2")) sections.push({ heading: part, about: [], codes: [] });
  else if (part.matches("h3") && codes.length && codes.at(-1).parts.every((one) => one.matches("h3"))) codes.at(-1).parts.push(part); // codes that share a text
  else if (part.matches("h3")) { codes.push({ parts: [part] }); sections.at(-1).codes.push(codes.at(-1)); }
  else if (sections.at(-1)?.codes.length) codes.at(-1).parts.push(part);
  else sections.at(-1)?.about.push(part);
}
for (const code of codes) code.text = code.parts.map((part) => part.textContent).join(" ").toLowerCase();

function filter() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const code of codes) {
    code.isFound = words.every((word) => code.text.includes(word));
    for (const part of code.parts) part.hidden = !code.isFound;
  }
  for (const { heading, about, codes: own } of sections) {
    const isShown = !words.length || own.some((code) => code.isFound);
    for (const part of [heading, ...about]) part.hidden = !isShown;
  }
  const count = (some) => some.reduce((sum, { parts: all }) => sum + all.filter((part) => part.matches("h3")).length, 0);
  found.textContent = words.length ? `${count(codes.filter((code) => code.isFound))} of ${count(codes)}` : "";
}

box.hidden = false;
input.addEventListener("input", filter);
filter();
