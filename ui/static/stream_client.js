// A live session over `vlm.stream.v1` (docs/protocol.md) that outlives its connections: it comes back with
// `session.resume`, and with a new session when the server has forgotten the old one. Knows no page.

import { address, askForKey, key, ticket } from "./api.js";

const PROTOCOL = "vlm.stream.v1";
const MAX_BUFFERED = 256 * 1024; // an old frame in the network's queue is worse than none
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4000;
const PING_EVERY_MS = 15_000;
const OPENINGS = ["session.created", "session.resumed", "session.resync_required"];

/**
 * Events, all CustomEvents:
 *   state  detail {state, message}: connecting, live, lost (coming back by itself), ended (will not)
 *   event  detail: every event of the server's, of which each is also sent under its own type
 */
export class StreamClient extends EventTarget {
  #settings;
  #socket = null;
  #session = null; // {id, token, seq}
  #over = false;
  #pausing = null;
  #failure = null;
  #nextId = 0;
  #pings = null;
  state = "new";
  skipped = 0; // frames that the network was too slow for
  limits = null;
  capabilities = null;

  /** @param settings of the session, section 4 of the protocol */
  constructor(settings = {}) {
    super();
    this.#settings = settings;
  }

  /** Connects, and stays connected until `close`. Resolves when it has ended. */
  async run() {
    this.#pings = setInterval(() => this.#say({ type: "ping", t: performance.now() }), PING_EVERY_MS);
    let pause = FIRST_PAUSE_MS;
    this.#tell("connecting", "Connecting …");
    try {
      while (!this.#over) {
        const { code, reason, wasLive } = await this.#connection();
        if (wasLive) pause = FIRST_PAUSE_MS;
        if (this.#over || code === 1000) break;
        if (code === 4401 && (await askForKey(key() ? reason : ""))) continue;
        if (code === 4401 || code === 4409 || (this.#failure && ![4404, 1013].includes(code))) {
          this.#tell("ended", this.#failure?.message ?? reason ?? `The connection was closed (${code}).`);
          return;
        }
        this.#tell("lost", this.#whyLost(code));
        await this.#wait(pause);
        pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
      }
    } finally {
      clearInterval(this.#pings);
      this.#socket?.close(1000);
      this.#socket = null;
      this.#over = true;
    }
    this.#tell("ended", "");
  }

  /** Whether a frame sent now would leave at once. */
  get ready() {
    return this.state === "live" && this.#isOpen && this.#socket.bufferedAmount < MAX_BUFFERED;
  }

  /** Which session this is, for as long as the server knows it; "" before there is one. */
  get sessionId() {
    return this.#session?.id ?? "";
  }

  /** What was last asked of the server. */
  get settings() {
    return this.#settings;
  }

  /** Changes settings of this session and of those that may follow it. */
  update(settings) {
    this.settle(settings);
    this.#say({ type: "session.update", event_id: `update-${++this.#nextId}`, session: settings });
  }

  /** The same, said when the session begins: for listeners of `session.created`. */
  settle(settings) {
    this.#settings = { ...this.#settings, ...settings };
  }

  /**
   * Sends a picture; its id, or null when it was skipped because the network is slow or gone.
   * @param blob       JPEG, PNG, WebP …
   * @param capturedMs performance.now() when it was taken
   */
  frame(blob, capturedMs = performance.now(), kind = "frame") {
    if (!this.ready) {
      this.skipped += 1;
      return null;
    }
    const id = ++this.#nextId;
    const header = new TextEncoder().encode(JSON.stringify({ k: kind, id, ts: capturedMs }));
    const length = new Uint8Array([header.length >> 8, header.length & 255]);
    this.#socket.send(new Blob([length, header, blob]));
    return id;
  }

  /** Asks now: `prompt`, `frame_ids`, `metadata` … */
  ask(response = {}) {
    this.#say({ type: "response.create", response });
  }

  /** Ends the running response. */
  cancel() {
    this.#say({ type: "response.cancel" });
  }

  /** What a person thought of a response: "up" or "down". */
  feedback(responseId, rating) {
    this.#say({ type: "feedback.create", response_id: responseId, rating });
  }

  /** Ends the session at once. */
  close() {
    this.#over = true;
    this.#pausing?.();
    this.#socket?.close(1000);
  }

  /** A socket that is closing takes nothing, and its session is live until it is told. */
  get #isOpen() {
    return this.#socket?.readyState === WebSocket.OPEN;
  }

  #tell(state, message) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { state, message } }));
  }

  #say(event) {
    if (this.#isOpen) this.#socket.send(JSON.stringify(event));
  }

  #whyLost(code) {
    if (!navigator.onLine) return "This device has no network. It goes on by itself when there is one.";
    if (code === 1001 || code === 1012) return "The server is shutting down or restarting. It goes on by itself.";
    if (code === 1013) return `${this.#failure?.message ?? "The server is full."} Trying again …`;
    if (code === 4408) return "The connection was idle for long. Connecting again …";
    return "The server does not answer; it may be restarting. It goes on by itself when it is back.";
  }

  #wait(pause) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, pause);
      const now = () => (clearTimeout(timer), resolve());
      this.#pausing = now;
      addEventListener("online", now, { once: true });
    });
  }

  // One connection, from its opening to its close.
  async #connection() {
    let pass = null;
    this.#failure = null;
    try {
      pass = await ticket();
    } catch (error) {
      if (error.status === 401) this.#failure = error; // the visitor was asked for the key and gave none
      return { code: error.status === 401 ? 4403 : 1006, reason: error.message, wasLive: false };
    }
    const url = address("/v1/stream");
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, pass ? [PROTOCOL, `vlm.ticket.${pass}`] : [PROTOCOL]);
    this.#socket = socket;
    let live = false;
    return new Promise((resolve) => {
      socket.onopen = () => {
        if (!this.#session) return;
        const { id, token, seq } = this.#session;
        this.#say({ type: "session.resume", session_id: id, resume_token: token, last_seq: seq });
      };
      socket.onmessage = ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === "session.created" && !this.#session) {
          this.#session = { id: event.session_id, token: event.resume_token, seq: 0 };
          [this.limits, this.capabilities] = [event.limits, event.capabilities];
          live = true;
        } else if (event.type === "session.resumed" || event.type === "session.resync_required") {
          live = true;
          if (event.next_seq) this.#session.seq = event.next_seq - 1;
        } else if (!live && event.type !== "error") {
          return; // of the session that a resumed one replaces
        }
        if (live && event.seq) this.#session.seq = event.seq;
        if (live && this.state !== "live") this.#tell("live", "");
        if (event.type === "error" && event.error.fatal) this.#failure = event.error;
        this.dispatchEvent(new CustomEvent("event", { detail: event }));
        this.dispatchEvent(new CustomEvent(event.type, { detail: event }));
        if (OPENINGS.includes(event.type)) {
          this.#say({ type: "session.update", event_id: "settings", session: this.#settings });
        }
      };
      socket.onclose = ({ code, reason }) => {
        if (this.#socket === socket) this.#socket = null;
        if ([4404, 4408, 4410].includes(code)) {
          this.#session = null; // begin another one
          this.#failure = null;
        }
        resolve({ code, reason, wasLive: live });
      };
    });
  }
}
