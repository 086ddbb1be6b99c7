// Draws what the page shows: rows, the map of links, plans. Text from the pool only ever becomes text nodes.

import { element, write } from "./dom.js";

// Keeps one element per row, so that focus and open parts survive an update.
export function keyed(list, rows, key, make, update) {
  const known = new Map([...list.children].map((one) => [one.dataset.key, one]));
  rows.forEach((row, at) => {
    const name = String(key(row));
    let one = known.get(name);
    if (!one) {
      one = make(row);
      one.dataset.key = name;
    }
    known.delete(name);
    if (list.children[at] !== one) list.insertBefore(one, list.children[at] ?? null);
    update(one, row);
  });
  for (const gone of known.values()) gone.remove();
}

export function bytes(count) {
  if (count >= 1e12) return `${Number((count / 1e12).toPrecision(3))} TB`;
  if (count >= 1e9) return `${Number((count / 1e9).toPrecision(3))} GB`;
  if (count >= 1e6) return `${Math.round(count / 1e6)} MB`;
  return `${Math.round(count / 1e3)} kB`;
}

export function flops(perSecond) {
  if (perSecond >= 1e12) return `${Number((perSecond / 1e12).toPrecision(3))} TFLOP/s`;
  return `${Number((perSecond / 1e9).toPrecision(3))} GFLOP/s`;
}

export function seconds(value) {
  if (value >= 86400) return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min`;
  if (value >= 1) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${Math.round(value * 1e6)} µs`;
}

export function badge() {
  const made = element("span", "badge");
  made.append(element("span", "dot"), element("span"));
  return made;
}

export function setBadge(one, state, words) {
  one.dataset.state = state;
  write(one.lastChild, words);
}

export function drawQr(target, rows) {
  const size = rows.length + 8;
  const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "QR code of the invitation" });
  let path = "";
  rows.forEach((row, y) => [...row].forEach((dark, x) => { if (dark === "1") path += `M${x + 4} ${y + 4}h1v1h-1z`; }));
  svg.append(drawn("path", { d: path, fill: "#000000" }));
  target.replaceChildren(svg);
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const MOST_LABELS = 10;
const shortened = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);

// Machines on an ellipse, a line for each measured link. The table below has the same figures.
export function drawMap(target, machines, links) {
  const width = Math.max(280, Math.min(640, target.clientWidth || 640));
  const height = machines.length < 3 ? 150 : Math.round(Math.min(360, width * 0.75));
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const places = new Map(machines.map((machine, at) => {
    const angle = machines.length < 3 ? Math.PI * (1 - at) : (2 * Math.PI * at) / machines.length - Math.PI / 2;
    return [machine.peer, [width / 2 + (width / 2 - 62) * Math.cos(angle), height / 2 - 8 + (height / 2 - 42) * Math.sin(angle)]];
  }));
  for (const link of links) {
    const [[x1, y1], [x2, y2]] = link.ends.map((peer) => places.get(peer));
    svg.append(drawn("line", { x1, y1, x2, y2, class: `link ${link.route}` }));
  }
  if (links.length <= MOST_LABELS) {
    for (const link of links) {
      const [[x1, y1], [x2, y2]] = link.ends.map((peer) => places.get(peer));
      svg.append(drawn("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 8, class: "figure" }, figures(link)));
    }
  }
  for (const machine of machines) {
    const [x, y] = places.get(machine.peer);
    svg.append(drawn("circle", { cx: x, cy: y, r: 13, class: machine.state === "lost" || machine.state === "silent" ? "away" : "" }));
    svg.append(drawn("text", { x, y: y + 30 }, shortened(machine.name)));
  }
  target.replaceChildren(svg);
}

export const speed = (link) => (link.bytes_per_s ? `${bytes(link.bytes_per_s)}/s` : "");
export const trip = (link) => (link.round_trip_s ? seconds(link.round_trip_s) : "");
const figures = (link) => [speed(link), trip(link)].filter(Boolean).join(" · ") || link.route;

function bar(part, kind, words) {
  const lane = element("span", "lane");
  const fill = element("span", `fill ${kind}`);
  fill.style.width = `${Math.min(100, Math.max(0, 100 * part))}%`;
  lane.append(fill);
  lane.setAttribute("aria-hidden", "true");
  return [lane, element("span", "facts", words)];
}

// A plan as its pipeline: for each stage its machine, time, transfer and memory. The slowest part has a red frame.
export function drawPlan(target, plan) {
  const shown = JSON.stringify(plan);
  if (target.dataset.shown === shown) return;
  target.dataset.shown = shown;
  const slowest = Math.max(...plan.stages.map((one) => Math.max(one.compute_s, one.send_s)), 1e-12);
  const several = plan.stages.some((one) => one.replica > 0);
  const stages = element("ol", "stages");
  for (const one of plan.stages) {
    const row = element("li", Math.max(one.compute_s, one.send_s) === slowest ? "slowest" : "");
    const [first, end] = one.blocks;
    const blocks = end - first === 1 ? `block ${first}` : `blocks ${first} to ${end - 1}`;
    const replica = several ? [`replica ${one.replica}`] : [];
    const roles = one.roles.filter((role) => role !== "stage");
    row.append(element("p", "name", `${one.stage} ${one.name}`), element("p", "facts", [...replica, blocks, ...roles].join(", ")));
    row.append(...bar(one.compute_s / slowest, "", `${seconds(one.compute_s)} computing`));
    if (one.send_s) row.append(...bar(one.send_s / slowest, "send", `${seconds(one.send_s)} sending on`));
    if (one.memory_limit_bytes) {
      row.append(...bar(one.memory_bytes / one.memory_limit_bytes, "memory", `${bytes(one.memory_bytes)} of ${bytes(one.memory_limit_bytes)}`));
    }
    if (one.standby) row.append(element("p", "facts", `${one.standby} stands by`));
    stages.append(row);
  }
  const below = [plan.bottleneck ? `Slowest: ${plan.bottleneck}.` : "", plan.spares.length ? `Spares: ${plan.spares.join(", ")}.` : ""];
  target.replaceChildren(element("p", "", [plan.sentence, ...below].filter(Boolean).join(" ")), stages);
}
