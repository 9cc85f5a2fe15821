// The panels with words and numbers. Each shows "no data yet" until its source has told something.

import { byId, bytes, clock, colour, counted, fill, make, none, number, percent, seconds, when } from "./dom.js";
import { laneOf, linePlot, nodesPlot, timeline } from "./plots.js";

export function summary(store) {
  const job = store.one("job");
  if (!job) return;
  const health = store.one("health") ?? {};
  const goodput = store.one("goodput");
  const saved = store.one("checkpoints");
  const committed = newest(saved);
  const data = store.all("data").find((each) => each.share !== undefined && each.share !== null);
  const unwell = (health.unwell ?? 0) + (health.lost ?? 0);
  const tiles = [
    ["Step", number(job.step), data ? `${percent(data.share)} of the data` : ""],
    ["Speed", job.steps_per_second === null ? "–" : `${number(job.steps_per_second, 3)} /s`, "steps per second"],
    ["Goodput", goodput ? `${atMost(goodput)}${percent(goodput.share)}` : "–", goodput ? (goodput.since_start === null ? "no step yet" : `${atMost(goodput)}${percent(goodput.since_start)} since the first step`) : "no data yet"],
    ["Nodes", `${job.num_nodes - unwell} / ${job.num_nodes}`, unwell ? `${unwell} unwell or lost` : `well; wanted ${job.min_nodes} to ${job.max_nodes}`],
    ["Round", number(job.round), `${counted(job.num_restarts, "restart")}, ${counted(job.world_size, "worker")}`],
    ["Checkpoint", committed ? number(committed.step) : number(saved?.memory_step), committed ? "in storage" : saved?.memory_step !== null && saved ? "in memory" : "none yet"],
  ];
  byId("tiles").replaceChildren(
    ...tiles.map(([name, value, note]) =>
      make("div", { class: "tile" }, make("dl", {}, make("dt", { text: name }), make("dd", {}, value, make("small", { text: note }))))),
  );
  byId("name").textContent = job.name;
  const shown = job.blocked ? `blocked (${job.stage})` : job.stage;
  document.title = `${job.name}: ${shown}`;
  const stage = byId("stage");
  stage.textContent = job.end ? `${job.stage} (${job.end.reason})` : shown;
  stage.className = `badge ${(job.end && job.end.exit_code) || job.blocked ? "error" : job.stage}`;
  const said = [job.end ? job.end.message : job.blocked || job.verdict, job.shortage].filter(Boolean).join(" ");
  if (byId("verdict").textContent !== said) byId("verdict").textContent = said;
  byId("footer").textContent = `Master epoch ${job.master_epoch}`;
}

const newest = (saved) => (saved?.committed ?? []).reduce((best, each) => (!best || each.step > best.step ? each : best), null);

export function plots(store) {
  const changes = (store.one("scaling")?.decisions ?? []).filter((each) => each.is_change);
  linePlot(byId("speed"), store.series["steps per second"] ?? [], { label: "Throughput", unit: " /s", marks: changes.map((each) => [each.at / 1e6, each.sentence]) });
  const names = Object.keys(store.series).filter((name) => name.startsWith("metric ")).map((name) => name.slice(7));
  const select = byId("metric");
  const known = [...select.options].map((option) => option.value);
  if (JSON.stringify(known) !== JSON.stringify(names)) {
    const chosen = select.value || (names.includes("loss") ? "loss" : names[0]);
    select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
    if (chosen) select.value = chosen;
  }
  linePlot(byId("loss"), store.series[`metric ${select.value}`] ?? [], { label: select.value || "Loss" });
}

export function scaling(store) {
  const found = store.one("scaling");
  const key = JSON.stringify(found ?? null);
  fill(byId("scaling-why"), key, () => (found ? `${found.mode}: ${found.sentence}` : "no platform gives this job its nodes"));
  fill(byId("scaling-decisions"), key, () =>
    (found?.decisions ?? []).slice().reverse().map((each) =>
      make("li", {}, when(each.at), make("span", { class: `badge ${each.is_change ? "warn" : "info"}`, text: each.outcome }), ` ${each.sentence}`)));
  nodesPlot(byId("scaling-curve"), found?.points ?? [], { unit: found?.unit ?? "", target: found?.target ?? 0, changes: found?.decisions ?? [] });
}

// Only where the job is a role of a multi-role job.
export function roles(store) {
  const found = store.one("roles");
  byId("roles").hidden = !found;
  if (!found) return;
  const key = JSON.stringify(found);
  fill(byId("roles-why"), key, () => [
    `Job ${found.job}: ${found.stage}, restarted ${counted(found.num_job_restarts, "time")} as a whole. ${found.verdict}`,
    ...(found.is_stale ? [make("span", { class: "badge warn", text: "The conductor does not answer. This is its last report." })] : []),
  ]);
  fill(byId("roles-table"), key, () => {
    const rows = found.roles.map((role) => {
      const isOwn = role.name === found.own_role;
      const failure = role.failed_at ? [when(role.failed_at), ` ${role.failure}`] : ["none"];
      return make("tr", { "aria-current": isOwn && "page" },
        make("th", { scope: "row", text: isOwn ? `${role.name} (this page)` : role.name }),
        make("td", { text: role.kind }),
        make("td", {}, make("span", { class: `badge ${role.num_ready === role.num_wanted ? "well" : "unwell"}`, text: `${number(role.num_ready)} of ${number(role.num_wanted)}` })),
        make("td", { text: role.states }),
        make("td", { text: number(role.num_restarts) }),
        make("td", { class: "text" }, ...failure));
    });
    const header = ["role", "kind", "ready", "instances", "restarts", "last failure"].map((text) => make("th", { scope: "col", text }));
    return make("table", {}, make("thead", {}, make("tr", {}, ...header)), make("tbody", {}, ...rows));
  });
}

export function events(store) {
  const found = store.all("timeline").sort((a, b) => a.number - b.number).slice(-400);
  if (found.length) store.dropOlder("timeline", found[0].number);
  timeline(byId("timeline"), found, store.one("clock")?.now ?? 0);
  fill(byId("events"), found.length ? found[found.length - 1].number : 0, () =>
    found.slice(-100).reverse().map((event) =>
      make("li", {}, when(event.at), make("span", { class: `badge ${event.level}`, text: event.name }), ` ${event.text}`)));
}

// Time passes on the timeline without any event, too.
let drawnAt = 0;
export function tick(store) {
  const now = store.one("clock")?.now ?? 0;
  if (now - drawnAt < 5e6) return;
  drawnAt = now;
  events(store);
}

// Where redo is unknown, repeated steps count as new ones.
const atMost = (found) => (found.is_redo_known === false ? "at most " : "");

export function goodput(store) {
  const found = store.one("goodput");
  fill(byId("goodput"), JSON.stringify(found), () => {
    if (!found) return none();
    const classes = Object.entries(found.seconds).filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
    const total = classes.reduce((sum, [, time]) => sum + time, 0) || 1;
    const bar = make("div", { class: "stack", role: "img", "aria-label": classes.map(([name, time]) => `${name} ${percent(time / total)}`).join(", ") });
    const rows = make("div", { class: "rows" });
    classes.forEach(([name, time], index) => {
      const shade = colour(name === "compute" ? "c1" : `c${(index % 7) + 2}`);
      const part = make("i", { title: `${name} ${percent(time / total)}` });
      part.style.width = `${(100 * time) / total}%`;
      part.style.background = shade;
      bar.append(part);
      const swatch = make("i");
      swatch.style.width = `${(100 * time) / total}%`;
      swatch.style.background = shade;
      rows.append(make("span", { text: name }), make("div", { class: "meter" }, swatch), make("span", { text: `${seconds(time)}, ${percent(time / total)}` }));
    });
    const saved = (found.counterfactuals ?? []).map((each) => make("li", { text: each }));
    const unknown = found.is_redo_known === false
      ? [make("p", { class: "hint", text: "Redo time is unknown: after a fault the script did not report the step at which it continued. Repeated steps therefore count as new steps." })]
      : [];
    return [bar, rows, ...unknown, ...(saved.length ? [make("details", {}, make("summary", { text: "What would have saved time" }), make("ul", {}, ...saved))] : [])];
  });
}

export function resources(store) {
  const nodes = store.all("nodes").filter((node) => node.has_resources);
  const busiest = nodes.sort((a, b) => share(b) - share(a)).slice(0, 8);
  fill(byId("resources"), JSON.stringify(busiest.map((node) => [node.rank, node.cpu, node.memory_bytes, node.gpus])), () => {
    if (!nodes.length) return none();
    const sum = (name) => nodes.reduce((total, node) => total + (node[name] ?? 0), 0);
    const head = make("p", { class: "hint", text: `${nodes.length} nodes use ${number(sum("cpu"), 4)} of ${number(sum("cores"), 4)} cores and ${bytes(sum("memory_bytes"))} of memory. The busiest:` });
    const rows = busiest.map((node) => {
      const devices = node.gpus ?? [];
      const busy = devices.length ? `${number(devices.reduce((total, each) => total + each[0], 0) / devices.length, 3)} %` : "–";
      return make("tr", {}, ...[node.label, node.host, `${number(node.cpu ?? 0, 3)} / ${number(node.cores ?? 0, 3)}`, `${bytes(node.memory_bytes ?? 0)} / ${bytes(node.memory_limit_bytes)}`, busy].map((text) => make("td", { text })));
    });
    const header = ["node", "host", "CPU", "memory", "GPU"].map((text) => make("th", { scope: "col", text }));
    return [head, make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...header)), make("tbody", {}, ...rows)))];
  });
}

const share = (node) => Math.max((node.cpu ?? 0) / (node.cores || 1), (node.memory_bytes ?? 0) / (node.memory_limit_bytes || Infinity));

export function checkpoints(store) {
  const saved = store.one("checkpoints");
  fill(byId("checkpoints"), JSON.stringify(saved), () => {
    if (!saved || (saved.memory_step === null && !saved.committed.length && !saved.num_under_way && !saved.trouble)) return none();
    const rows = [
      ["memory", number(saved.memory_step), "every node", ""],
      ...saved.committed.map((each) => ["storage", number(each.step), each.directory, each.at ? clock(each.at) : ""]),
    ].map((cells) => make("tr", {}, ...cells.map((text, index) => make("td", { class: index === 2 ? "text" : null, text }))));
    const header = ["tier", "step", "where", "when"].map((text) => make("th", { scope: "col", text }));
    const trouble = saved.trouble && make("p", { class: "card", text: `Failed ${saved.trouble.count} times, the last time with step ${saved.trouble.step} on ${saved.trouble.host}: ${saved.trouble.reason}` });
    return [
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...header)), make("tbody", {}, ...rows))),
      make("p", { class: "hint", text: `${saved.num_under_way} saves to storage under way` }),
      ...(trouble ? [trouble] : []),
    ];
  });
}

export function data(store) {
  const sets = store.all("data");
  fill(byId("data"), JSON.stringify(sets), () => {
    if (!sets.length) return none("no data yet: the job uses no dynamic sharding");
    return sets.map((each) => {
      const bar = make("i");
      bar.style.width = `${Math.min(100, 100 * (each.share ?? 0))}%`;
      const words = [
        `epoch ${each.epoch + 1}`, `${number(each.consumed)}${each.total > 0 ? ` of ${number(each.total)}` : ""} records read`,
        `${number(each.committed)} safe in a checkpoint`, `${number(each.doing)} being read`,
        each.speed ? `${number(each.speed, 3)} /s` : "", each.remaining ? `${seconds(each.remaining)} left` : "",
        each.set_aside ? `${number(each.set_aside)} set aside` : "", each.is_complete ? "complete" : "",
      ].filter(Boolean);
      return make("div", { class: "card" }, make("strong", { text: each.name }), make("div", { class: "meter" }, bar), make("p", { class: "hint", text: words.join(" · ") }));
    });
  });
}

const preCheck = (check) =>
  make("details", { class: "card" },
    make("summary", {}, make("span", { class: `badge ${check.stage === "FAIL" ? "error" : check.stage === "PASS" ? "info" : "warn"}`, text: `pre-check ${check.stage}` }), ` ${check.message}`),
    make("ul", {}, ...check.results.map((each) => make("li", { text: `${each.name}: ${each.state} after ${number(each.num_tries)} tries${each.message ? `: ${each.message}` : ""}` }))));

export function diagnosis(store) {
  const found = store.all("verdicts").sort((a, b) => b.at - a.at);
  const autopsy = store.one("autopsy");
  const check = store.one("pre_check");
  fill(byId("diagnosis"), JSON.stringify([found, autopsy, check]), () => {
    if (!store.one("diagnosis")) return none();
    const before = check ? [preCheck(check)] : [];
    if (!found.length && !autopsy) return [...before, none("nothing was ever wrong")];
    const cards = found.slice(0, 20).map((each) =>
      make("details", { class: "card" },
        make("summary", {}, when(each.at), make("span", { class: "badge warn", text: each.fault }),
          ` ${each.culprits || "no culprit"} · ${percent(each.confidence)} sure · ${each.action}${each.has_acted ? " (done)" : ""}${each.count > 1 ? ` · ${each.count} times` : ""}`),
        make("p", { text: each.reasoning }),
        make("ul", {}, ...each.evidence.map((text) => make("li", { text }))),
        make("p", { class: "hint", text: `found by ${each.diagnostician} in round ${each.round}` })));
    return [...before, ...cards, ...(autopsy ? [make("details", { class: "card" }, make("summary", { text: `Autopsy of ${clock(autopsy.at)}` }), make("pre", { tabindex: 0, text: autopsy.text }))] : [])];
  });
}

export function failures(store) {
  const found = store.all("failures").sort((a, b) => b.round - a.round || a.at - b.at); // what came first is most likely the cause
  fill(byId("failures"), JSON.stringify(found.map((each) => [each.at, each.rank])), () => {
    if (!found.length) return none(store.one("job")?.num_restarts ? "none since this master started" : "none");
    return found.map((each) => {
      const how = each.signal !== undefined ? `signal ${each.signal}` : each.exit_code !== undefined ? `exit code ${each.exit_code}` : "";
      const parts = [["Traceback", each.traceback], ["Last output", each.log_tail]].filter(([, text]) => text);
      return make("details", { class: "card" },
        make("summary", {}, when(each.at), make("span", { class: "badge error", text: each.kind }), ` rank ${each.rank} on ${each.host ?? "?"}, round ${each.round}${each.step === undefined ? "" : `, step ${number(each.step)}`} ${how}: ${each.message ?? ""}`),
        ...parts.flatMap(([name, text]) => [make("p", { class: "hint", text: name }), make("pre", { tabindex: 0, text })]),
        ...(parts.length ? [] : [none("neither traceback nor output")]));
    });
  });
}

export { laneOf };
