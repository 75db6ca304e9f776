// Requests to the api. The key goes into a header, never into a URL; EventSource cannot send one, so streams are read by hand.

const KEY = "midsentence-api-key";

/** The server has answered, and trying again would not help. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

export async function call(path, { headers = {}, ...how } = {}) {
  const key = sessionStorage.getItem(KEY);
  const signed = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
  const response = await fetch(path, { cache: "no-store", ...how, headers: signed });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail ?? problem.error?.message ?? `${path} answers ${response.status}`;
  if (response.status === 429 || response.status >= 500) throw new Error(detail);
  throw new Refused(response.status, detail);
}

/**
 * Gives each event of a stream to `take`, over every break, from the last id on; until `take` answers true, the server says that
 * there is nothing more (204), or `signal` ends it. A stream that is silent for `quiet` ms counts as broken. Throws Refused.
 */
export async function follow(path, take, { signal, quiet, onLost = () => {} }) {
  let lastId = "";
  let pause = 250;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const end = () => attempt.abort();
    signal.addEventListener("abort", end);
    let timer = setTimeout(end, quiet);
    try {
      const headers = lastId ? { "Last-Event-ID": lastId } : {};
      const response = await call(path, { headers, signal: attempt.signal });
      if (response.status === 204) return;
      for await (const chunk of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(end, quiet);
        pause = 250;
        for (const event of chunk) {
          if (event.id) lastId = event.id;
          if (take(event)) return;
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) throw error;
    } finally {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      attempt.abort(); // of a stream that we have left
    }
    onLost();
    await new Promise((go) => setTimeout(go, pause));
    pause = Math.min(pause * 2, 2000);
  }
}

/** The events of a body, chunk by chunk; a chunk that holds none (a comment) is an empty list, and a sign of life. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    yield blocks.map(parse).filter((event) => event.data !== "");
  }
}

function parse(block) {
  const event = { id: "", name: "message", data: "" };
  for (const line of block.split("\n")) {
    const [, field, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (field === "id") event.id = value;
    else if (field === "event") event.name = value;
    else if (field === "data") event.data += value;
  }
  return event;
}
