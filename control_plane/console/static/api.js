// Calls of the API by the page's session. A refusal is thrown with the API's message.
const token = document.querySelector('meta[name="csrf-token"]').content;

export async function call(method, path, body, { signal } = {}) {
  const headers = { "x-csrf-token": token };
  if (body !== undefined && !(body instanceof FormData)) { headers["content-type"] = "application/json"; body = JSON.stringify(body); }
  const answer = await fetch(path, { method, headers, body, signal });
  if (answer.status === 401) location.reload();
  if (answer.ok) return answer;
  const refusal = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(refusal.error?.message ?? answer.statusText), { code: refusal.error?.code, param: refusal.error?.param, status: answer.status });
}

export const json = async (...given) => (await call(...given)).json();
