// The list of jobs, and the text of the chosen one as it grows.

import { call, follow, Refused } from "./api.js";
import { $, age, announce, count, make, say } from "./words.js";

const NEWEST = 20;
const QUIET = 45000; // ms; the server sends a comment every 15 s
const ENDED = new Set(["done", "failed", "cancelled"]);

const rows = new Map(); // job id -> its row's cells
let jobs = [];
let chosen = ""; // job id
let picked = false; // by the visitor: then it stays chosen whatever begins
let stream = new AbortController();

export async function refreshJobs() {
  jobs = (await (await call(`/v1/jobs?limit=${NEWEST}`)).json()).data;
  if (!picked) {
    const candidate = jobs.find((job) => job.status === "in_progress") ?? (chosen ? undefined : jobs[0]);
    const current = jobs.find((job) => job.id === chosen);
    if (candidate && current?.status !== "in_progress" && candidate.id !== chosen) choose(candidate.id);
  }
}

/** `now`: seconds since the epoch, by the server's clock. */
export function showJobs(now, counts) {
  $("no-jobs").hidden = jobs.length > 0;
  const parts = Object.entries(counts).filter(([, number]) => number);
  say($("job-counts"), parts.map(([status, number]) => `${number} ${status.replace("_", " ")}`).join(" · "));
  const known = new Set(jobs.map((job) => job.id));
  for (const [id, row] of rows) {
    if (known.has(id)) continue;
    row.line.remove();
    rows.delete(id);
  }
  jobs.forEach((job, index) => {
    const row = rows.get(job.id) ?? addRow(job.id);
    const place = $("job-rows").children[index];
    if (place !== row.line) $("job-rows").insertBefore(row.line, place ?? null);
    row.button.setAttribute("aria-pressed", String(job.id === chosen));
    row.status.dataset.status = job.status;
    say(row.status, job.status.replace("_", " "));
    say(row.tokens, job.usage.completion_tokens.toLocaleString("en"));
    say(row.age, age(now - job.created_at));
    say(row.recoveries, String(job.recovery.count));
  });
}

function addRow(id) {
  const button = make("button", { type: "button", title: id, "data-job": id }, id.replace("job_", "").slice(0, 8));
  button.addEventListener("click", () => {
    picked = true;
    choose(id);
  });
  const row = { button, status: make("td") };
  for (const name of ["tokens", "age", "recoveries"]) row[name] = make("td", { class: "number" });
  row.line = make("tr", {}, make("td", {}, button), row.status, row.tokens, row.age, row.recoveries);
  rows.set(id, row);
  return row;
}

function choose(id) {
  stream.abort();
  stream = new AbortController();
  chosen = id;
  for (const [other, row] of rows) row.button.setAttribute("aria-pressed", String(other === id));
  say($("live-job"), id.slice(0, 20));
  $("text").replaceChildren();
  say($("live-state"), "Reading");
  read(id, stream.signal);
}

async function read(id, signal) {
  let seen = 0;
  const take = (event) => {
    if (signal.aborted) return true;
    const data = JSON.parse(event.data);
    if (event.name === "token") {
      write(data.text);
      seen += 1;
      say($("live-state"), `in progress, ${count(seen, "token")}`);
    } else if (event.name === "recovered") {
      mark(`recovered: ${count(data.pages_restored, "page")} restored, ${count(data.tokens_replayed, "token")} replayed`);
    } else if (ENDED.has(event.name)) {
      const why = data.error ? `: ${data.error.message}` : data.finish_reason ? ` (${data.finish_reason})` : "";
      say($("live-state"), `${data.status.replace("_", " ")}${why}, ${count(seen, "token")}`);
      announce(`The job has ended: ${data.status}`);
    } else {
      say($("live-state"), event.name.replace("_", " "));
    }
    return ENDED.has(event.name);
  };
  const onLost = () => say($("live-state"), `The stream broke after ${count(seen, "token")}; going on from there.`);
  try {
    await follow(`/v1/jobs/${encodeURIComponent(id)}/events`, take, { signal, quiet: QUIET, onLost });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (!signal.aborted) say($("live-state"), error.message);
  }
}

function write(text) {
  const box = $("text");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  if (box.lastChild?.nodeType === Node.TEXT_NODE) box.lastChild.appendData(text);
  else box.append(text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** Where the text went on after a crash. Drawn by the style sheet: it is no part of the text. */
function mark(note) {
  $("text").append(make("span", { class: "mark", role: "img", "aria-label": note, "data-note": note }));
  announce(`The job has ${note}`);
}
