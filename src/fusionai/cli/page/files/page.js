// The broker's page: signs in, follows the stream of overviews, and sends what its owner asks for.

import { element, place, write } from "./dom.js";
import { badge, bytes, drawMap, drawPlan, drawQr, flops, keyed, seconds, setBadge, speed, trip } from "./draw.js";

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

let hiding = 0;

function showDone(text) {
  write(place("done"), text);
  clearTimeout(hiding);
  hiding = setTimeout(() => write(place("done"), ""), 8000);
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
    const done = await send("actions", action);
    if (!done.command && !done.plan) showDone(done.text);
    return done;
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
  place("make-code").hidden = !overview.announces;  // no machine could find the broker
  const present = overview.machines.filter((one) => one.state !== "lost");
  write(place("present"), `${present.length}`);
  write(place("lent"), bytes(present.reduce((sum, one) => sum + one.memory_bytes, 0)));
  write(place("running"), `${overview.jobs.filter((one) => one.is_live).length}`);
  showMachines(overview.machines);
  showRefused(overview.refused, overview.approves);
  showJobs(overview.jobs);
  showPrograms(overview.programs, overview.recipes);
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
    write(lends, [one.device, `lends ${bytes(one.memory_bytes)}`, flops(one.flops_per_s), share, one.isolated === "no" ? "not isolated from jobs" : ""].filter(Boolean).join(" · "));
    row.dataset.since = one.since_s;
    row.dataset.does = one.job ? `${one.part} of ${one.job}` : "";
    tell(does, row);
  });
}

function showRefused(refused, approves) {
  place("refused-section").hidden = refused.length === 0;
  write(place("refused-how"), approves
    ? "Compare the whole key with what `fusion trust key` shows on that machine, then approve it."
    : "Have the key signed with `fusion trust sign` by a key that this broker trusts; it must join again then.");
  keyed(place("refused"), refused, (one) => one.peer, (one) => {
    const row = element("li");
    const head = element("p", "head");
    const side = element("span", "side");
    const approve = button("Approve", "quiet", async (self) => {
      const text = `Its key: ${one.peer}. Names prove nothing: compare the key with the one on that machine.`;
      if (await confirmed(`Let ${one.name || "it"} lend itself?`, text, "Approve it")) await perform(self, { do: "approve", peer: one.peer });
    });
    approve.setAttribute("aria-label", `Approve ${one.name}`);
    approve.hidden = !approves;
    side.append(approve);
    head.append(element("span", "name", one.name), side);
    row.append(head, element("p", "facts last", one.peer));
    return row;
  }, () => {});
}

function tell(target, row) {
  const since = seconds(Math.max(1, Date.now() / 1000 - Number(row.dataset.since)));
  write(target, [row.dataset.does, `for ${since}`].filter(Boolean).join(" · "));
}

// The time of day, with the date before today.
function moment(at) {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return when.toDateString() === new Date().toDateString() ? time : `${when.toLocaleDateString()} ${time}`;
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
    const steps = one.steps ? `${one.steps_done} of ${one.steps} steps` : one.steps_done > 1 ? `${one.steps_done} tokens` : "";
    write(head.children[2], [one.title === one.job ? "" : one.title, steps, `owner ${one.owner}`, one.started_at_s ? `since ${moment(one.started_at_s)}` : ""].filter(Boolean).join(" · "));
    head.lastChild.lastChild.hidden = !one.is_live;
    progress.hidden = !(one.is_live && one.steps);
    progress.max = one.steps || 1;
    progress.value = one.steps_done;
    plan.hidden = !one.plan;
    if (one.plan) drawPlan(plan, one.plan);
  });
}

function showPrograms(programs, recipes) {
  place("programs-section").hidden = programs.length + recipes.length === 0;
  keyed(place("programs"), programs, (one) => one.number, (one) => {
    const row = element("li");
    const head = element("p", "head");
    const side = element("span", "side");
    const open = element("a", "quiet", "Open chat");
    open.rel = "noopener";
    open.target = "_blank";
    const log = button("Log", "quiet", () => showLog(one.command, `programs/${one.number}`));
    log.setAttribute("aria-label", `Log of ${one.title}`);
    const end = button("End", "quiet bad", async (self) => {
      const text = one.kind === "train" ? "It writes a last checkpoint and can be started again." : "Open answers may finish for some seconds.";
      if (await confirmed(`End ${one.title}?`, text, "End it")) await perform(self, { do: "end", number: one.number });
    });
    end.setAttribute("aria-label", `End ${one.title}`);
    side.append(open, log, end);
    head.append(element("span", "name", `${one.kind === "train" ? "Train" : "Serve"} ${one.title}`), badge(), element("span", "facts"), side);
    row.append(head, element("p", "facts last"));
    row.title = one.command;
    return row;
  }, (row, one) => {
    const [head, last] = row.children;
    const failed = one.state === "ended" && one.exit_code !== 0 && one.exit_code !== 130;
    const ready = one.state === "running" && one.kind === "serve";
    const words = one.state === "ended" ? (failed ? `failed (${one.exit_code})` : "ended") : ready ? (one.url ? "ready" : "loading") : one.state;
    setBadge(head.children[1], failed ? "failed" : one.state === "ended" ? "ended" : words === "loading" ? "starting" : one.state, words);
    const [open, , end] = head.lastChild.children;
    open.hidden = !one.url;
    if (one.url && open.getAttribute("href") !== `${one.url}/`) open.href = `${one.url}/`;
    end.hidden = one.state !== "running";
    write(head.children[2], `since ${moment(one.since_s)}`);
    write(last, one.last);
  });
  keyed(place("recipes"), recipes.filter((one) => !one.is_running), (one) => one.name, (one) => {
    const row = element("li");
    const head = element("p", "head");
    const side = element("span", "side");
    const again = button("Start again", "quiet", (self) => perform(self, { do: "train", name: one.name }));
    again.setAttribute("aria-label", `Start ${one.name} again`);
    const serve = button("Serve", "quiet", (self) => perform(self, { do: "serve_trained", name: one.name }));
    serve.setAttribute("aria-label", `Serve ${one.name}`);
    side.append(serve, again);
    head.append(element("span", "name", one.name), element("span", "facts", "trained here"), side);
    row.append(head);
    return row;
  }, (row, one) => { row.firstChild.lastChild.firstChild.hidden = !one.has_checkpoint; });
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

function filledForm() {
  const number = (id) => Number(place(id).value);
  const form = {
    name: place("name").value, model: place("base").value || place("base-text").value, files: place("files").value,
    format: place("format").value, sequence_length: number("sequence"), steps: number("steps"), batch_size: number("batch"),
    microbatches: number("microbatches"), learning_rate: number("rate"),
  };
  return place("rank").value ? { ...form, adapter_rank: number("rank") } : form;
}

// Plans the form in a process on the broker's machine. What is started afterwards is exactly what was planned.
async function plan() {
  const form = filledForm();
  place("planned").hidden = true;
  write(place("planning"), "Planning on this pool: the model is captured first, which takes some seconds.");
  const found = await perform(place("plan"), { do: "plan", form });
  write(place("planning"), "");
  if (!found) return;
  place("planned").hidden = false;
  place("start").dataset.name = form.name;
  place("verdict").replaceChildren(...found.verdict.map((line) => element("li", "", line)));
  drawPlan(place("planned-plan"), { ...found.plan, sentence: "" });
  write(place("planned-recipe"), found.recipe);
  place("start").focus();
}

place("train").addEventListener("submit", (event) => { event.preventDefault(); plan(); });
place("train").addEventListener("input", () => { place("planned").hidden = true; });
place("base").addEventListener("change", () => {
  const own = place("base").value === "";
  place("base-own").hidden = !own;
  place("base-text").required = own;
});
place("start").addEventListener("click", async (event) => {
  const started = await perform(event.currentTarget, { do: "train", name: event.currentTarget.dataset.name });
  if (!started) return;
  place("planned").hidden = true;
  place("programs-section").scrollIntoView({ block: "nearest" });
});
place("serve").addEventListener("submit", async (event) => {
  event.preventDefault();
  const started = await perform(event.submitter, { do: "serve", model: place("served").value });
  if (!started) return;
  place("served").value = "";
  place("programs-section").scrollIntoView({ block: "nearest" });
});
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
