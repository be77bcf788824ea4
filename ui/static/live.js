// <beholder-live>: point a camera, a screen or a file, and read what the model sees, word by word.

import { Announcer } from "./announcer.js";
import { Awake } from "./awake.js";
import { CameraChoice } from "./camera_choice.js";
import { copy } from "./clipboard.js";
import { passFocusOn } from "./focus.js";
import { LiveFigures, figuresOf } from "./live_figures.js";
import { History } from "./live_history.js";
import { actionOf } from "./live_keys.js";
import { markup } from "./live_markup.js";
import { LivePrompt } from "./live_prompt.js";
import { LiveSession } from "./live_session.js";
import { camerasAllowed, openCamera, openFile, openScreen, screensAllowed } from "./live_source.js";
import { Speech } from "./live_speech.js";
import { LiveStrip } from "./live_strip.js";
import { LiveWall } from "./live_wall.js";
import { LiveWords } from "./live_words.js";
import { intake } from "./media.js";
import { PassingWords } from "./passing_words.js";
import { readable } from "./readable.js";
import { sentence } from "./sentences.js";
import { isForPage } from "./shortcuts.js";
import { thumbnailOf } from "./thumbnail.js";
import { watching } from "./watching.js";

const MARKS = { camera: "Camera on", screen: "Screen shared", file: "File open" };
const HIDDEN = "Stopped, because this page was hidden. Nothing looks while you do not.";
const HEIRS = [".live-bar [data-do=snap]", ".live-begin .primary"]; // of the focus

class Live extends HTMLElement {
  #history = new History();
  #speech = new Speech();
  #awake = new Awake();
  #session = null;
  #source = null;
  #opening = null; // AbortController while a camera, screen or file is being opened
  #recording = Promise.resolve(); // one answer after the other comes into the history
  #loading = null; // AbortController while it is in a page

  connectedCallback() {
    if (!this.firstChild) this.#build(); // else it was moved, and is not new
    const { signal } = (this.#loading = new AbortController());
    this.#prompt.load(signal).catch((error) => signal.aborted || this.#warn(error.message));
  }

  disconnectedCallback() {
    this.#loading.abort();
    this.stop();
  }

  #build() {
    this.innerHTML = markup({ secure: camerasAllowed(), screens: screensAllowed() });
    this.#prompt = new LivePrompt(this.#$(".live-prompt"));
    this.#prompt.addEventListener("change", () => {
      this.#words.long = this.#prompt.isLong;
      this.#session?.update();
    });
    this.#words = new LiveWords(this.querySelectorAll(".live-words"), [this.#$(".live-stage"), this.#$(".live-beside")]);
    this.#figures = new LiveFigures(this.#$(".live-figures"));
    const [stage, button, ...guests] = [".live-stage", "[data-do=wall]", ".live-figures", ".live-said"].map((each) => this.#$(each));
    this.#wall = new LiveWall(this, { stage, button, guests });
    this.#strip = new LiveStrip(this.#$(".live-strip"), this.#history, {
      copy: (text) => this.#copy(text),
      onRate: (entry) => {
        const client = this.#session?.client;
        if (client?.sessionId === entry.sessionId) client?.feedback(entry.responseId, entry.rating); // others are forgotten
      },
    });
    this.#cameras = new CameraChoice(this.#$("[name=camera]"), this.#$("[data-do=flip]"));
    this.#announcer = new Announcer(this.#$(".live-aloud"));
    this.#passing = new PassingWords(this.#$(".live-said"));
    this.#listen();
  }

  #prompt;
  #words;
  #wall;
  #figures;
  #strip;
  #cameras;
  #announcer;
  #passing;

  // ---- start and stop ------------------------------------------------------------------------------------------------

  /** @param kind "camera", "screen" or "file" (then with the file) */
  async start(kind, file = null) {
    this.#end(); // another camera: the page stays as it is while that is opened
    this.#warn("");
    const opening = (this.#opening = new AbortController());
    let source;
    try {
      source = await this.#openSource(kind, file, opening.signal);
    } catch (error) {
      if (!opening.signal.aborted) this.stop(error.message);
    }
    if (opening.signal.aborted) return source?.close(); // stopped, or another one was begun
    this.#opening = null;
    if (!source) return;
    this.#source = source;
    this.#begin();
    if (document.hidden && kind !== "screen") this.stop(HIDDEN);
  }

  /** Ends the session and lets go of the camera. */
  stop(why = "") {
    this.#end();
    this.#awake.keep(false);
    watching(this, "");
    this.dataset.phase = "idle";
    if (why) this.#warn(why);
  }

  #end() {
    this.#opening?.abort();
    this.#opening = null;
    const session = this.#session;
    this.#session = null;
    this.#source = null;
    session?.close();
    this.#announcer.stop();
    this.dataset.stale = false;
    this.#$(".live-stale").hidden = true;
  }

  #openSource(kind, file, signal) {
    const [video, image] = [this.#$("video"), this.#$(".live-picture img")];
    if (kind === "file") return openFile(video, image, file, signal);
    if (kind === "screen") return openScreen(video, signal);
    return openCamera(video, { ...this.#cameras.wanted, side: this.#side, signal });
  }

  #begin() {
    const source = this.#source;
    source.onEnded = () => this.stop(source.kind === "screen" ? "Sharing has ended." : "The camera was taken away.");
    this.dataset.source = source.kind;
    this.dataset.phase = "running";
    watching(this, MARKS[source.kind]);
    this.#awake.keep(true);
    this.#$(".live-picture").dataset.still = source.isStill;
    this.#$(".live-mark-words").textContent = MARKS[source.kind];
    this.style.setProperty("--live-ratio", source.width / source.height);
    if (source.kind === "camera") this.#cameras.show(source);
    this.#words.clear();

    const session = new LiveSession(source, {
      settings: (capabilities) => this.#prompt.settings(capabilities),
      side: this.#side,
    });
    this.#session = session;
    const on = (type, listener) => session.addEventListener(type, ({ detail }) => listener(detail));
    on("state", ({ state, message }) => this.#onState(session, state, message));
    on("words", ({ text, ageMs }) => this.#onWords(text, ageMs));
    on("done", (detail) => this.#onDone(detail));
    on("stats", ({ event, skipped }) => this.#figures.frames(event, skipped));
    on("refused", ({ message }) => this.#warn(message));
    on("accepted", () => this.#warn(""));
    on("stale", ({ message }) => {
      this.dataset.stale = Boolean(message);
      this.#$(".live-stale").hidden = !message;
      this.#$(".live-stale").textContent = message;
    });
    session.run();
    const { activeElement } = document;
    const isNowhere = activeElement === document.body || this.#$(".live-begin").contains(activeElement);
    if (isNowhere) this.#$(HEIRS[0]).focus({ preventScroll: true }); // the start buttons are gone; space looks now
  }

  #onState(session, state, message) {
    if (session !== this.#session) return;
    this.dataset.link = state;
    this.#$(".live-link").textContent = message;
    if (state === "live") this.#warn("");
    if (state === "ended") this.stop(message);
  }

  // ---- words ---------------------------------------------------------------------------------------------------------

  #onWords(text, ageMs) {
    if (ageMs !== null) this.#figures.age(ageMs);
    this.#words.grow(text);
  }

  #onDone({ event, ageMs, blob, capturedMs, asked }) {
    if (event.status === "failed") return this.#warn(event.error?.message ?? "The answer failed.");
    if (event.status === "cancelled" || !event.text.trim()) return;
    const words = readable(event.text);
    this.#words.show(words);
    this.#announcer.say(words);
    const figures = figuresOf(event, ageMs ?? event.frame_age_ms);
    this.#figures.response(figures);
    this.#speech.say(words);
    const capturedAt = capturedMs === null ? Date.now() : Date.now() - (performance.now() - capturedMs);
    const [prompt, model] = [this.#prompt.wordsOf(asked), this.#session?.model ?? ""];
    const sessionId = this.#session?.client.sessionId ?? "";
    const { text, response_id: responseId } = event;
    const answer = { text, shown: words, prompt, model, responseId, sessionId, capturedAt, figures };
    const record = () => this.#record(answer, blob);
    this.#recording = this.#recording.then(record).catch((error) => console.error("An answer could not be kept.", error));
  }

  async #record(answer, blob) {
    const { entry, isNew } = this.#history.add({ ...answer, thumbnail: blob ? await thumbnailOf(blob) : "" });
    this.#strip.show(entry, isNew);
  }

  // ---- what the visitor does -----------------------------------------------------------------------------------------

  #listen() {
    this.addEventListener("click", (event) => {
      const action = event.target.closest("[data-do]")?.dataset.do;
      if (action) this.#do(action);
    });
    intake(this, this.#$("[name=file]"), ([file]) => file && this.start("file", file));
    this.#$("[name=camera]").addEventListener("change", () => this.#source?.kind === "camera" && this.start("camera"));
    this.#$("[name=side]").addEventListener("change", () => {
      if (this.#source?.kind === "camera") this.start("camera");
      else this.#session?.resize(this.#side);
    });
    for (const name of ["mirror", "over", "numbers"]) {
      const box = this.#$(`[name=${name}]`);
      const apply = () => (this.dataset[name] = box.checked);
      box.addEventListener("change", apply);
      apply();
    }
    this.#$("[name=aloud]").addEventListener("change", ({ target }) => this.#readAloud(target.checked));
    this.#$("[name=aloud]").disabled = Boolean(this.#speech.missing);
    document.addEventListener("keydown", this.#onKey);
    document.addEventListener("visibilitychange", () => {
      // Somebody who shares a screen is looking at something else, that is what sharing is for.
      if (document.hidden && this.#session && this.#source.kind !== "screen") {
        this.stop(HIDDEN);
      }
    });
    addEventListener("pagehide", () => this.stop());
    passFocusOn(this, HEIRS);
    this.dataset.phase = "idle";
  }

  #do(action) {
    const does = {
      camera: () => this.start("camera"),
      screen: () => this.start("screen"),
      file: () => this.#$("[name=file]").click(),
      stop: () => this.stop(),
      snap: () => this.#session?.snap(),
      flip: () => (this.#cameras.flip(), this.start("camera")),
      mirror: () => this.#toggle("mirror"),
      aloud: () => this.#toggle("aloud"),
      wall: () => this.#wall.set(!this.#wall.on),
      copy: () => this.#words.text && this.#copy(this.#words.text),
      numbers: () => (this.#wall.on ? this.#wall.toggleNumbers() : this.#toggle("numbers")),
    };
    does[action]();
  }

  #onKey = (event) => {
    if (!this.checkVisibility() || !isForPage(event)) return;
    this.#wall.wake();
    if (event.key === "Escape" && this.#wall.on) return this.#wall.set(false);
    const action = actionOf(event, Boolean(this.#session ?? this.#opening));
    if (!action) return;
    event.preventDefault();
    this.#do(action);
  };

  #toggle(name) {
    const box = this.#$(`[name=${name}]`);
    if (box.disabled) return;
    box.checked = !box.checked;
    box.dispatchEvent(new Event("change"));
  }

  async #readAloud(on) {
    this.#speech.set(on);
    this.#$("[data-do=aloud]").setAttribute("aria-pressed", on);
    if (on && !(await this.#speech.hasVoice())) this.#passing.say("This device has no voice of its own to read with.");
  }

  async #copy(text) {
    this.#passing.say((await copy(text)) ? "Copied" : "The browser did not let it be copied.");
  }

  get #side() {
    return Number(this.#$("[name=side]").value);
  }

  #warn(message) {
    const place = this.#$(".live-warning");
    place.hidden = !message;
    place.textContent = sentence(message);
  }

  #$(selector) {
    return this.querySelector(selector);
  }
}

customElements.define("beholder-live", Live);
