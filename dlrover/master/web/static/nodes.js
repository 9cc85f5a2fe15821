// The nodes: a grid on a canvas, which takes thousands; one of them in words; and pages of a table.

import { byId, bytes, colour, make, none, number } from "./dom.js";

const HEALTH = ["well", "idle", "unwell", "lost"];
const PHASES = ["forward", "backward", "optimizer", "data", "collective", "checkpoint", "start", "compile", "evaluation", "end"];
const ROWS = 50;

export class Nodes {
  constructor(store, { onAction, onLog }) {
    this.store = store;
    this.onAction = onAction;
    this.onLog = onLog;
    this.nodes = [];
    this.cursor = 0;
    this.chosen = null;
    this.page = 0;
    this.canvas = byId("grid");
    this.by = byId("colour-by");
    this.find = byId("find");
    this.by.addEventListener("change", () => this.show());
    this.find.addEventListener("input", () => {
      this.page = 0;
      this.cursor = 0;
      this.show();
    });
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.paint());
    this.canvas.addEventListener("blur", () => this.paint());
    byId("prev").addEventListener("click", () => this.turn(-1));
    byId("next").addEventListener("click", () => this.turn(1));
    byId("table-box").addEventListener("toggle", () => this.table());
    new ResizeObserver(() => this.paint()).observe(this.canvas.parentElement);
  }

  show() {
    const wanted = this.find.value.trim().toLowerCase();
    const all = this.store.all("nodes").sort((a, b) => a.rank - b.rank);
    this.nodes = wanted ? all.filter((node) => matches(node, wanted)) : all;
    this.cursor = Math.min(this.cursor, Math.max(0, this.nodes.length - 1));
    this.paint();
    this.legend(all);
    this.table();
    this.detail();
  }

  shape() {
    const width = Math.max(200, this.canvas.parentElement.clientWidth);
    const count = Math.max(1, this.nodes.length);
    const size = Math.max(6, Math.min(44, Math.floor(Math.sqrt((width * 260) / count))));
    const columns = Math.max(1, Math.floor(width / size));
    return { width, size, columns, height: Math.max(size, Math.ceil(count / columns) * size) };
  }

  paint() {
    const { width, size, columns, height } = this.shape();
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const palette = new Map();
    const paint = (name) => {
      if (!palette.has(name)) palette.set(name, colour(name));
      return palette.get(name);
    };
    const gap = size > 12 ? 3 : 1;
    this.nodes.forEach((node, index) => {
      const [x, y] = [(index % columns) * size, Math.floor(index / columns) * size];
      const [name, share] = this.tint(node);
      pen.globalAlpha = share;
      pen.fillStyle = paint(name);
      pen.fillRect(x, y, size - gap, size - gap);
      pen.globalAlpha = 1;
      this.mark(pen, node, x, y, size - gap, paint);
      if (node.node === this.chosen || (index === this.cursor && document.activeElement === this.canvas)) {
        pen.strokeStyle = paint(node.node === this.chosen ? "ink" : "accent");
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, size - gap - 2, size - gap - 2);
      }
    });
    this.canvas.dataset.count = this.nodes.length;
    this.canvas.setAttribute("aria-label", `${this.nodes.length} nodes. ${this.words(this.nodes[this.cursor])}`);
  }

  // Colour is not the only sign: the lost have a cross, the unwell an exclamation mark.
  mark(pen, node, x, y, size, paint) {
    const health = node.health ?? "well";
    if (size >= 20) {
      pen.fillStyle = "#fff";
      pen.font = `600 ${Math.min(13, size / 2.4)}px system-ui, sans-serif`;
      pen.textAlign = "center";
      pen.fillText(health === "unwell" ? `${node.rank}!` : String(node.rank), x + size / 2, y + size / 2 + 4);
    }
    if (health === "lost" || (health === "unwell" && size < 20)) {
      pen.strokeStyle = paint("panel");
      pen.lineWidth = Math.max(1, size / 10);
      pen.beginPath();
      pen.moveTo(x + 2, y + size - 2);
      pen.lineTo(x + size - 2, y + 2);
      if (health === "lost") {
        pen.moveTo(x + 2, y + 2);
        pen.lineTo(x + size - 2, y + size - 2);
      }
      pen.stroke();
    }
  }

  tint(node) {
    const health = node.health ?? "well";
    if (health === "lost") return ["lost", 1];
    if (this.by.value === "phase") return node.phase ? [phaseColour(node.phase), 1] : ["idle", 0.5];
    if (this.by.value === "cpu") return node.cores ? ["c2", 0.15 + 0.85 * Math.min(1, (node.cpu ?? 0) / node.cores)] : ["idle", 0.5];
    if (this.by.value === "memory") {
      return node.memory_limit_bytes ? ["c4", 0.15 + 0.85 * Math.min(1, (node.memory_bytes ?? 0) / node.memory_limit_bytes)] : ["idle", 0.5];
    }
    return [health, 1];
  }

  legend(all) {
    const isPhase = this.by.value === "phase";
    const counts = new Map();
    for (const node of all) {
      const name = isPhase ? node.phase || "unknown" : node.health ?? "well";
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const names = isPhase ? [...counts.keys()].sort() : HEALTH;
    byId("legend").replaceChildren(
      ...names.map((name) => {
        const swatch = make("i");
        swatch.style.background = colour(isPhase ? (name === "unknown" ? "idle" : phaseColour(name)) : name);
        return make("li", {}, swatch, `${name} ${counts.get(name) ?? 0}`);
      }),
    );
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const { size, columns } = this.shape();
    return Math.floor((event.clientY - box.top) / size) * columns + Math.floor((event.clientX - box.left) / size);
  }

  key(event) {
    const { columns } = this.shape();
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" || event.key === " ") {
      this.choose(this.cursor);
    } else if (event.key in moves) {
      this.cursor = Math.max(0, Math.min(this.nodes.length - 1, this.cursor + moves[event.key]));
      this.paint();
    } else {
      return;
    }
    event.preventDefault();
  }

  choose(index) {
    if (!this.nodes[index]) return;
    this.cursor = index;
    this.chosen = this.nodes[index].node;
    this.paint();
    this.detail();
  }

  words(node) {
    if (!node) return "";
    const why = node.why ? `, ${node.why}` : "";
    return `${node.label} on ${node.host ?? "?"}: ${node.health ?? "well"}${why}, ${node.phase || node.wish || node.status}`;
  }

  detail() {
    const box = byId("node");
    const node = this.store.all("nodes").find((each) => each.node === this.chosen);
    const key = node ? JSON.stringify([node, this.store.one("job")?.has_platform]) : "none";
    if (this.detailKey === key) return;
    this.detailKey = key;
    if (!node) {
      this.chosen = null;
      box.replaceChildren(none("Choose a node in the grid."));
      return;
    }
    const rows = [
      ["status", `${node.status}, ${node.wish}`], ["host", node.host], ["step", number(node.step)], ["incarnation", node.incarnation],
      ["platform", node.platform ? `${node.platform}, relaunched ${node.relaunches ?? 0} times` : ""],
    ].filter(([, value]) => value !== "" && value !== undefined);
    const table = make("table", {}, ...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row", text: name }), make("td", { class: "text", text: value }))));
    const workers = (node.workers ?? []).map((worker) =>
      make("li", {}, make("button", { type: "button", text: `log of rank ${worker.rank}`, onclick: () => this.onLog(worker.rank) }),
        ` ${worker.phase}${worker.step === undefined ? "" : `, step ${number(worker.step)}`}${worker.is_stalled ? ", stalled" : ""}`));
    box.replaceChildren(
      make("h3", {}, `${node.label} `, make("span", { class: `badge ${node.health ?? "well"}`, text: node.health ?? "well" })),
      ...(node.why ? [make("p", { text: node.why })] : []),
      table,
      ...(node.has_resources ? [usage(node)] : [none("no resources reported yet")]),
      make("ul", { class: "events" }, ...workers),
      make("div", { class: "buttons" },
        make("button", { type: "button", class: "act", text: "Relaunch node", onclick: () => this.onAction("relaunch-node", node) }),
        make("button", { type: "button", class: "act danger", text: "Cordon node", onclick: () => this.onAction("cordon-node", node) })),
    );
  }

  turn(by) {
    this.page = Math.max(0, Math.min(Math.ceil(this.nodes.length / ROWS) - 1, this.page + by));
    this.table();
  }

  table() {
    if (!byId("table-box").open) return;
    const first = this.page * ROWS;
    const head = ["node", "host", "health", "status", "phase", "step", "CPU", "memory", ""];
    const rows = this.nodes.slice(first, first + ROWS).map((node) => {
      const cells = [
        node.label, node.host, node.health ?? "well", node.status, node.phase ?? "", number(node.step),
        node.has_resources ? `${number(node.cpu ?? 0, 3)} / ${number(node.cores ?? 0, 3)}` : "–",
        node.has_resources ? bytes(node.memory_bytes ?? 0) : "–",
      ];
      const show = make("button", { type: "button", text: "Show", "aria-label": `Show ${node.label}`, onclick: () => this.choose(this.nodes.indexOf(node)) });
      return make("tr", {}, ...cells.map((text) => make("td", { text })), make("td", {}, show));
    });
    byId("table").replaceChildren(make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))), make("tbody", {}, ...rows));
    byId("page").textContent = `${first + 1} to ${Math.min(first + ROWS, this.nodes.length)} of ${this.nodes.length}`;
    byId("prev").disabled = this.page === 0;
    byId("next").disabled = first + ROWS >= this.nodes.length;
  }
}

function matches(node, wanted) {
  return [node.label, node.host ?? "", node.status ?? "", node.health ?? "well", node.phase ?? ""].some((text) => text.toLowerCase().includes(wanted));
}

const phaseColour = (phase) => `c${(Math.max(0, PHASES.indexOf(phase)) % 8) + 1}`;

export function usage(node) {
  const rows = make("div", { class: "rows" });
  const add = (name, used, whole, text) => {
    const fill = make("i");
    fill.style.width = `${whole ? Math.min(100, (100 * used) / whole) : 0}%`;
    rows.append(make("span", { text: name }), make("div", { class: "meter" }, fill), make("span", { text }));
  };
  add("CPU", node.cpu ?? 0, node.cores, `${number(node.cpu ?? 0, 3)} of ${number(node.cores ?? 0, 3)} cores`);
  add("memory", node.memory_bytes ?? 0, node.memory_limit_bytes, `${bytes(node.memory_bytes ?? 0)} of ${bytes(node.memory_limit_bytes)}`);
  (node.gpus ?? []).forEach(([busy, used, whole], index) => {
    add(`GPU ${index}`, busy, 100, `${number(busy)} %, ${bytes(used)} of ${bytes(whole)}`);
  });
  const more = [["shared memory", bytes(node.shm_bytes ?? 0)], ["disk free", bytes(node.disk_free_bytes)], ["network", `${bytes(node.network_bytes_per_second ?? 0)}/s`]];
  return make("div", {}, rows, make("p", { class: "hint", text: more.map(([name, text]) => `${name} ${text}`).join(" · ") }));
}
