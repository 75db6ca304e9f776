// Deaths, take-overs, recoveries. The api remembers what it saw since it began; what this page saw before that is kept here.

import { $, clock, count, make } from "./words.js";

const KEPT = 100;
const short = (moment) => moment.engine_id.slice(0, 15) || "The engine";
const away = (moment) => (moment.seconds === null ? "" : `, after ${moment.seconds.toFixed(1)} s`);

const KINDS = {
  api_started: ["", () => "The API started"],
  store_away: ["bad", () => "Redis is away: everything waits"],
  store_back: ["good", (moment) => `Redis is back${away(moment)}`],
  engine_started: ["good", (moment) => `${short(moment)} ${moment.seconds === null ? "started" : `began a new life${away(moment)}`}`],
  engine_killed: ["bad", () => "The engine was killed from this dashboard"],
  engine_silent: ["bad", (moment) => `${short(moment)} fell silent`],
  engine_back: ["good", (moment) => `${short(moment)} is heard again${away(moment)}`],
  engine_taken_over: ["bad", (moment) => `${short(moment)} is dead, ${moment.jobs === null ? "its jobs" : count(moment.jobs, "job")} taken over`],
  jobs_recovered: ["good", (moment) => `${short(moment)} recovered ${count(moment.jobs, "job")}: ` +
    `${count(moment.pages_restored, "page")} restored, ${count(moment.tokens_replayed, "token")} replayed`],
};

const moments = new Map(); // what it is -> moment
let drawn = "";

export function showTimeline(told) {
  for (const moment of told) moments.set(`${moment.at} ${moment.kind} ${moment.engine_id}`, moment);
  const newest = [...moments.entries()].sort(([, a], [, b]) => b.at - a.at);
  for (const [key] of newest.splice(KEPT)) moments.delete(key);
  const now = JSON.stringify(newest);
  if (now === drawn) return;
  drawn = now;
  $("timeline").replaceChildren(...newest.map(([, moment]) => item(moment)));
}

export function deaths() {
  return [...moments.values()].filter(({ kind }) => kind === "engine_silent" || kind === "engine_killed").map(({ at }) => at);
}

function item(moment) {
  const [tone, words] = KINDS[moment.kind] ?? ["", () => moment.kind];
  return make("li", { "data-kind": moment.kind, "data-tone": tone }, make("time", {}, clock(moment.at)), make("span", {}, words(moment)));
}
