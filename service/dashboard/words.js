// How numbers and times are said, and how elements are made. Text goes in by textContent alone: what a model wrote is not markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Writes only what changed, so that a screen reader, a selection and the layout are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function age(seconds) {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 360000 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** For those who do not see the page: changes of state only, never the text as it grows. */
export function announce(text) {
  $("spoken").textContent = text;
}
