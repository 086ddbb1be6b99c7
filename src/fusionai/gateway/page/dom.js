// Elements of a page, for all pages. Text only ever becomes text nodes.

export const place = (id) => document.getElementById(id);

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Changes only text that differs, because a screen reader announces every change.
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
