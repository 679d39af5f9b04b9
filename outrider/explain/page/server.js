// What the page asks of its server. Only this file knows addresses.

let key = ""; // held in memory only

export function useKey(given) {
  key = given;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `the server said ${answer.status}`);
}

export async function getJson(path) {
  return (await ask(path)).json();
}

// Each event of a streamed answer.
export async function* streamed(path, body, signal) {
  const answer = await ask(path, { method: "POST", signal, headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }) });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    held += value ?? "";
    const events = held.split(/\r?\n\r?\n/);
    held = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length || data[0] === "[DONE]") continue;
      const said = JSON.parse(data.join("\n"));
      if (said.error) throw new Refused(said.error.code ?? 500, said.error.message);
      yield said;
    }
    if (done) return;
  }
}
