// The page map: every page of an engine's two pools a cell, and the same in numbers.

import { $, age, clock, count, make, say } from "./words.js";

// letter -> [name, colour, how much of the cell is filled]. A ring is a page that a crash would cost.
const SOLID = 1, RING = 0.55;
const DEVICE = {
  ".": ["free", "free", SOLID], o: ["open", "open", SOLID], S: ["sealed, published", "sealed", SOLID],
  s: ["sealed, not yet checkpointed", "sealed", RING], H: ["shared, published", "shared", SOLID],
  h: ["shared, not yet checkpointed", "shared", RING], C: ["cached, published", "cached", SOLID],
  c: ["cached, not checkpointed", "cached", RING], l: ["leaving", "moving", SOLID],
};
const HOST = {
  ".": ["free", "free", SOLID], f: ["being filled", "moving", RING], d: ["filled, not yet published", "sealed", RING],
  B: ["published, backs a job", "sealed", SOLID], P: ["published, cached", "cached", SOLID],
  w: ["swapped out", "open", SOLID], x: ["going", "moving", SOLID],
};
const ALWAYS = "."; // these stand in the legend even when there is none
const HEIGHT = 150; // of a map, in CSS pixels, at most
const STALE = 5; // seconds

const shown = new Map(); // engine id -> its parts

export function showPages(overview) {
  $("no-engine").hidden = overview.engines.length > 0;
  const known = new Set(overview.engines.map((engine) => engine.id));
  for (const [id, parts] of shown) {
    if (known.has(id)) continue;
    parts.box.remove();
    shown.delete(id);
  }
  for (const engine of overview.engines) {
    const parts = shown.get(engine.id) ?? addEngine(engine.id);
    const told = engine.vitals ?? parts.last;
    parts.last = told;
    const silent = engine.silent_seconds ?? 0;
    const stale = engine.state === "dead" || silent > STALE || !engine.vitals || overview.now - engine.vitals.at > STALE;
    say(parts.state, stateOf(engine, overview.now, silent));
    const working = told ? `${told.running} running, ${told.waiting} waiting, ` : "";
    say(parts.work, `${working}${count(engine.jobs, "job")} held`);
    parts.pools.classList.toggle("stale", stale);
    showPool(parts.device, "Device pool", told?.device ?? "", DEVICE);
    showPool(parts.host, "Host pool", told?.host ?? "", HOST);
  }
}

/** Colours changed, or the width. */
export function redrawPages() {
  for (const { device, host } of shown.values()) for (const pool of [device, host]) pool.drawn = "";
}

function stateOf(engine, now, silent) {
  if (engine.state === "dead") return "dead: its jobs were taken over";
  if (silent > 3) return `silent since ${clock(now - silent)} (${age(silent)})`;
  if (!engine.vitals) return "living, nothing told yet";
  return now - engine.vitals.at > STALE ? `living; pages as of ${clock(engine.vitals.at)}` : "living";
}

function addEngine(id) {
  const state = make("span", { class: "quiet" });
  const work = make("span", { class: "quiet" });
  const [device, host] = [makePool("device"), makePool("host")];
  const pools = make("div", { class: "pools" }, device.box, host.box);
  const title = make("h3", {}, make("span", { class: "mono" }, id.slice(0, 15)), state, work);
  const box = make("div", { class: "engine", "data-engine": id }, title, pools);
  $("engines").append(box);
  const parts = { box, state, work, pools, device, host, last: null };
  shown.set(id, parts);
  return parts;
}

function makePool(name) {
  const title = make("h4");
  const canvas = make("canvas", { role: "img" });
  const legend = make("ul", { class: "legend" });
  return { box: make("div", { class: "pool", "data-pool": name }, title, canvas, legend), title, canvas, legend, drawn: "", width: 0 };
}

function showPool(pool, name, lengths, kinds) {
  const width = pool.box.clientWidth;
  if (pool.drawn === lengths && pool.width === width) return;
  pool.drawn = lengths;
  pool.width = width;
  const letters = expand(lengths);
  const counts = Object.fromEntries(Object.keys(kinds).map((letter) => [letter, 0]));
  for (const letter of letters) counts[letter] += 1;
  say(pool.title, letters.length ? `${name}, ${count(letters.length, "page")}` : `${name}: nothing told`);
  const words = Object.keys(kinds).filter((letter) => counts[letter]).map((letter) => `${counts[letter]} ${kinds[letter][0]}`);
  pool.canvas.setAttribute("aria-label", `${name}: ${words.join(", ") || "nothing told"}`);
  draw(pool.canvas, letters, kinds, width);
  pool.legend.replaceChildren(...Object.keys(kinds)
    .filter((letter) => counts[letter] || (ALWAYS.includes(letter) && letters.length))
    .map((letter) => legendItem(letter, counts[letter], kinds)));
}

/** `2.3oS` is `..oooS`. */
export function expand(lengths) {
  return lengths.replace(/(\d+)(\D)/g, (_, times, letter) => letter.repeat(Number(times)));
}

function legendItem(letter, number, kinds) {
  const swatch = make("canvas", { "aria-hidden": "true" });
  draw(swatch, letter, kinds, 11, 11);
  return make("li", { "data-letter": letter, "data-count": number }, swatch, `${number} ${kinds[letter][0]}`);
}

function draw(canvas, letters, kinds, width, largest = 17) {
  const cell = Math.max(3, Math.min(largest, Math.floor(Math.sqrt((width * HEIGHT) / Math.max(1, letters.length)))));
  const columns = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(letters.length / columns) * cell;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement);
  const colourOf = ([letter, [, colour]]) => [letter, style.getPropertyValue(`--page-${colour}`)];
  const colours = Object.fromEntries(Object.entries(kinds).map(colourOf));
  const ground = style.getPropertyValue("--card");
  const gap = cell > 6 ? 2 : cell > 3 ? 1 : 0;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  for (let page = 0; page < letters.length; page += 1) {
    const [x, y, size] = [(page % columns) * cell, Math.floor(page / columns) * cell, cell - gap];
    pen.fillStyle = colours[letters[page]];
    pen.fillRect(x, y, size, size);
    const hole = kinds[letters[page]][2] === RING ? Math.max(1, size * RING) : 0;
    pen.fillStyle = ground;
    if (hole) pen.fillRect(x + (size - hole) / 2, y + (size - hole) / 2, hole, hole);
  }
}
