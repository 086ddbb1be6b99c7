// Shows Markdown: parsed by markdown-it, without HTML and images of the text's own, with a button to copy each code block.

import markdownit from "./markdown-it.js";
import { element } from "./dom.js";

const COPIED_MS = 1500;
const parser = markdownit({ html: false, linkify: true }).disable("image");
const { rules } = parser.renderer;

rules.link_open = (tokens, at, options, env, renderer) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, at, options);
};
// The page's policy refuses styles inside of elements, which is how columns are aligned otherwise.
rules.th_open = rules.td_open = (tokens, at, options, env, renderer) => {
  const style = tokens[at].attrGet("style");
  if (style) tokens[at].attrs = [["class", style.replace("text-align:", "")]];
  return renderer.renderToken(tokens, at, options);
};

// Returns a function that shows a growing text in `target`. Only blocks that differ are replaced, so that a selection
// in the others stays.
export function markdownIn(target) {
  let shown = [];
  return (text) => {
    const env = {};
    const blocks = blocksOf(parser.parse(text, env)).map((tokens) => parser.renderer.render(tokens, parser.options, env));
    let same = 0;
    while (same < blocks.length && shown[same] === blocks[same]) same += 1;
    while (target.children.length > same) target.lastElementChild.remove();
    for (const html of blocks.slice(same)) target.append(blockOf(html));
    shown = blocks;
  };
}

function blocksOf(tokens) {
  const blocks = [];
  let block = [], depth = 0;
  for (const token of tokens) {
    block.push(token);
    depth += token.nesting;
    if (depth === 0) { blocks.push(block); block = []; }
  }
  return blocks;
}

// One element for each block: the count of children is the count of blocks.
function blockOf(html) {
  const block = element("div", "block");
  block.innerHTML = html;
  for (const code of block.querySelectorAll("pre")) addCopying(code);
  for (const table of block.querySelectorAll("table")) {
    const frame = element("div", "wide");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return block;
}

function addCopying(code) {
  const language = /language-(\S+)/.exec(code.firstElementChild?.className ?? "")?.[1] ?? "";
  const frame = element("div", "code"), head = element("div", "code-head");
  head.append(element("span", "", language), copyButton("Copy", () => code.textContent.replace(/\n$/, "")));
  code.replaceWith(frame);
  code.tabIndex = 0;
  frame.append(head, code);
}

export function copyButton(label, textOf) {
  const button = element("button", "quiet copy", label);
  button.type = "button";
  button.addEventListener("click", async () => {
    const isCopied = await copy(textOf());
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, COPIED_MS);
  });
  return button;
}

// Browsers give the clipboard to pages on https and on this machine only; elsewhere the old way still works.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
