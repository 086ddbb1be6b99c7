// Shows the pool's state and the last answer's route, as received from the gateway. page.js makes the requests.

import { element, place, write } from "./dom.js";

const WORDS = {
  ready: "ready", starting: "starting", recovering: "recovering", waiting: "waiting for a machine",
  stopped: "stopped", unreachable: "unreachable",
};
const CONDITIONS = { running: "", loading: "loading its weights", rebuilding: "rebuilding its cache", lost: "lost" };

export function duration(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const milliseconds = seconds * 1000;
  return `${milliseconds < 10 ? milliseconds.toFixed(1) : milliseconds.toFixed(0)} ms`;
}

function memory(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.round(bytes / 1e6)} MB`;
}

export function showState(state) {
  place("state").dataset.state = state;
  write(place("state-text"), WORDS[state] ?? state);
}

export function showStatus(report) {
  const engine = report.engine;
  showState(engine.state);
  write(place("model"), report.model);
  write(place("detail"), engine.state === "ready" ? "" : engine.detail);
  write(place("speed"), engine.tokens_per_s ? engine.tokens_per_s.toFixed(engine.tokens_per_s < 10 ? 1 : 0) : "0");
  write(place("sessions"), engine.queued ? `${engine.running} + ${engine.queued}` : `${engine.running}`);
  write(place("machines"), `${engine.members.length}`);
  const used = engine.pages - engine.pages_free;
  place("pages").value = engine.pages ? used / engine.pages : 0;
  write(place("pages-text"), `${used} of ${engine.pages} pages`);
  place("stages").classList.toggle("flowing", engine.running > 0 && engine.state === "ready");
  showStages(engine.stages);
  showStory(engine.faults);
}

function showStages(stages) {
  const list = place("stages");
  const several = stages.some((stage) => stage.pipeline !== stages[0].pipeline);
  while (list.children.length > stages.length) list.lastChild.remove();
  stages.forEach((stage, at) => {
    let row = list.children[at];
    if (!row) {
      row = element("li");
      row.append(element("span", "name"), element("span", "time"), element("span", "what"));
      list.append(row);
    }
    row.dataset.stage = `${stage.stage}`;
    row.dataset.state = stage.state;
    const [name, time, what] = row.children;
    write(name, stage.name || stage.peer);
    write(time, stage.mean_compute_s ? `${duration(stage.mean_compute_s)} per pass` : "");
    const [first, end] = stage.blocks;
    const facts = [end - first === 1 ? `block ${first}` : `blocks ${first} to ${end - 1}`];
    if (several) facts.unshift(`pipeline ${stage.pipeline}`);
    if (stage.resident_bytes) facts.push(memory(stage.resident_bytes));
    if (stage.spare) facts.push(`${stage.spare} stands by`);
    const condition = CONDITIONS[stage.state] ?? stage.state;
    const told = facts.join(" · ");
    if (what.dataset.told !== told + condition) {
      what.dataset.told = told + condition;
      what.replaceChildren(told);
      if (condition) what.append(" · ", element("span", "condition", condition));
    }
  });
}

function showStory(faults) {
  const list = place("story");
  place("calm").hidden = faults.length > 0;
  const told = JSON.stringify(faults);
  if (list.dataset.told === told) return;
  list.dataset.told = told;
  list.replaceChildren(...[...faults].reverse().slice(0, 50).map((fault) => {
    const row = element("li");
    const when = element("time", "", new Date(fault.at_s * 1000).toLocaleTimeString());
    when.dateTime = new Date(fault.at_s * 1000).toISOString();
    const gap = fault.gap_s === null ? "" : ` Tokens flowed again after ${duration(fault.gap_s)}.`;
    row.append(when, `${fault.text}${gap}`);
    return row;
  }));
}

export function showRoute(fusion) {
  if (!fusion || !fusion.hops.length) return;
  place("hops-section").hidden = false;
  const sums = fusion.hops.map((hop) => hop.queued_s + hop.compute_s + hop.transfer_s);
  const longest = Math.max(...sums);
  const all = sums.reduce((sum, value) => sum + value, 0);
  write(place("hops-summary"), `On average, a token takes ${duration(all)} through ${fusion.hops.length} stages.`);
  place("hops").replaceChildren(...fusion.hops.map((hop, at) => {
    const row = element("li");
    const lane = element("span", "lane");
    lane.setAttribute("aria-hidden", "true");
    for (const [part, seconds] of [["compute", hop.compute_s], ["transfer", hop.transfer_s], ["queued", hop.queued_s]]) {
      const piece = element("span", `part ${part}`);
      piece.style.width = `${longest ? (100 * seconds) / longest : 0}%`;
      lane.append(piece);
    }
    const words = element("span", "unseen",
      `: ${duration(hop.compute_s)} computing, ${duration(hop.transfer_s)} on the network, ${duration(hop.queued_s)} queueing; in total `);
    const who = element("span", "who", `${hop.stage} ${hop.peer}`);
    who.title = hop.peer;
    const sum = element("span", "sum", duration(sums[at]));
    sum.prepend(words);
    row.append(who, lane, sum);
    return row;
  }));
}
