// The broker's page: signs in, follows the stream of overviews, and sends what its owner asks for.

import { badge, bytes, drawMap, drawPlan, drawQr, element, keyed, place, seconds, setBadge, speed, trip, write } from "./draw.js";

let latest = null;
let stream = null;

async function send(path, body, method = "POST") {
  const answer = await fetch(path, {
    method, headers: { "Content-Type": "application/json" }, body: body === undefined ? undefined : JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error([found.message, found.hint].filter(Boolean).join(" ")), { status: answer.status });
  return found;
}

function showProblem(text) {
  const target = place("problem");
  target.hidden = !text;
  target.textContent = text;
  if (text) target.scrollIntoView({ block: "nearest" });
}

function showState(state, words) {
  place("state").dataset.state = state;
  write(place("state-text"), words);
}

function showSignIn() {
  place("sign-in").hidden = false;
  place("sections").hidden = true;
  place("sign-out").hidden = true;
  write(place("pool"), "sign in to see the pool");
  showState("unknown", "signed out");
}

async function signIn(secret) {
  try {
    await send("session", { secret });
    showProblem("");
    follow();
  } catch (problem) {
    showProblem(problem.message);
    showSignIn();
  }
}

function follow() {
  stream?.close();
  stream = new EventSource("events");
  stream.onmessage = (message) => show(JSON.parse(message.data));
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) showSignIn();
    else showState("unreachable", "broker away");
  };
}

// Runs an action of a button: the button rests meanwhile, a problem is shown at the top.
async function perform(button, action) {
  button.disabled = true;
  showProblem("");
  try {
    return await send("actions", action);
  } catch (problem) {
    if (problem.status === 401) showSignIn();
    showProblem(problem.message);
    return null;
  } finally {
    button.disabled = false;
  }
}

function confirmed(title, text, yes) {
  const dialog = place("ask");
  write(place("ask-title"), title);
  write(place("ask-text"), text);
  write(place("ask-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  place("ask-no").focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function showLog(title, path) {
  try {
    const answer = await fetch(path);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.message);
    write(place("log-title"), title);
    write(place("log-lines"), found.lines.join("\n") || "Nothing yet.");
    place("log").showModal();
  } catch (problem) {
    showProblem(problem.message);
  }
}

function button(text, className, onClick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", () => onClick(made));
  return made;
}

function show(overview) {
  latest = overview;
  place("sign-in").hidden = true;
  place("sections").hidden = false;
  place("sign-out").hidden = false;
  write(place("pool"), `pool ${overview.pool} · ${overview.addresses.join(", ")}`);
  showState("ready", "broker open");
  const present = overview.machines.filter((one) => one.state !== "lost");
  write(place("present"), `${present.length}`);
  write(place("lent"), bytes(present.reduce((sum, one) => sum + one.memory_bytes, 0)));
  write(place("running"), `${overview.jobs.filter((one) => one.is_live).length}`);
  showMachines(overview.machines);
  showJobs(overview.jobs);
  showLinks(overview.machines, overview.links);
  showEvents(overview.notices, overview.jobs);
}

function showMachines(machines) {
  place("no-machines").hidden = machines.length > 0;
  keyed(place("machines"), machines, (one) => one.peer, (one) => {
    const row = element("li");
    const head = element("p", "head");
    const side = element("span", "side");
    const evict = button("Evict", "quiet bad", async (self) => {
      const text = "It leaves the pool for good, with all keys of its machine. Its jobs end; jobs of others go on without it.";
      if (await confirmed(`Evict ${one.name}?`, text, "Evict it")) await perform(self, { do: "evict", peer: one.peer });
    });
    evict.setAttribute("aria-label", `Evict ${one.name}`);
    side.append(evict);
    head.append(element("span", "name", one.name), badge(), side);
    row.append(head, element("p", "facts"), element("p", "facts"));
    row.title = one.peer;
    return row;
  }, (row, one) => {
    const [head, lends, does] = row.children;
    setBadge(head.children[1], one.state, one.words);
    const share = one.share < 1 ? `${Math.round(100 * one.share)} % of its time` : "";
    write(lends, [one.device, `lends ${bytes(one.memory_bytes)}`, `${(one.flops_per_s / 1e9).toPrecision(3)} GFLOP/s`, share].filter(Boolean).join(" · "));
    row.dataset.since = one.since_s;
    row.dataset.does = one.job ? `${one.part} of ${one.job}` : "";
    tell(does, row);
  });
}

function tell(target, row) {
  const since = seconds(Math.max(1, Date.now() / 1000 - Number(row.dataset.since)));
  write(target, [row.dataset.does, `for ${since}`].filter(Boolean).join(" · "));
}

function showJobs(jobs) {
  place("no-jobs").hidden = jobs.length > 0;
  keyed(place("jobs"), jobs, (one) => one.job, (one) => {
    const row = element("li");
    const head = element("p", "head");
    const side = element("span", "side");
    const history = button("History", "quiet", () => showLog(`History of ${one.job}`, `jobs/${encodeURIComponent(one.job)}`));
    history.setAttribute("aria-label", `History of ${one.job}`);
    const stop = button("Stop", "quiet bad", async (self) => {
      if (await confirmed(`Stop ${one.job}?`, "It writes a last checkpoint and can be resumed.", "Stop it")) await perform(self, { do: "stop", job: one.job });
    });
    stop.setAttribute("aria-label", `Stop ${one.job}`);
    side.append(history, stop);
    head.append(element("span", "name", one.job), badge(), element("span", "facts"), side);
    const progress = element("progress");
    progress.setAttribute("aria-label", `Progress of ${one.job}`);
    row.append(head, progress, element("div", "plan"));
    return row;
  }, (row, one) => {
    const [head, progress, plan] = row.children;
    setBadge(head.children[1], one.state, one.state);
    const steps = one.steps ? `${one.steps_done} of ${one.steps} steps` : one.steps_done ? `${one.steps_done} tokens` : "";
    write(head.children[2], [one.title === one.job ? "" : one.title, steps, `owner ${one.owner}`].filter(Boolean).join(" · "));
    head.lastChild.lastChild.hidden = !one.is_live;
    progress.hidden = !(one.is_live && one.steps);
    progress.max = one.steps || 1;
    progress.value = one.steps_done;
    plan.hidden = !one.plan;
    if (one.plan) drawPlan(plan, one.plan);
  });
}

function showLinks(machines, links) {
  place("no-links").hidden = links.length > 0;
  place("links").hidden = links.length === 0;
  place("map").hidden = machines.length < 2;
  const map = place("map");
  const names = new Map(machines.map((one) => [one.peer, one.name]));
  const shown = JSON.stringify([links, machines.map((one) => [one.peer, one.name, one.state]), map.clientWidth]);
  if (map.dataset.shown === shown) return;
  map.dataset.shown = shown;
  drawMap(map, machines, links);
  place("links-body").replaceChildren(...links.map((link) => {
    const row = element("tr");
    const between = link.ends.map((peer) => names.get(peer)).join(" – ");
    row.append(element("td", "", between), element("td", "", link.route), element("td", "number", speed(link) || "–"), element("td", "number", trip(link) || "–"));
    return row;
  }));
}

const STAMP = /^(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)Z (.*)$/s;
const BAD = /\b(lost|fail|failed|refused|evicted|wrong|dispute|killed|gone|dead)\b/i;

function showEvents(notices, jobs) {
  const events = notices.map((one) => ({ at: one.at_s * 1000, text: one.text }));
  for (const job of jobs) {
    for (const line of job.events) {
      const found = STAMP.exec(line);
      if (found) events.push({ at: Date.parse(`${found[1]}T${found[2]}Z`), text: `${job.job}: ${found[3]}` });
    }
  }
  events.sort((one, other) => other.at - one.at);
  place("calm").hidden = events.length > 0;
  const list = place("events");
  list.hidden = events.length === 0;
  keyed(list, events.slice(0, 100), (one) => `${one.at} ${one.text}`, (one) => {
    const row = element("li");
    const when = element("time", "", new Date(one.at).toLocaleTimeString());
    when.dateTime = new Date(one.at).toISOString();
    row.append(when, element("span", BAD.test(one.text) ? "bad" : "", one.text));
    return row;
  }, () => {});
}

function showMade(made) {
  if (!made) return;
  place("made").hidden = false;
  place("made-code").hidden = !made.code;
  write(place("made-code"), made.code ? `${made.code.slice(0, 3)} ${made.code.slice(3)}` : "");
  write(place("made-command"), made.command);
  write(place("made-text"), made.text);
  place("made-qr").hidden = made.qr.length === 0;
  if (made.qr.length) drawQr(place("qr"), made.qr);
}

place("make-code").addEventListener("click", async (event) => showMade(await perform(event.currentTarget, { do: "code" })));
place("make-invitation").addEventListener("click", async (event) => showMade(await perform(event.currentTarget, { do: "invite" })));
place("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(place("made-command").textContent);
  write(place("copy"), "Copied");
  setTimeout(() => write(place("copy"), "Copy"), 2000);
});
place("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const secret = place("secret").value;
  place("secret").value = "";
  signIn(secret);
});
place("sign-out").addEventListener("click", async () => {
  stream?.close();
  await send("session", undefined, "DELETE").catch(() => {});
  showSignIn();
});
setInterval(() => {
  for (const row of place("machines").children) tell(row.children[2], row);
}, 5000);
addEventListener("resize", () => latest && showLinks(latest.machines, latest.links));

// The address that the broker prints has the key after #, which browsers send nowhere. It does not stay in the history.
const key = location.hash.slice(1);
if (key) {
  history.replaceState(null, "", location.pathname);
  signIn(key);
} else {
  follow();
}
