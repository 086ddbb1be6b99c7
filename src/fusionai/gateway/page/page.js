// The conversation: sends it, shows the answer while it streams, keeps chats and the pool's state up to date.

import { newChat, openChats, titleOf } from "./chats.js";
import { element, place } from "./dom.js";
import { copyButton, markdownIn } from "./markdown.js";
import { picture, pictureBox } from "./pictures.js";
import { duration, showRoute, showState, showStatus } from "./pool.js";

const log = place("log"), prompt = place("prompt"), send = place("send"), problem = place("problem");
const welcome = place("welcome"), pictures = pictureBox(place("pictures"), complain);
const RETRY_MS = [500, 1000, 2000, 5000];
const REMEMBERED = ["temperature", "max-tokens", "system"];
let chats = null;
let chat = newChat();
let running = null;
let model = "";
let cards = [];
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

// Offers the models and adapters, if there is more than one name, and images, if the chosen model reads them.
async function listModels() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) return;
  cards = (await answer.json()).data;
  const names = cards.map((card) => card.id), picker = place("picker"), chosen = picker.value || chat.model;
  picker.replaceChildren(...names.map((name) => new Option(name)));
  if (names.includes(chosen)) picker.value = chosen;
  place("picking").hidden = names.length < 2;
  offerImages();
}

function readsImages() {
  const card = cards.find((each) => each.id === place("picker").value) ?? cards[0];
  return card?.input_modalities?.includes("image") ?? false;
}

function offerImages() {
  place("attach").hidden = !readsImages();
}

// Half of the context at most, so that the question fits too.
function suggestLength(contextTokens) {
  const field = place("max-tokens");
  if (!field.value && !field.dataset.suggested) field.value = `${Math.max(1, Math.min(512, Math.floor(contextTokens / 2)))}`;
  field.dataset.suggested = "yes";
}

function complain(text) {
  problem.hidden = !text;
  problem.textContent = text;
}

// Shows a turn of the chat; returns its row and the element of its words.
function showTurn({ role, text, images = [], thinking = "", facts = null }) {
  welcome.remove();
  const row = element("div", `turn ${role}`);
  row.append(element("span", "unseen", role === "user" ? "You: " : "Answer: "));
  const words = element("div", "words");
  row.append(words);
  if (role === "user") {
    words.append(...images.map((url, at) => picture(url, `Image ${at + 1} of this message`)), text);
  } else {
    markdownIn(words)(text);
    if (thinking) thinkingAbove(words).append(thinking);
    if (facts) row.append(factsOf(facts.fusion, facts.usage));
  }
  log.append(row);
  return { row, words };
}

// Puts the model's thinking above its answer, folded; returns the element for its text.
function thinkingAbove(words) {
  const fold = element("details", "thinking"), thought = element("div", "words plain");
  fold.append(element("summary", "", "Thinking"), thought);
  words.before(fold);
  return thought;
}

// The last question can be edited and the last answer asked for again; each answer can be copied.
function offerActions() {
  for (const old of log.querySelectorAll(".actions")) old.remove();
  const rows = [...log.querySelectorAll(".turn")], last = chat.turns.length - 1;
  chat.turns.forEach((turn, at) => {
    const actions = element("div", "actions");
    if (turn.role === "assistant") actions.append(copyButton("Copy", () => turn.text));
    if (at === last) actions.append(action("Try again", () => askAgain()));
    if (turn.role === "user" && at >= last - 1) actions.append(action("Edit", () => editLast()));
    if (actions.children.length) rows[at]?.append(actions);
  });
}

function action(label, act) {
  const button = element("button", "quiet", label);
  button.type = "button";
  button.addEventListener("click", () => { if (!running) act(); });
  return button;
}

function dropLast() {
  if (chat.turns.at(-1)?.role === "assistant") chat.turns.pop();
  return chat.turns.pop();
}

async function askAgain() {
  const { text, images } = dropLast();
  showChat(chat);
  await ask(text, images);
}

async function editLast() {
  const { text, images } = dropLast();
  showChat(chat);
  prompt.value = text;
  pictures.put(images ?? []);
  grow();
  prompt.focus();
}

function messageOf({ role, text, images = [] }) {
  if (!images.length) return { role, content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

function requestBody() {
  const system = place("system").value.trim();
  const temperature = place("temperature").value, longest = place("max-tokens").value;
  return {
    model: place("picker").value || model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.turns.map(messageOf)],
    stream: true,
    stream_options: { include_usage: true },
    fusion_route: true,
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    ...(longest === "" ? {} : { max_completion_tokens: Number(longest) }),
  };
}

// Reads the answer's stream into `heard`, and calls `show` after each piece.
async function listen(body, heard, show) {
  for await (const [kind, piece] of pieces(body)) {
    if (kind === "comment") {
      const state = /^(recovering|waiting|running): (.*)$/.exec(piece);
      if (state) heard.waits = state[1] === "running" ? "" : state[2];
    } else if (piece === "[DONE]") {
      return;
    } else {
      const chunk = JSON.parse(piece);
      if (chunk.error) throw new Error(chunk.error.message);
      heard.usage = chunk.usage ?? heard.usage;
      heard.fusion = chunk.fusion ?? heard.fusion;
      const delta = chunk.choices[0]?.delta ?? {};
      heard.text += delta.content ?? "";
      heard.thinking += delta.reasoning_content ?? "";
    }
    show();
  }
  throw new Error("The connection to the gateway was lost.");
}

// Shows what was heard, at most once for each picture that the browser draws.
function shower(row, words, heard) {
  const held = element("p", "held"), write = markdownIn(words);
  let thought = null, isDue = false;
  row.append(held);
  held.hidden = true;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      if (!row.isConnected) return;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      held.hidden = !heard.waits || !row.classList.contains("streaming");
      held.textContent = heard.waits;
      if (heard.thinking) (thought ??= thinkingAbove(words)).textContent = heard.thinking;
      write(heard.text);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    });
  };
}

async function ask(text, images = []) {
  complain("");
  const asked = chat;
  asked.model = place("picker").value || model;
  asked.title ||= titleOf(text);
  asked.turns.push({ role: "user", text, images });
  showTurn(asked.turns.at(-1));
  const { row, words } = showTurn({ role: "assistant", text: "" });
  offerActions();
  log.scrollTop = log.scrollHeight;
  const heard = { text: "", thinking: "", usage: null, fusion: null, waits: "" };
  const stop = running = new AbortController();
  showRunning(row, true);
  let failure = "";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal: stop.signal,
    });
    if (!answer.ok) throw new Error((await refusal(answer)).message);
    await listen(answer.body, heard, shower(row, words, heard));
  } catch (wrong) {
    failure = stop.signal.aborted ? "" : wrong.message || "The gateway can't be reached.";
  }
  finish(asked, row, heard, failure, stop.signal.aborted);
}

function showRunning(row, isRunning) {
  row.classList.toggle("streaming", isRunning);
  log.toggleAttribute("aria-busy", isRunning);
  if (isRunning) log.setAttribute("aria-busy", "true");
  send.textContent = isRunning ? "Stop" : "Send";
  send.classList.toggle("stop", isRunning);
}

// Puts what was heard into the chat and shows the chat as it is now, if it is still the one that is shown.
function finish(asked, row, heard, failure, wasStopped) {
  running = null;
  showRunning(row, false);
  const facts = heard.fusion ? { fusion: heard.fusion, usage: heard.usage } : null;
  if (heard.text) asked.turns.push({ role: "assistant", text: heard.text, thinking: heard.thinking, facts });
  const unanswered = heard.text ? null : asked.turns.pop();
  if (asked.turns.length) keep(asked);
  if (asked !== chat) return;
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 160;
  row.remove();
  if (heard.text) row = showTurn(asked.turns.at(-1)).row;
  else row = showTurn({ role: "assistant", text: "No answer." }).row;
  if (wasStopped && !facts) row.append(element("p", "facts", "Stopped."));
  if (facts) showRoute(facts.fusion);
  if (failure) { complain(failure); row.classList.add("failed"); }
  if (unanswered && !prompt.value) { prompt.value = unanswered.text; pictures.put(unanswered.images); grow(); }
  offerActions();
  place("announce").textContent = failure || (wasStopped ? "Stopped." : `Answer: ${heard.text}`);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function factsOf(fusion, usage) {
  const line = element("p", "facts");
  line.append(element("span", "way", fusion.route.join(" → ")));
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (fusion.tokens_per_s) parts.push(`${fusion.tokens_per_s.toFixed(fusion.tokens_per_s < 10 ? 1 : 0)} tokens/s`);
  if (fusion.first_token_s !== null) parts.push(`first token after ${duration(fusion.first_token_s)}`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} prompt tokens from the cache`);
  for (const wait of fusion.waits) if (wait.state !== "running") parts.push(wait.detail);
  line.append(` · ${parts.join(" · ")}`);
  return line;
}

async function keep(kept) {
  kept.at = Date.now();
  try {
    await chats.put(kept);
  } catch {
    complain("The browser has no space left for this chat. Delete chats to make room.");
  }
  await listChats();
}

async function listChats() {
  const all = await chats.all();
  place("chat-list").replaceChildren(...all.map((each) => {
    const item = element("li"), open = element("button", "open", each.title), remove = element("button", "remove", "×");
    open.type = remove.type = "button";
    if (each.id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openChat(each));
    remove.setAttribute("aria-label", `Delete the chat “${each.title}”`);
    remove.addEventListener("click", () => removeChat(each));
    item.append(open, remove);
    return item;
  }));
  place("no-chats").hidden = all.length > 0;
  place("clear").hidden = all.length === 0;
}

function openChat(opened) {
  running?.abort();
  showChat(opened);
  if (cards.some((card) => card.id === opened.model)) place("picker").value = opened.model;
  offerImages();
  show("chat");
  listChats();
  place("announce").textContent = opened.turns.length ? `Chat: ${opened.title}.` : "New chat.";
  prompt.focus();
}

function showChat(shown) {
  chat = shown;
  log.replaceChildren();
  complain("");
  chat.turns.forEach(showTurn);
  if (!chat.turns.length) log.append(welcome);
  offerActions();
  log.scrollTop = log.scrollHeight;
}

async function removeChat(removed) {
  if (!confirm(`Delete the chat “${removed.title}”?`)) return;
  await chats.remove(removed.id);
  if (removed.id === chat.id) openChat(newChat());
  else await listChats();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// On narrow screens one of the chats, the conversation and the pool is shown.
function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", `${button.dataset.show === view}`);
  }
}

// Settings are kept in this browser; the API key only until the tab closes.
function rememberSettings() {
  const stores = [...REMEMBERED.map((id) => [id, localStorage]), ["key", sessionStorage]];
  for (const [id, store] of stores) {
    const field = place(id);
    field.value = store.getItem(`fusion-${id}`) ?? field.value;
    field.addEventListener("change", () => store.setItem(`fusion-${id}`, field.value));
  }
}

function wireComposer() {
  place("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    const text = prompt.value.trim();
    if (!text && !pictures.count) { prompt.focus(); return; }
    prompt.value = "";
    grow();
    ask(text, pictures.take());
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
}

function wireImages() {
  const choose = place("choose");
  const add = (event, files) => {
    const images = [...(files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!images.length || !readsImages()) return;
    event.preventDefault();
    pictures.add(images);
  };
  place("attach").addEventListener("click", () => choose.click());
  choose.addEventListener("change", (event) => { add(event, choose.files); choose.value = ""; });
  prompt.addEventListener("paste", (event) => add(event, event.clipboardData?.files));
  document.addEventListener("dragover", (event) => { if (readsImages()) event.preventDefault(); });
  document.addEventListener("drop", (event) => add(event, event.dataTransfer?.files));
  place("picker").addEventListener("change", offerImages);
}

function wireChats() {
  log.addEventListener("click", (event) => {
    const idea = event.target.closest(".idea");
    if (idea && !running) { ask(idea.textContent); prompt.focus(); }
  });
  for (const button of document.querySelectorAll(".fresh")) button.addEventListener("click", () => openChat(newChat()));
  place("clear").addEventListener("click", async () => {
    if (!confirm("Delete all chats that this browser keeps?")) return;
    await chats.clear();
    openChat(newChat());
  });
  place("key").addEventListener("change", () => wake());
  for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => show(button.dataset.show));
  window.addEventListener("focus", listChats);
}

chats = await openChats();
if (!chats.isKept) place("kept").textContent = "This browser keeps no chats: they are gone when the page closes.";
rememberSettings();
wireComposer();
wireImages();
wireChats();
await listChats();
watchPool();
