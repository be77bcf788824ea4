// The tab Picture: pictures and clips on the left, what is said about them on the right.

import { getAtLast } from "./api.js";
import { Conversation } from "./conversation.js";
import { passFocusOn } from "./focus.js";
import { Medium, intake } from "./media.js";
import { ownView } from "./own_view.js";
import { MARKUP } from "./picture_markup.js";
import { drawStrip } from "./picture_strip.js";
import { showSeen } from "./seen.js";
import { Reader, sentence } from "./sentences.js";
import { TurnView } from "./turn_view.js";

const QUESTIONS = ["one_line", "describe", "read_text"]; // presets that are plain questions, offered as such
const DESCRIBE = { picture: "Describe the picture.", pictures: "Describe the pictures.", clip: "Describe the video." };

const NARROW = matchMedia("(max-width: 60rem)"); // as in the style sheet: pictures above, conversation below

class Picture extends HTMLElement {
  #media = [];
  #pending = []; // shown and not asked about yet
  #shown = null;
  #conversation = null;
  #views = new Map();
  #stopIntake = null;
  #stopFocus = null;
  #connected = null; // AbortController while it is in a page
  #reader = null;

  connectedCallback() {
    const { signal } = (this.#connected = new AbortController());
    this.innerHTML = MARKUP;
    this.#reader = new Reader(this.querySelector("[aria-live]"));
    const files = this.querySelector(".picture-files");
    this.#stopIntake = intake(this, files, (taken) => this.#take(taken));
    this.#on(".picture-choose", "click", () => files.click());
    this.#on(".picture-new", "click", () => this.#begin());
    this.#on(".picture-refused button", "click", () => this.#complain(""));
    this.#on(".picture-stop", "click", () => this.#conversation.stop());
    this.#on(".picture-bar", "change", () => this.#show());
    this.#on(".picture-ask", "submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#on("textarea", "keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.#conversation.stop(), { signal });
    addEventListener("pagehide", this.#leave, { signal });
    this.#stopFocus = passFocusOn(this, [".picture-stop", ".picture-send", ".picture-choose"]);
    this.#begin();
    this.#offerQuestions(signal);
  }

  disconnectedCallback() {
    this.#connected.abort();
    this.#stopIntake?.();
    this.#stopFocus?.();
    this.#conversation?.stop();
    this.#leave();
  }

  #leave = () => this.#media.forEach((medium) => medium.leave());

  #on(selector, name, listener) {
    this.querySelector(selector).addEventListener(name, listener);
  }

  // ---- pictures ------------------------------------------------------------------------------------------------------

  #begin() {
    this.#conversation?.stop();
    this.#media.forEach((medium) => medium.close());
    [this.#media, this.#pending, this.#shown] = [[], [], null];
    this.#views.clear();
    const conversation = (this.#conversation = new Conversation());
    const on = (type, listener) =>
      conversation.addEventListener(type, ({ detail }) => conversation === this.#conversation && listener(detail));
    on("change", ({ turn }) => this.#onChange(turn));
    on("refused", ({ turn, medium, error }) => {
      if (Object.values(DESCRIBE).includes(turn.question)) turn.question = describe(turn.media);
      this.#refuse(medium, error);
    });
    on("withdrawn", ({ turn }) => this.#onWithdrawn(turn));
    this.#complain("");
    this.querySelector(".picture-turns").replaceChildren();
    this.querySelector('[value="own"]').checked = true;
    this.#showRunning();
    this.#lay();
  }

  #take(files) {
    if (!files.length) return;
    this.#complain("");
    const first = !this.#media.length;
    const added = files.map((file) => new Medium(file));
    this.#media.push(...added);
    this.#pending.push(...added);
    this.#shown = added[0];
    this.#lay();
    if (first) this.#describe();
    else this.querySelector("textarea").focus();
  }

  #remove(medium) {
    this.#media = this.#media.filter((other) => other !== medium);
    this.#pending = this.#pending.filter((other) => other !== medium);
    medium.close();
    if (this.#shown === medium) this.#shown = this.#media.at(-1) ?? null;
    this.#lay();
    this.#updateTurns(); // their numbers
  }

  // The server cannot read it: it goes, and its words stay until something else is shown.
  #refuse(medium, { message }) {
    if (!this.#media.includes(medium)) return;
    this.#remove(medium);
    const before = this.querySelector(".picture-refused p").textContent;
    this.#complain([before, medium.name ? `${medium.name}: ${message}` : sentence(message)].filter(Boolean).join("\n"));
  }

  #complain(words) {
    const place = this.querySelector(".picture-refused");
    place.hidden = !words;
    place.querySelector("p").textContent = words;
  }

  #lay() {
    const filled = Boolean(this.#media.length);
    this.querySelector(".picture-empty").hidden = filled;
    this.querySelector(".picture-filled").hidden = !filled;
    this.querySelector(".picture-talk").hidden = !filled;
    this.firstElementChild.classList.toggle("filled", filled);
    if (filled) this.#show();
  }

  async #show() {
    const medium = this.#shown;
    const seen = this.querySelector('[value="seen"]').checked;
    const stage = this.querySelector(".picture-stage");
    const detail = this.querySelector(".picture-detail");
    detail.hidden = !seen || medium.isClip;
    const select = detail.querySelector("select");
    if (stage.medium === medium) medium.detail = select.value;
    else select.value = medium.detail;
    this.#listMedia();
    if (!seen && (stage.medium !== medium || stage.dataset.view !== "own")) stage.replaceChildren(ownView(medium));
    stage.medium = medium;
    stage.dataset.view = seen ? "seen" : "own";
    if (seen) stage.tabIndex = 0; // tiles and frames may be more than it has room for
    else stage.removeAttribute("tabindex");
    const numbers = this.querySelector(".picture-numbers");
    if (!medium.tokens) numbers.textContent = "The server is looking at it …";
    numbers.classList.remove("bad");
    try {
      const preview = await medium.preview();
      if (this.#shown !== medium) return;
      const stillSeen = stage.dataset.view === "seen";
      const said = showSeen(stillSeen ? stage : document.createElement("div"), preview);
      numbers.textContent = `${said} ${cacheNote(medium)}`;
    } catch (error) {
      if (error.isRefusal && this.#pending.includes(medium)) return this.#refuse(medium, error);
      if (this.#shown !== medium) return;
      if (seen) stage.replaceChildren();
      numbers.textContent = sentence(error.message);
      numbers.classList.add("bad");
    }
  }

  #listMedia() {
    drawStrip(this.querySelector(".picture-strip"), {
      media: this.#media,
      shown: this.#shown,
      removable: this.#pending,
      onShow: (medium) => {
        this.#shown = medium;
        this.#show();
      },
      onRemove: (medium) => this.#remove(medium),
      onAdd: () => this.querySelector(".picture-files").click(),
    });
  }

  // ---- the conversation ----------------------------------------------------------------------------------------------

  #describe() {
    this.#send(describe(this.#pending));
  }

  #ask() {
    const field = this.querySelector("textarea");
    const question = field.value.trim();
    if (this.#conversation.running) return;
    if (!question) {
      if (this.#pending.length) this.#describe();
      else field.focus();
      return;
    }
    field.value = "";
    this.#send(question);
  }

  #send(question) {
    const media = this.#pending;
    this.#pending = [];
    this.#reader.begin();
    this.#conversation.ask(question, media);
    this.#listMedia();
  }

  #onChange(turn) {
    let view = this.#views.get(turn);
    const turns = this.querySelector(".picture-turns");
    if (!view) {
      view = new TurnView(turn, (medium) => this.#media.indexOf(medium) + 1, () => this.#again());
      this.#views.set(turn, view);
      turns.append(view.element);
    }
    const isNew = view.element.dataset.state === undefined;
    const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 80;
    const running = this.#conversation.running;
    this.#updateTurns();
    if (isNew || atEnd) turns.scrollTo(0, turns.scrollHeight);
    if ((isNew || !running) && NARROW.matches) view.element.scrollIntoView({ block: "end" });
    this.#showRunning();
    this.#reader.hear(turn.error ? sentence(turn.error.message) : turn.answer, !running);
    if (turn.state === "done") this.#show(); // tells what was cached
  }

  #updateTurns() {
    const { turns, running } = this.#conversation;
    const several = this.#media.length > 1;
    for (const [turn, view] of this.#views) view.update(turn === turns.at(-1) && !running, several);
  }

  // What was asked about it stands in the field again, for another picture.
  #onWithdrawn(turn) {
    this.#views.get(turn)?.element.remove();
    this.#views.delete(turn);
    this.#updateTurns();
    const field = this.querySelector("textarea");
    if (!Object.values(DESCRIBE).includes(turn.question)) field.value ||= turn.question;
    this.#showRunning();
    this.#lay();
  }

  #showRunning() {
    const running = Boolean(this.#conversation.running);
    this.querySelector(".picture-send").hidden = running;
    this.querySelector(".picture-stop").hidden = !running;
  }

  #again() {
    this.#reader.begin();
    this.#conversation.again();
  }

  async #offerQuestions(signal) {
    const presets = await getAtLast("/v1/presets", signal).then(
      ({ data }) => data,
      () => [],
    );
    if (signal.aborted) return; // whoever puts it into a page again offers them anew
    const offered = QUESTIONS.map((id) => presets.find((preset) => preset.id === id)).filter(Boolean);
    this.querySelector(".picture-questions").append(
      ...offered.map(({ title, prompt }) => {
        const chip = Object.assign(document.createElement("button"), { type: "button", textContent: title });
        chip.className = "button picture-chip";
        chip.title = prompt;
        chip.addEventListener("click", () => this.#conversation.running || this.#send(prompt));
        return chip;
      }),
    );
  }
}

function describe(media) {
  if (media.some((medium) => medium.isClip)) return DESCRIBE.clip;
  return media.length > 1 ? DESCRIBE.pictures : DESCRIBE.picture;
}

function cacheNote({ cached }) {
  if (!cached) return "";
  if (cached.tokens === cached.of) return "In the last answer all of them came from the cache.";
  if (!cached.tokens) return "In the last answer none of them came from the cache.";
  return `In the last answer ${cached.tokens} of them came from the cache.`;
}

customElements.define("beholder-picture", Picture);
