// Calls of the API as code: what pages offer to copy.
export const quoted = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;

export function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

export function curl(method, url, body, key = "$FT_API_KEY") {
  const lines = [`curl ${method === "GET" ? "" : `-X ${method} `}${/[?&]/.test(url) ? quoted(url) : url}`, `-H "Authorization: Bearer ${key}"`];
  if (body !== undefined) lines.push(`-H "Content-Type: application/json"`, `-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

// `given`: [name, value] of arguments; those without a name are positional. What the client does not know goes into `extra`.
export function openai(call, given, { own = [], extra = "extra_body" } = {}) {
  const known = given.filter(([name]) => !own.includes(name)), other = given.filter(([name]) => own.includes(name));
  const lines = known.map(([name, value]) => (name ? `${name}=${python(value)}` : python(value)));
  if (other.length) lines.push(`${extra}=${python(Object.fromEntries(other))}`);
  const inside = lines.length > 1 || lines.join("").length > 60 ? `\n${lines.map((line) => `    ${line},\n`).join("")}` : lines.join("");
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1")  # the key is in OPENAI_API_KEY\nanswer = client.${call}(${inside})`;
}
