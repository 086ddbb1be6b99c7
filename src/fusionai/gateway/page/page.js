// The conversation: sends it, shows the answer while it streams, and keeps the pool's state up to date.

import { duration, element, showRoute, showState, showStatus } from "./pool.js";

const place = (id) => document.getElementById(id);
const log = place("log"), prompt = place("prompt"), send = place("send"), problem = place("problem");
const RETRY_MS = [500, 1000, 2000, 5000];
let conversation = [];
let running = null;
let model = "";
let wake = () => {};

function headers() {
  const key = place("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(answer) {
  try {
    const body = await answer.json();
    return { code: body.error.code, message: body.error.message };
  } catch {
    return { code: "", message: `The gateway answered ${answer.status}.` };
  }
}

// Yields the events of a stream as [kind, text]; kind is "data" or "comment".
async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let cut;
      while ((cut = rest.indexOf("\n\n")) >= 0) {
        const piece = rest.slice(0, cut);
        rest = rest.slice(cut + 2);
        if (piece.startsWith("data: ")) yield ["data", piece.slice(6)];
        else if (piece.startsWith(": ")) yield ["comment", piece.slice(2)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function watchPool() {
  let failures = 0;
  for (;;) {
    try {
      await listModels();
      const answer = await fetch("fusion/status/events", { headers: headers() });
      if (answer.status === 401) {
        showState("unreachable");
        place("model").textContent = "an API key is needed";
        place("settings").open = true;
        await new Promise((resolve) => { wake = resolve; });
        continue;
      }
      if (!answer.ok) throw new Error((await refusal(answer)).message);
      for await (const [kind, text] of pieces(answer.body)) {
        if (kind !== "data") continue;
        const report = JSON.parse(text);
        if (report.error) break;
        failures = 0;
        model = report.model;
        suggestLength(report.context_tokens);
        document.title = `${model} · FusionAI`;
        showStatus(report);
      }
    } catch {
      // Shown below, in the same way for an unreachable gateway and one that refuses.
    }
    showState("unreachable");
    const pause = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    await new Promise((resolve) => { wake = resolve; setTimeout(resolve, pause); });
  }
}

// Offers the models and adapters, if there is more than one name.
async function listModels() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) return;
  const names = (await answer.json()).data.map((card) => card.id);
  const picker = place("picker"), chosen = picker.value;
  picker.replaceChildren(...names.map((name) => new Option(name)));
  if (names.includes(chosen)) picker.value = chosen;
  place("picking").hidden = names.length < 2;
}

// Half of the context at most, so that the question fits too.
function suggestLength(contextTokens) {
  const field = place("max-tokens");
  if (!field.dataset.suggested) {
    field.dataset.suggested = "yes";
    field.value = `${Math.max(1, Math.min(512, Math.floor(contextTokens / 2)))}`;
  }
}

function complain(text) {
  problem.hidden = !text;
  problem.textContent = text;
}

function turn(role, text) {
  place("welcome")?.remove();
  const row = element("div", `turn ${role}`);
  row.append(element("span", "unseen", role === "user" ? "You: " : "Answer: "));
  const words = element("div", "words");
  setWords(words, text);
  row.append(words);
  log.append(row);
  log.scrollTop = log.scrollHeight;
  return { row, words };
}

// Puts the model's thinking above its answer, folded; returns the element for its text.
function thinkingAbove(words) {
  const fold = element("details", "thinking"), thought = element("div", "words");
  fold.append(element("summary", "", "Thinking"), thought);
  words.before(fold);
  return thought;
}

// Shows text as it is, and text between code fences as code.
function setWords(target, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  target.replaceChildren(...parts.map((part, at) => (at % 2 ? element("pre", "", part.replace(/\n$/, "")) : part)));
}

function requestBody() {
  const system = place("system").value.trim();
  const temperature = place("temperature").value, longest = place("max-tokens").value;
  return {
    model: place("picker").value || model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
    fusion_route: true,
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    ...(longest === "" ? {} : { max_completion_tokens: Number(longest) }),
  };
}

async function ask(text) {
  complain("");
  conversation.push({ role: "user", content: text });
  turn("user", text);
  const { row, words } = turn("assistant", "");
  row.classList.add("streaming");
  const held = element("p", "held");
  held.hidden = true;
  row.append(held);
  running = new AbortController();
  log.setAttribute("aria-busy", "true");
  send.textContent = "Stop";
  send.classList.add("stop");
  let thought = null, said = "", usage = null, fusion = null, failure = "";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await refusal(answer)).message);
    let isDone = false;
    for await (const [kind, piece] of pieces(answer.body)) {
      if (kind === "comment") {
        const told = /^(recovering|waiting|running): (.*)$/.exec(piece);
        if (told) { held.hidden = told[1] === "running"; held.textContent = told[2]; }
        continue;
      }
      if (piece === "[DONE]") { isDone = true; break; }
      const chunk = JSON.parse(piece);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      fusion = chunk.fusion ?? fusion;
      const { content: fresh, reasoning_content: thinking } = chunk.choices[0]?.delta ?? {};
      if (fresh || thinking) {
        const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
        if (thinking) (thought ??= thinkingAbove(words)).append(thinking);
        if (fresh) setWords(words, said += fresh);
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
    }
    if (!isDone) throw new Error("The connection to the gateway was lost.");
  } catch (wrong) {
    failure = running.signal.aborted ? "" : wrong.message || "The gateway can't be reached.";
  }
  const wasStopped = running.signal.aborted;
  running = null;
  held.remove();
  row.classList.remove("streaming");
  log.removeAttribute("aria-busy");
  send.textContent = "Send";
  send.classList.remove("stop");
  if (said) conversation.push({ role: "assistant", content: said });
  else conversation.pop();
  if (failure) {
    complain(failure);
    row.classList.add("failed");
    if (!said) { words.textContent = "No answer."; prompt.value ||= text; }
  }
  if (fusion) { row.append(facts(fusion, usage)); showRoute(fusion); }
  else if (wasStopped) row.append(element("p", "facts", "Stopped."));
  place("announce").textContent = failure || (wasStopped ? "Stopped." : `Answer: ${said}`);
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function facts(fusion, usage) {
  const line = element("p", "facts");
  line.append(element("span", "way", fusion.route.join(" → ")));
  const told = [];
  if (usage) told.push(`${usage.completion_tokens} tokens`);
  if (fusion.tokens_per_s) told.push(`${fusion.tokens_per_s.toFixed(fusion.tokens_per_s < 10 ? 1 : 0)} tokens/s`);
  if (fusion.first_token_s !== null) told.push(`first token after ${duration(fusion.first_token_s)}`);
  if (usage?.prompt_tokens_details?.cached_tokens) told.push(`${usage.prompt_tokens_details.cached_tokens} prompt tokens from the cache`);
  for (const wait of fusion.waits) if (wait.state !== "running") told.push(wait.detail);
  line.append(` · ${told.join(" · ")}`);
  return line;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

place("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = prompt.value.trim();
  if (!text) { prompt.focus(); return; }
  prompt.value = "";
  grow();
  ask(text);
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) place("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
log.addEventListener("click", (event) => {
  const idea = event.target.closest(".idea");
  if (idea && !running) { ask(idea.textContent); prompt.focus(); }
});
place("fresh").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  log.replaceChildren();
  complain("");
  place("announce").textContent = "New chat.";
  prompt.focus();
});
place("key").addEventListener("change", () => wake());
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", `${other === button}`);
  });
}
watchPool();
