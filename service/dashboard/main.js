// Puts the page together: one stream for engines and pages, one look at the list of jobs every two seconds, one stream of text.

import { call, follow, forgetKey, keepKey, Refused } from "./api.js";
import { sampleRates, showCharts } from "./charts.js";
import { refreshJobs, showJobs } from "./jobs.js";
import { redrawPages, showPages } from "./pages.js";
import { deaths, showTimeline } from "./timeline.js";
import { $, age, announce, clock, say } from "./words.js";

const QUIET = 6000; // ms; there is an overview each second
const JOBS_EVERY = 2000;
const PROMPT = "Tell me a story about an old lighthouse keeper.";

let overview = null;
let heardAt = 0; // by our own clock, in ms
let running = false;

async function run() {
  if (running) return;
  running = true;
  const life = new AbortController();
  try {
    await Promise.all([watchOverview(life.signal), watchJobs(life.signal)]);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    life.abort();
    askForKey(error);
  } finally {
    running = false;
  }
}

async function watchOverview(signal) {
  const take = (event) => {
    if (overview && performance.now() - heardAt > QUIET) announce("Connected again");
    overview = JSON.parse(event.data);
    heardAt = performance.now();
    $("key").hidden = true;
    $("main").hidden = false;
    sampleRates(overview);
    show();
  };
  while (!signal.aborted) await follow("/v1/overview/events", take, { signal, quiet: QUIET });
}

async function watchJobs(signal) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await refreshJobs();
      if (overview) showJobs(serverTime(), overview.jobs);
    } catch (error) {
      if (error instanceof Refused) throw error; // anything else is an outage, which the banner tells of
    }
    await new Promise((go) => setTimeout(go, JOBS_EVERY));
  }
}

const serverTime = () => overview.now + (performance.now() - heardAt) / 1000;

function show() {
  say($("model"), overview.model);
  showPages(overview);
  showTimeline(overview.timeline);
  showCharts(overview.now, deaths());
  $("demo").hidden = !overview.demo_controls;
  $("kill").disabled = !overview.engines.some((engine) => engine.state === "living");
  showHealth();
}

/** What is old is grey, and says since when. */
function showHealth() {
  const silent = overview ? (performance.now() - heardAt) / 1000 : 0;
  const lost = silent > QUIET / 1000;
  const away = overview?.store_away_since ?? null;
  const working = overview?.engines.some((engine) => engine.state === "living" && (engine.silent_seconds ?? 0) <= 3);
  let words = "";
  if (lost) words = `No answer from the API since ${clock(overview.now)} (${age(silent)}). Trying again; jobs go on without this page.`;
  else if (away !== null) words = `Redis is away since ${clock(away)}. Nothing is lost; everything waits for it.`;
  $("banner").hidden = words === "";
  say($("banner"), words);
  $("main").classList.toggle("stale", lost || away !== null);
  const health = !overview ? ["waiting", "Connecting"] : lost ? ["bad", "API away"] : away !== null ? ["bad", "Redis away"]
    : working ? ["good", "Engine living"] : ["bad", overview.engines.length ? "No engine answers" : "No engine"];
  $("health").dataset.health = health[0];
  if ($("health").textContent !== health[1]) announce(health[1]);
  say($("health"), health[1]);
}

function askForKey(error) {
  if (error.status === 401) forgetKey();
  $("main").hidden = true;
  $("key").hidden = false;
  say($("key-problem"), $("key-input").value ? error.message : "");
  $("key-input").value = "";
  $("key-input").focus();
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key-input").value);
  run();
});

async function press(button, path, how, done) {
  button.disabled = true;
  say($("demo-problem"), "");
  try {
    await call(path, { method: "POST", ...how });
    announce(done);
  } catch (error) {
    say($("demo-problem"), error.message);
  }
  button.disabled = false;
}

$("kill").addEventListener("click", () => {
  press($("kill"), "/v1/demo/kill-engine", { headers: { "X-Midsentence-Demo": "kill-engine" } }, "The engine was killed");
});
$("start").addEventListener("click", () => {
  const body = JSON.stringify({ messages: [{ role: "user", content: PROMPT }], max_tokens: 256, ignore_eos: true });
  press($("start"), "/v1/jobs", { body, headers: { "Content-Type": "application/json" } }, "A job was started");
});

for (const query of ["(prefers-color-scheme: dark)", "(min-resolution: 1.5dppx)"]) {
  matchMedia(query).addEventListener("change", () => {
    redrawPages();
    if (overview) showPages(overview);
  });
}
setInterval(() => {
  if (!overview) return;
  showHealth();
  showJobs(serverTime(), overview.jobs);
}, 1000);
run();
