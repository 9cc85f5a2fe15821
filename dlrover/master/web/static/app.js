// The page: follows the job, repaints what changed once per frame, and asks before it acts.

import { byId, make } from "./dom.js";
import { Nodes } from "./nodes.js";
import * as panels from "./panels.js";
import { Store, follow } from "./store.js";

const store = new Store();
const nodes = new Nodes(store, { onAction: (name, node) => confirmAction(name, node), onLog: (rank) => showLog(`worker-${rank}`) });
let pending = null;

const MEASURES_KEPT = 50; // a page may stay open for weeks

const PANELS = {
  job: [panels.summary], health: [panels.summary], nodes: [() => nodes.show(), panels.resources], timeline: [panels.events], clock: [panels.tick],
  goodput: [panels.goodput, panels.summary], checkpoints: [panels.checkpoints, panels.summary], data: [panels.data, panels.summary],
  verdicts: [panels.diagnosis], pre_check: [panels.diagnosis], diagnosis: [panels.diagnosis], autopsy: [panels.diagnosis], failures: [panels.failures], series: [panels.plots],
  scaling: [panels.scaling, panels.plots], roles: [panels.roles],
};

function paint() {
  const changed = pending;
  pending = null;
  const wanted = new Set();
  for (const name of changed) for (const panel of PANELS[name] ?? []) wanted.add(panel);
  if (changed.has("whole")) for (const all of Object.values(PANELS)) for (const panel of all) wanted.add(panel);
  for (const panel of wanted) panel(store);
  performance.measure(changed.has("whole") ? "render" : "update", { start: receivedAt });
  if (performance.getEntriesByName("update").length > MEASURES_KEPT) performance.clearMeasures("update");
  if (changed.has("whole")) {
    document.body.dataset.ready = "yes";
    logNames();
  }
}

let receivedAt = 0;
function onChange(changed) {
  if (pending) {
    for (const name of changed) pending.add(name);
    return;
  }
  pending = new Set(changed);
  receivedAt = performance.now();
  requestAnimationFrame(paint);
}

const STATES = {
  live: "live",
  again: "connection lost, trying again",
  broken: "the master cannot be reached, trying again",
  over: "the job is over; this was its last state",
};

function onState(state) {
  const line = byId("link");
  line.className = `link ${state === "again" ? "broken" : state}`;
  if (byId("link-text").textContent !== STATES[state]) byId("link-text").textContent = STATES[state];
  if (state === "broken") {
    fetch("/api/v1/logs").then((answer) => answer.status === 401 && location.reload(), () => undefined);
  }
}

// Actions.

const QUESTIONS = {
  save: () => ["Save now?", "The trainers write their next save to storage."],
  "restart-workers": () => ["Restart all workers?", "They stop, then start again in the next round from the newest snapshot."],
  stop: () => ["Stop the job?", "All workers on all nodes end. This cannot be undone."],
  "relaunch-node": (node) => [`Relaunch ${node.label}?`, `A new node takes the place of the one on ${node.host}.`],
  "cordon-node": (node) => [`Cordon ${node.label}?`, `A new node takes its place. This job starts no further node on ${node.host}.`],
};

function confirmAction(name, node) {
  const [title, text] = QUESTIONS[name](node);
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-reason").value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  dialog.addEventListener("close", () => dialog.returnValue === "yes" && act(name, node), { once: true });
}

async function act(name, node) {
  const wish = { confirm: name, reason: byId("confirm-reason").value };
  if (node) wish.node = node.node;
  try {
    const answer = await fetch(`/api/v1/actions/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wish) });
    const said = await answer.json();
    toast(answer.ok ? said.message : said.error);
  } catch {
    toast("The master did not answer. It may have carried out this request.");
  }
}

let toastTimer = null;
function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), 8000);
}

// Logs.

async function logNames() {
  const answer = await fetch("/api/v1/logs").catch(() => null);
  if (!answer?.ok) return;
  const names = (await answer.json()).logs;
  const select = byId("log-name");
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  if (names.includes(chosen)) select.value = chosen;
}

async function showLog(name) {
  const select = byId("log-name");
  if (name && ![...select.options].some((option) => option.value === name)) select.append(make("option", { value: name, text: name }));
  if (name) select.value = name;
  const answer = await fetch(`/api/v1/logs/${encodeURIComponent(select.value)}`).catch(() => null);
  const said = answer ? await answer.json() : { error: "The master cannot be reached." };
  byId("log-note").textContent = said.error ?? said.note ?? "";
  const log = byId("log");
  const isAtEnd = log.hidden || log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  log.hidden = false;
  log.textContent = said.text ?? "";
  if (isAtEnd) log.scrollTop = log.scrollHeight;
  if (name) byId("h-logs").scrollIntoView();
}

let following = null;
byId("log-follow").addEventListener("change", (event) => {
  clearInterval(following);
  if (event.target.checked) following = setInterval(() => document.hidden || showLog(), 2000);
});
byId("log-show").addEventListener("click", () => showLog());
byId("log-name").addEventListener("focus", logNames);
byId("metric").addEventListener("change", () => panels.plots(store));

// Theme: as the system has it, until a person chooses.

const theme = byId("theme");
function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  theme.textContent = isDark() ? "Light theme" : "Dark theme";
  theme.setAttribute("aria-pressed", String(isDark()));
  if (document.body.dataset.ready) onChange(new Set(Object.keys(PANELS)));
}
theme.addEventListener("click", () => {
  const chosen = isDark() ? "light" : "dark";
  localStorage.setItem("theme", chosen);
  setTheme(chosen);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
setTheme(localStorage.getItem("theme"));

byId("leave").addEventListener("click", async () => {
  await fetch("/logout", { method: "POST" });
  location.reload();
});
for (const button of document.querySelectorAll("[data-action]")) button.addEventListener("click", () => confirmAction(button.dataset.action));
fetch("/api/v1/me").then((answer) => answer.ok && answer.json()).then((me) => me && document.body.classList.toggle("reader", me.scope === "read"), () => undefined);
follow(store, { onChange, onState });
