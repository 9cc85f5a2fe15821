// Small plots in SVG: a line over time, and the timeline of the job.

import { clock, draw, none, number } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 190;
const LEFT = 52;
const BOTTOM = 22;

export function linePlot(container, points, { label, unit = "", marks = [] }) {
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
  for (const [at, text] of marks.filter(([at]) => at >= from && at <= to)) {
    const mark = draw("line", { class: "change", x1: x(at), x2: x(at), y1: 8, y2: HEIGHT - BOTTOM });
    mark.append(draw("title", { text: `${clock(at * 1e6)} ${text}` }));
    svg.append(mark);
  }
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

// Speed over nodes: what was measured as dots, the fitted curve as a line, the wanted number and each change as marks.
export function nodesPlot(container, points, { unit, target, changes }) {
  if (!points.length) {
    container.replaceChildren(none("nothing was measured yet"));
    return;
  }
  const most = Math.max(target, ...points.map((point) => point.nodes));
  const high = 1.1 * Math.max(...points.map((point) => point.speed));
  const x = (nodes) => LEFT + (nodes / most) * (WIDTH - LEFT - 16);
  const y = (speed) => 12 + (1 - speed / high) * (HEIGHT - BOTTOM - 16);
  const measured = points.filter((point) => !point.is_predicted);
  const svg = frame(`Speed over nodes: ${measured.map((point) => `${point.nodes} nodes ${number(point.speed, 3)} ${unit}`).join(", ")}`);
  for (const speed of [0, high / 2, high]) {
    svg.append(
      draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: y(speed), y2: y(speed) }),
      draw("text", { x: LEFT - 6, y: y(speed) + 4, "text-anchor": "end", text: number(speed, 3) }),
    );
  }
  const step = Math.max(1, Math.floor(most / 8));
  for (let nodes = step; nodes <= most; nodes += step) svg.append(draw("text", { x: x(nodes), y: HEIGHT - 6, "text-anchor": "middle", text: String(nodes) }));
  const curve = points.filter((point) => point.is_predicted).sort((a, b) => a.nodes - b.nodes);
  if (curve.length > 1) svg.append(draw("polyline", { class: "line fitted", points: curve.map((point) => `${x(point.nodes).toFixed(1)},${y(point.speed).toFixed(1)}`).join(" ") }));
  for (const point of measured) {
    const dot = draw("circle", { class: "measured", cx: x(point.nodes), cy: y(point.speed), r: 4 });
    dot.append(draw("title", { text: `${point.nodes} nodes: ${number(point.speed, 4)} ${unit}` }));
    svg.append(dot);
  }
  for (const each of changes.filter((change) => change.is_change && change.nodes_after)) {
    const mark = draw("path", { class: "warned", d: `M${x(each.nodes_after)} ${HEIGHT - BOTTOM - 12}l5 7l-5 7l-5 -7z` });
    mark.append(draw("title", { text: `${clock(each.at)} ${each.sentence}` }));
    svg.append(mark);
  }
  if (target) svg.append(draw("line", { class: "change", x1: x(target), x2: x(target), y1: 8, y2: HEIGHT - BOTTOM }));
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
