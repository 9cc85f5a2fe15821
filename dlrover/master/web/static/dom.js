// Elements are made here, and text always goes in as text: names and logs of a job may hold anything.

export const byId = (id) => document.getElementById(id);

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const none = (text = "no data yet") => make("p", { class: "none", text });

// Replaces only what changed: focus and open details inside the panel survive an update that changes nothing there.
const shown = new WeakMap();
export function fill(container, key, build) {
  if (shown.get(container) === key) return;
  shown.set(container, key);
  container.replaceChildren(...[build()].flat());
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Numbers and times.

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

export const counted = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  return count >= 2 ** 30 ? `${number(count / 2 ** 30, 3)} GiB` : `${number(count / 2 ** 20, 3)} MiB`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 60) return `${number(value, 3)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export const clock = (micros) => new Date(micros / 1000).toLocaleTimeString([], { hour12: false });

export const percent = (share) => (Number.isFinite(share) ? `${number(100 * share, 3)} %` : "–");

export function when(micros) {
  return make("time", { datetime: new Date(micros / 1000).toISOString(), text: clock(micros) });
}
