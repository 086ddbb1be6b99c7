// Keeps chats in this browser. Where the browser has no database for pages (some private windows), until the page closes.

const DATABASE = "fusionai", STORE = "chats", TITLE_CHARACTERS = 60;

export function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", at: 0, model: "", turns: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0] || "Image";
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}

export async function openChats() {
  try {
    return inDatabase(await opened());
  } catch {
    return inMemory();
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function inDatabase(database) {
  const run = (mode, work) => new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
  return {
    isKept: true,
    all: async () => (await run("readonly", (store) => store.getAll())).sort((one, other) => other.at - one.at),
    put: (chat) => run("readwrite", (store) => store.put(chat)),
    remove: (id) => run("readwrite", (store) => store.delete(id)),
    clear: () => run("readwrite", (store) => store.clear()),
  };
}

function inMemory() {
  const chats = new Map();
  return {
    isKept: false,
    all: async () => [...chats.values()].sort((one, other) => other.at - one.at),
    put: async (chat) => { chats.set(chat.id, structuredClone(chat)); },
    remove: async (id) => { chats.delete(id); },
    clear: async () => { chats.clear(); },
  };
}
