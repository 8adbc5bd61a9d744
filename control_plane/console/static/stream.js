// Server-sent events read with fetch, so that a stream can begin after a known event. Reconnects until the stream says it is over.
// Closed while the tab is hidden: a browser has few connections to one host, and a page that nobody sees needs no news.
export async function follow(url, { after = 0, onEvent, onOver = () => {} }) {
  let last = after, pause = 1000;
  for (;;) {
    await visible();
    const stop = new AbortController();
    const hide = () => { if (document.hidden) stop.abort(); };
    document.addEventListener("visibilitychange", hide);
    try {
      const answer = await fetch(url, { headers: { "last-event-id": String(last) }, signal: stop.signal });
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) throw new Error(answer.statusText);
      for await (const { id, data } of events(answer.body)) {
        if (data === "[DONE]") { onOver(); return; }
        if (id) last = id;
        pause = 1000;
        onEvent(JSON.parse(data));
      }
    } catch {
      // broken, hidden, or the server restarts: ask again
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (!document.hidden) await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, 15_000);
  }
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => document.addEventListener("visibilitychange", () => !document.hidden && done(), { once: true })).then(visible);
}

async function* events(body) {
  let text = "";
  for await (const piece of chunks(body)) {
    text += piece;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const block of whole) {
      const lines = block.split("\n");
      const value = (name) => lines.filter((l) => l.startsWith(`${name}: `)).map((l) => l.slice(name.length + 2)).join("\n");
      if (value("data")) yield { id: Number(value("id")), data: value("data") };
    }
  }
}

export async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}
