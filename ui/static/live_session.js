// A live session: takes pictures from a source, sends them at a pace that the server and the network can use, and tells
// what is said about which picture. Knows no page; ends when it is closed.

import { StreamClient } from "./stream_client.js";

const MOST_FPS = 10;
const LEAST_FPS = { on_change: 5, continuous: 4, interval: 3 };
const KEPT = 64; // sent pictures that a response may still name
const STALE_MS = 3000;
const FROZEN_MS = 2500;
const LOOK_EVERY_MS = 500;

/**
 * Events, all CustomEvents:
 *   state  {state, message}                      of the connection, see StreamClient
 *   begin  {responseId, blob, capturedMs}        a response begins; blob is the picture it looks at, or null
 *   words  {text, ageMs}                         the text so far; ageMs with the first words
 *   done   {event, ageMs, blob, capturedMs, asked} `response.done`; asked: {prompt, preset} that it answers, either or null
 *   stats  {event, skipped}                      `frames.stats`
 *   refused {message}                            an error of the server's, in its words
 *   accepted {}                                  the settings hold
 *   stale  {message}                             the words are about an old picture, or none come; "" when all is well
 */
export class LiveSession extends EventTarget {
  #source;
  #side;
  #mode;
  #settings; // a function of the capabilities
  #sent = new Map();
  #running = null; // of the response: {responseId, blob, capturedMs, text, ageMs}
  #open = true;
  #watching = null;
  #fps = MOST_FPS;
  #counts = null; // of the last statistics: {captioned, unchanged, atMs}
  #confirmedMs = 0; // when the newest picture was last known to be described by the words
  #stale = "";
  #asked = { prompt: null, preset: null };
  model = "";
  client;

  /**
   * @param source   a LiveSource
   * @param settings function: capabilities → fields of `session.update`
   * @param side     longer side of what is sent, in pixels
   */
  constructor(source, { settings, side }) {
    super();
    this.#source = source;
    this.#side = side;
    this.#settings = settings;
    const first = settings(null);
    this.#mode = first.trigger.mode;
    this.client = new StreamClient(first);
    this.#hear();
  }

  /** Until it is closed, or the server refuses it. */
  async run() {
    this.#watching = setInterval(() => this.#look(), LOOK_EVERY_MS);
    const sending = this.#send();
    try {
      await this.client.run();
    } finally {
      this.close();
      await sending;
    }
  }

  /** Lets go of everything, the source too. */
  close() {
    if (!this.#open) return;
    this.#open = false;
    clearInterval(this.#watching);
    this.client.close();
    this.#source.close();
    this.#sent.clear();
  }

  /** The settings have changed. */
  update() {
    const settings = this.#settings(this.client.capabilities);
    this.#mode = settings.trigger.mode;
    this.client.update(settings);
  }

  /** How large pictures are sent from now on. */
  resize(side) {
    this.#side = side;
  }

  /** Looks now, whatever the mode. */
  async snap() {
    const id = await this.#sendOne();
    if (id !== null) this.client.ask({ frame_ids: [id] });
  }

  async #send() {
    while (this.#open) {
      const began = performance.now();
      await this.#source.next();
      if (!this.#open) return;
      if (this.#mode !== "manual" && this.client.ready) await this.#sendOne();
      else if (this.#mode !== "manual" && this.client.state === "live") this.client.skipped += 1;
      const left = 1000 / this.#fps - (performance.now() - began);
      await new Promise((resolve) => setTimeout(resolve, Math.max(left, 1)));
    }
  }

  async #sendOne() {
    const taken = await this.#source.capture(this.#side);
    if (!taken || !this.#open) return null;
    const id = this.client.frame(taken.blob, taken.capturedMs);
    if (id === null) return null;
    this.#sent.set(id, taken);
    if (this.#sent.size > KEPT) this.#sent.delete(this.#sent.keys().next().value);
    return id;
  }

  #hear() {
    const on = (type, listener) => this.client.addEventListener(type, ({ detail }) => this.#open && listener(detail));
    on("state", (state) => {
      if (state.state === "lost") this.#running = null;
      this.#tell("state", state);
    });
    on("session.created", () => {
      this.#counts = null;
      this.client.settle(this.#settings(this.client.capabilities)); // now it is known what the server offers
    });
    for (const type of ["session.created", "session.updated", "session.resync_required"]) {
      on(type, ({ session }) => {
        this.model = session.model;
        this.#asked = { prompt: session.prompt ?? null, preset: session.preset ?? null };
        if (type === "session.updated") this.#tell("accepted", {});
      });
    }
    on("response.created", ({ response_id: responseId, frame_ids: ids }) => {
      const { blob = null, capturedMs = null } = this.#sent.get(ids.at(-1)) ?? {};
      this.#running = { responseId, blob, capturedMs, asked: this.#asked, text: "", ageMs: null };
      this.#tell("begin", this.#running);
    });
    on("response.output_text.delta", ({ response_id: responseId, delta }) => {
      const running = this.#running;
      if (running?.responseId !== responseId) return;
      if (running.text === "" && running.capturedMs !== null) {
        running.ageMs = performance.now() - running.capturedMs;
        this.#confirmedMs = Math.max(this.#confirmedMs, running.capturedMs);
      }
      running.text += delta;
      this.#tell("words", running);
    });
    on("response.done", (event) => {
      const running = this.#running?.responseId === event.response_id ? this.#running : {};
      this.#running = null;
      this.#tell("done", { event, ageMs: null, blob: null, capturedMs: null, asked: this.#asked, ...running });
    });
    on("frames.stats", (event) => {
      this.#pace(event);
      this.#tell("stats", { event, skipped: this.client.skipped });
    });
    on("error", ({ error }) => this.#tell("refused", error));
  }

  // Twice as many pictures as are looked at keep the newest one young; more would only be dropped.
  #pace({ captioned, dropped, pending }) {
    const now = performance.now();
    const unchanged = dropped.unchanged ?? 0;
    const before = this.#counts;
    this.#counts = { captioned, unchanged, atMs: now };
    if (!before) return;
    if (unchanged > before.unchanged && pending === 0) this.#confirmedMs = now; // the words still hold
    const captionedPerS = ((captioned - before.captioned) * 1000) / Math.max(now - before.atMs, 1);
    const most = Math.min(MOST_FPS, (this.client.limits?.max_fps ?? MOST_FPS) * 0.9);
    this.#fps = Math.min(most, Math.max(LEAST_FPS[this.#mode] ?? 1, 2 * captionedPerS + 2));
  }

  #look() {
    const now = performance.now();
    let message = "";
    if (this.#source.tellsFrames && !document.hidden && now - this.#source.newestMs > FROZEN_MS) {
      message = `No new picture for ${Math.round((now - this.#source.newestMs) / 1000)} s`;
    } else if (this.#mode !== "manual" && this.#confirmedMs > 0) {
      const wait = STALE_MS + (this.client.settings.trigger?.interval_ms ?? 0);
      const old = now - this.#confirmedMs;
      if (old > wait) message = `These words are ${Math.round(old / 1000)} s old`;
    }
    if (message !== this.#stale) this.#tell("stale", { message });
    this.#stale = message;
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
