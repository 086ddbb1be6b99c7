// Images beside a message: chosen, pasted or dropped, made small enough to send, shown until they are sent.

import { element } from "./dom.js";

const LONGEST_PX = 1536, QUALITY = 0.9;
// Most models read at most about that many pixels; the gateway's limit for a request is 32 MiB.
const KEPT_BYTES = 1_000_000;

export function pictureBox(list, complain) {
  let chosen = [];
  function show() {
    list.hidden = chosen.length === 0;
    list.replaceChildren(...chosen.map((url, at) => {
      const item = element("li"), remove = element("button", "remove", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove image ${at + 1}`);
      remove.addEventListener("click", () => { chosen.splice(at, 1); show(); });
      item.append(picture(url, `Image ${at + 1} for the next message`), remove);
      return item;
    }));
  }
  return {
    async add(files) {
      for (const file of files) {
        try {
          chosen.push(await encoded(file));
        } catch {
          complain(`The browser can't read ${file.name || "this file"} as an image.`);
        }
      }
      show();
    },
    get count() { return chosen.length; },
    take() { const taken = chosen; chosen = []; show(); return taken; },
    put(urls) { chosen = [...urls]; show(); },
  };
}

export function picture(url, text) {
  const image = element("img");
  image.src = url;
  image.alt = text;
  return image;
}

async function encoded(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_PX / Math.max(bitmap.width, bitmap.height));
  const isFine = scale === 1 && file.size <= KEPT_BYTES && ["image/png", "image/jpeg", "image/webp"].includes(file.type);
  if (isFine) return read(file);
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
