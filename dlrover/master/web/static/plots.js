// Small plots in SVG: a line over time, and the timeline of the job.

import { clock, draw, none, number } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 190;
const LEFT = 52;
const BOTTOM = 22;

export function linePlot(container, points, { label, unit = "" }) {
  const known = points.filter(([, value]) => value !== null);
  if (known.length < 2) {
    container.replaceChildren(none(points.length ? "no numbers yet" : "no data yet"));
    return;
  }
  const [from, to] = [points[0][0], points[points.length - 1][0]];
  const values = known.map(([, value]) => value);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  if (low > 0 && low < high / 2) low = 0;
  const x = (at) => LEFT + ((at - from) / Math.max(to - from, 1e-9)) * (WIDTH - LEFT - 8);
  const y = (value) => 12 + (1 - (value - low) / (high - low)) * (HEIGHT - BOTTOM - 16);
  const svg = frame(`${label}: from ${number(values[0])} to ${number(values[values.length - 1])}${unit}, between ${number(low)} and ${number(high)}`);
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(
      draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end", text: number(value, 3) }),
    );
  }
  const path = known.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  svg.append(
    draw("polygon", { class: "area", points: `${x(known[0][0])},${y(low)} ${path} ${x(known[known.length - 1][0])},${y(low)}` }),
    draw("polyline", { class: "line", points: path }),
    ...points.filter(([, value]) => value === null).slice(-50).map(([at]) => draw("circle", { class: "gap", cx: x(at), cy: 12, r: 4 })),
    draw("text", { x: LEFT, y: HEIGHT - 6, text: clock(from * 1e6) }),
    draw("text", { x: WIDTH - 8, y: HEIGHT - 6, "text-anchor": "end", text: clock(to * 1e6) }),
  );
  const cursor = draw("line", { class: "cursor", y1: 8, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const readout = draw("text", { class: "readout", y: 10, "text-anchor": "end", x: WIDTH - 8, text: `${number(values[values.length - 1])}${unit}` });
  svg.append(cursor, readout);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = from + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 8) * (to - from);
    const nearest = known.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
    cursor.setAttribute("x1", x(nearest[0]));
    cursor.setAttribute("x2", x(nearest[0]));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = `${clock(nearest[0] * 1e6)}  ${number(nearest[1])}${unit}`;
  });
  svg.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  container.replaceChildren(svg);
}

function frame(label, height = HEIGHT, width = WIDTH) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

const LANES = ["rounds", "faults", "checkpoints", "other"];

export function laneOf(event) {
  if (/^round-|world/.test(event.name)) return "rounds";
  if (/checkpoint|save|snapshot/.test(event.name)) return event.level === "error" ? "faults" : "checkpoints";
  if (event.level === "error" || /fail|lost|gone|hang|silent|exit|fault|disconnect/.test(event.name)) return "faults";
  return "other";
}

// Rounds as bars, the rest as marks at their time.
export function timeline(container, events, now) {
  if (!events.length) {
    container.replaceChildren(none());
    return;
  }
  const width = Math.max(320, Math.min(1400, container.clientWidth || 1000));
  const left = 84;
  const from = events[0].at;
  const to = Math.max(now, events[events.length - 1].at, from + 1e6);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left - 12);
  const count = { rounds: 0, faults: 0, checkpoints: 0, other: 0 };
  for (const event of events) count[laneOf(event)] += 1;
  const svg = frame(`Timeline: ${count.rounds} rounds, ${count.faults} faults, ${count.checkpoints} checkpoints`, 132, width);
  LANES.forEach((lane, row) => {
    svg.append(
      draw("text", { x: 0, y: row * 27 + 18, text: lane }),
      draw("rect", { class: "lane", x: left, y: row * 27 + 4, width: width - left - 8, height: 20, rx: 4 }),
    );
  });
  const rounds = events.filter((event) => event.name === "round-started");
  rounds.forEach((event, index) => {
    const ends = rounds[index + 1]?.at ?? to;
    const bar = draw("rect", {
      class: index % 2 ? "round odd" : "round", x: x(event.at), y: 6, width: Math.max(2, x(ends) - x(event.at) - 1), height: 16, rx: 3,
    });
    bar.append(draw("title", { text: `${clock(event.at)} ${event.text}` }));
    svg.append(bar);
  });
  for (const event of events) {
    const lane = laneOf(event);
    if (event.name === "round-started") continue;
    const [cx, cy] = [x(event.at), LANES.indexOf(lane) * 27 + 14];
    const kind = lane === "faults" ? (event.level === "info" ? "warned" : "fault") : lane === "checkpoints" ? "saved" : lane === "rounds" ? "warned" : "other";
    const mark = draw("path", { class: kind, d: `M${cx} ${cy - 7}l5 7l-5 7l-5 -7z` });
    mark.append(draw("title", { text: `${clock(event.at)} ${event.text}` }));
    svg.append(mark);
  }
  svg.append(
    draw("text", { x: left, y: 127, text: clock(from) }),
    draw("text", { x: width - 8, y: 127, "text-anchor": "end", text: clock(to) }),
  );
  container.replaceChildren(svg);
}
