// Times in the reader's time zone, and how long ago or ahead they are.
const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric" });
const MOMENT = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ/;
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60]];

export function since(date) {
  const seconds = (date - Date.now()) / 1000;
  const [unit, size] = UNITS.find(([, size]) => Math.abs(seconds) >= size) ?? ["second", 1];
  return relative.format(Math.round(seconds / size), unit);
}

// An expected time that has passed did not come true yet.
export const expected = (date) => (date > Date.now() ? since(date) : "any moment");
const FORMS = { relative: since, expected };

export function localTimes(within) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const date = new Date(time.dateTime), form = FORMS[time.dataset.form];
    time.textContent = form ? form(date) : absolute.format(date);
    time.title = form ? absolute.format(date) : since(date);
  }
  for (const option of within.querySelectorAll("option[data-dated]")) {
    option.textContent = option.textContent.replace(MOMENT, (moment) => absolute.format(new Date(moment)));
    delete option.dataset.dated;
  }
  for (const tick of within.querySelectorAll("[data-clock]")) {
    const date = new Date(tick.dataset.clock), isMidnight = date.getHours() + date.getMinutes() === 0;
    tick.textContent = (isMidnight ? day : clock).format(date);
  }
}

setInterval(() => localTimes(document), 30_000);
