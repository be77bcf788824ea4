// The server's public API, as every element of the page calls it: addresses below any proxy path, the key, and errors
// in the server's own words.

/** Where the server is: this file is at `<base>ui/own/api.js`. */
export const BASE = new URL("../../", import.meta.url);

const KEY = "beholder.key";
const REFUSALS = [400, 413, 415, 422];
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 4000;
const UNSAID = {
  // Of what stands before the server, which has no words for the visitor: a proxy.
  413: "What was sent is larger than what stands before the server lets through.",
  502: "The server behind this address does not answer. It may be restarting.",
  503: "The server behind this address cannot answer at the moment.",
  504: "The server behind this address took too long to answer.",
};
let kept = ""; // the key, where nothing can be stored
let asking = null; // one question at a time, whoever needs the key

/** What the server refused, or why it could not be reached. `status` 0: no answer at all. */
export class ApiError extends Error {
  constructor({ message, code = "", param = null, status = 0, retryAfterS = null, requestId = "" }) {
    super(message);
    Object.assign(this, { code, param, status, retryAfterS, requestId });
  }

  /** Whether what was sent is at fault: the same again would be refused again. */
  get isRefusal() {
    return REFUSALS.includes(this.status);
  }

  /** Whether the same may go well a little later: there was no answer, or the server had no time or was in trouble. */
  get mayPass() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** The key that the visitor gave in this tab, or "". */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return kept; // storage may be forbidden: it holds until the page is left
  }
}

/** Forgets the key, or takes another. */
export function setKey(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // as above
  }
}

/** An address of the API. */
export const address = (path) => new URL(path.replace(/^\//, ""), BASE);

/**
 * Calls the API. Asks for the key when the server wants one.
 * @param path    such as "/v1/presets"
 * @param options as of fetch; `json` is sent as a JSON body
 * @returns the Response, whose status is 2xx
 * @throws ApiError
 */
export async function call(path, { json, headers = {}, ...options } = {}) {
  for (;;) {
    const sent = { ...headers };
    if (json !== undefined) sent["content-type"] = "application/json";
    if (key()) sent.authorization = `Bearer ${key()}`;
    let response;
    try {
      response = await fetch(address(path), {
        method: json === undefined ? "GET" : "POST",
        body: json === undefined ? undefined : JSON.stringify(json),
        ...options,
        headers: sent,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError({ message: "The server does not answer; it may be restarting." });
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401 || !(await askForKey(error.code === "invalid_api_key" ? error.message : ""))) throw error;
  }
}

/** The JSON body of a call. */
export const get = async (path, options) => (await call(path, options)).json();

/**
 * The same, again and again while there is no server or it cannot: for what the page cannot do without. Never sooner than
 * the server wants it.
 * @param signal AbortSignal of who needs it; without one it never gives up
 */
export async function getAtLast(path, signal) {
  for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    try {
      return await get(path, { signal });
    } catch (error) {
      if (!error.mayPass) throw error;
      await pause(Math.max(pauseMs, 1000 * error.retryAfterS), signal);
    }
  }
}

function pause(ms, signal) {
  signal?.throwIfAborted();
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

/** Reads an error answer. */
export async function errorOf(response) {
  const found = { status: response.status, requestId: response.headers.get("x-request-id") ?? "" };
  const retryAfterS = Number(response.headers.get("retry-after")) || null;
  try {
    const { error } = await response.json();
    return new ApiError({ ...found, retryAfterS, message: error.message, code: error.code ?? "", param: error.param });
  } catch {
    const message = UNSAID[response.status] ?? `The server answered ${response.status}.`;
    return new ApiError({ ...found, retryAfterS, message });
  }
}

/**
 * The events of a streamed answer (server-sent events), as parsed JSON, until `[DONE]`.
 * @throws ApiError also when the stream ends before its end, or tells an error in the middle.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true }; // the connection broke
      });
      if (done) throw new ApiError({ message: "The answer was cut off before its end. Ask again." });
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (!data) continue; // a comment that keeps proxies awake
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError({ status: 200, ...event.error });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A ticket for one WebSocket, or null where no key is needed. */
export async function ticket() {
  if (!key()) return null;
  return (await get("/v1/stream/tickets", { method: "POST" })).ticket;
}

/** Shows a dialog for the key; resolves to whether one was given. @param message what was wrong with the last, or "" */
export function askForKey(message = "") {
  asking ??= new Promise((resolve) => {
    setKey("");
    const dialog = document.createElement("dialog");
    dialog.className = "key-dialog";
    dialog.innerHTML = `
      <form method="dialog">
        <h2>This server wants a key</h2>
        <p></p>
        <label>Key <input type="password" name="key" autocomplete="current-password" required></label>
        <p class="hint">It is kept in this tab only, and forgotten when you close it.</p>
        <div class="row"><button class="button primary" value="ok">Continue</button>
        <button class="button" value="" formnovalidate>Not now</button></div>
      </form>`;
    dialog.querySelector("p").textContent = message || "Whoever runs it knows the key (--api-key).";
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" ? dialog.querySelector("input").value.trim() : "";
      if (given) setKey(given);
      dialog.remove();
      asking = null;
      resolve(Boolean(given));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
