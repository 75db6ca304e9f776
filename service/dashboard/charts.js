// Throughput, time between tokens, checkpoint lag: from the differences of what engines count, so a lost second falsifies nothing.

import { $, make, say } from "./words.js";

const WINDOW = 120; // seconds
const STALE = 2.5; // seconds; an engine tells once a second
const WIDTH = 240, HEIGHT = 58;
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  { name: "Throughput", unit: "tokens/s", digits: 1, of: (sample) => sample.rate },
  { name: "Between two tokens of a job", unit: "ms", digits: 0, of: (sample) => sample.gap },
  { name: "Checkpoint lag", unit: "tokens", digits: 0, of: (sample) => sample.lag },
];

const samples = []; // {at, rate, gap, lag}; null where nobody told anything
const before = new Map(); // engine id -> {incarnation, clock, totals, rate, gap}

/** Takes in what one overview says. */
export function sampleRates({ now, engines }) {
  let rate = 0, lag = 0, gaps = 0, gapSeconds = 0, told = 0;
  for (const engine of engines) {
    const { vitals } = engine;
    if (!vitals || engine.state === "dead" || now - vitals.at > STALE) continue;
    const rates = ratesOf(engine);
    told += 1;
    rate += rates.rate;
    gaps += rates.gaps;
    gapSeconds += rates.gapSeconds;
    lag += vitals.checkpoint_lag;
  }
  samples.push({ at: now, rate: told ? rate : null, lag: told ? lag : null, gap: gaps ? (1000 * gapSeconds) / gaps : null });
  while (samples[0].at < now - WINDOW) samples.shift();
}

function ratesOf({ id, incarnation, vitals }) {
  const last = before.get(id);
  if (last?.incarnation === incarnation && last.clock === vitals.clock) return last.rates;
  const rates = { rate: 0, gaps: 0, gapSeconds: 0 };
  if (last?.incarnation === incarnation) {
    rates.rate = (vitals.totals.tokens - last.totals.tokens) / (vitals.clock - last.clock);
    rates.gaps = vitals.totals.gaps - last.totals.gaps;
    rates.gapSeconds = vitals.totals.gap_seconds - last.totals.gap_seconds;
  }
  before.set(id, { incarnation, clock: vitals.clock, totals: vitals.totals, rates });
  return rates;
}

/** `deaths`: when engines fell silent, drawn as lines. */
export function showCharts(now, deaths) {
  if (!$("charts").childElementCount) CHARTS.forEach(addChart);
  for (const chart of CHARTS) {
    const values = samples.map(chart.of);
    const numbers = values.filter((value) => value !== null);
    const top = Math.max(1, ...numbers);
    const latest = values.at(-1) ?? null;
    say(chart.value, latest === null ? "no data" : latest.toFixed(chart.digits));
    say(chart.unitBox, latest === null ? "" : ` ${chart.unit}`);
    say(chart.top, numbers.length ? `up to ${top.toFixed(chart.digits)} ${chart.unit}` : "");
    chart.svg.setAttribute("aria-label", `${chart.name}: ${chart.number.textContent}`);
    chart.line.setAttribute("d", pathOf(values, now, top));
    chart.svg.replaceChildren(chart.line, ...deaths.filter((at) => at > now - WINDOW).map((at) => death(xOf(at, now))));
  }
}

function addChart(chart) {
  chart.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  chart.line = draw("path", {});
  chart.number = make("span", { class: "value" });
  chart.value = make("span");
  chart.unitBox = make("small");
  chart.number.append(chart.value, chart.unitBox);
  chart.top = make("span", { class: "top" });
  $("charts").append(make("div", { class: "chart" }, make("span", { class: "name" }, chart.name), chart.number, chart.svg, chart.top));
}

const xOf = (at, now) => (WIDTH * (at - (now - WINDOW))) / WINDOW;

function pathOf(values, now, top) {
  let pen = "M";
  return samples.map(({ at }, index) => {
    if (values[index] === null) {
      pen = "M";
      return "";
    }
    const point = `${pen}${xOf(at, now).toFixed(1)} ${(HEIGHT - 3 - ((HEIGHT - 8) * values[index]) / top).toFixed(1)}`;
    pen = "L";
    return point;
  }).join("");
}

const death = (x) => draw("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "death" });

function draw(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
