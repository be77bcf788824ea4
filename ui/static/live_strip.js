// The strip of what was said: thumbnail, time, words; copy, star, thumbs; and the way out as files.

import { icon } from "./icons.js";
import { csv, download, jsonl, vtt } from "./live_export.js";

const SHOWN = 60; // the rest is in the exports
const NEAR = 24; // may be in sight, and are seen to move
const POINTED = matchMedia("(hover: hover)").matches ? ":hover, " : ""; // a finger leaves no trace of having gone
const HELD = `${POINTED}:focus-visible, :has(:focus-visible)`;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const FILES = {
  jsonl: [jsonl, "application/jsonl"],
  csv: [csv, "text/csv"],
  vtt: [vtt, "text/vtt"],
};

/** Shows a History. `onRate(entry)` is called when somebody rates, `copy(text)` to copy. */
export class LiveStrip {
  #root;
  #history;
  #cards = new Map();
  #onRate;
  #copy;
  #isBehind = false; // cards came in unseen, because those that are seen were pointed at

  constructor(root, history, { onRate, copy }) {
    this.#root = root;
    this.#history = history;
    this.#onRate = onRate;
    this.#copy = copy;
    root.innerHTML = `
      <header class="strip-head">
        <h2>So far</h2><p class="strip-count"></p>
        <div class="strip-files">
          <label class="strip-starred"><input type="checkbox"> starred only</label>
          ${Object.keys(FILES)
            .map((kind) => `<button type="button" class="button quiet" data-file="${kind}">${icon("save")}${
              { jsonl: "JSONL", csv: "CSV", vtt: "WebVTT" }[kind]
            }</button>`)
            .join("")}
          <button type="button" class="button quiet" data-clear>Clear</button>
        </div>
      </header>
      <ol class="strip-cards" tabindex="0" aria-label="What was said, newest first"></ol>`;
    root.addEventListener("click", (event) => this.#onClick(event));
    for (const name of ["pointerleave", "focusout"]) this.#list.addEventListener(name, () => setTimeout(() => this.#letGo()));
    this.#showCount();
  }

  /** An entry is new, or lasted longer. */
  show(entry, isNew) {
    if (isNew || !this.#cards.has(entry.id)) {
      const card = this.#card(entry);
      this.#cards.set(entry.id, card);
      this.#bring(card);
      while (this.#list.children.length > SHOWN) {
        this.#cards.delete(Number(this.#list.lastElementChild.dataset.id));
        this.#list.lastElementChild.remove();
      }
    }
    const card = this.#cards.get(entry.id);
    card.querySelector("img").src = entry.thumbnail;
    card.querySelector("time").textContent = clock(entry.firstAt) + (entry.times > 1 ? ` · ${entry.times}×` : "");
    this.#showCount();
  }

  // A new card pushes the others aside, so that nothing jumps. Those that somebody reads or points at stay where they are.
  #bring(card) {
    const list = this.#list;
    const newest = list.firstElementChild;
    const before = newest?.offsetLeft;
    list.prepend(card);
    if (!newest) return;
    const moved = newest.offsetLeft - before;
    const isHeld = list.matches(HELD);
    if (isHeld || list.scrollLeft > 0) {
      this.#isBehind ||= isHeld && list.scrollLeft === 0;
      list.scrollLeft += moved;
    } else if (!STILL.matches) {
      const slide = { transform: [`translateX(${-moved}px)`, "none"] };
      for (const each of [...list.children].slice(1, NEAR)) each.animate(slide, { duration: 300, easing: "ease-out" });
    }
  }

  #letGo() {
    if (!this.#isBehind || this.#list.matches(HELD)) return;
    this.#isBehind = false;
    this.#list.scrollLeft = 0; // at once: a card that comes would end a smooth way there
  }

  get #list() {
    return this.#root.querySelector(".strip-cards");
  }

  #card(entry) {
    const card = document.createElement("li");
    card.className = "strip-card";
    card.dataset.id = entry.id;
    card.innerHTML = `
      <img alt="" width="160" height="120">
      <p class="strip-about"><time datetime="${new Date(entry.firstAt).toISOString()}"></time></p>
      <p class="strip-words" dir="auto"></p>
      <p class="strip-does">
        <button type="button" class="button quiet round" data-card="copy" aria-label="Copy">${icon("copy")}</button>
        <button type="button" class="button quiet round" data-card="star" aria-label="Star" aria-pressed="false">${icon("star")}</button>
        <button type="button" class="button quiet round" data-card="up" aria-label="Good" aria-pressed="false">${icon("up")}</button>
        <button type="button" class="button quiet round" data-card="down" aria-label="Not good" aria-pressed="false">${icon("down")}</button>
      </p>`;
    card.querySelector(".strip-words").textContent = entry.shown;
    card.querySelector(".strip-words").title = entry.shown;
    return card;
  }

  #onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const { file } = button.dataset;
    if (file) return this.#save(file);
    if ("clear" in button.dataset) {
      this.#history.clear();
      this.#cards.clear();
      this.#list.replaceChildren();
      return this.#showCount();
    }
    const entry = this.#history.find(Number(button.closest("li").dataset.id));
    if (!entry) return;
    const action = button.dataset.card;
    if (action === "copy") return this.#copy(entry.shown);
    if (action === "star") entry.starred = !entry.starred;
    if (action === "up" || action === "down") {
      entry.rating = entry.rating === action ? null : action;
      if (entry.rating) this.#onRate(entry);
    }
    const card = this.#cards.get(entry.id);
    for (const [name, on] of [["star", entry.starred], ["up", entry.rating === "up"], ["down", entry.rating === "down"]]) {
      card.querySelector(`[data-card="${name}"]`).setAttribute("aria-pressed", on);
    }
    this.#showCount();
  }

  #save(kind) {
    const starredOnly = this.#root.querySelector(".strip-starred input").checked;
    const entries = this.#history.entries.filter((entry) => entry.starred || !starredOnly);
    const [make, type] = FILES[kind];
    const name = `beholder-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${kind}`;
    download(name, make(entries), type);
  }

  #showCount() {
    const { entries } = this.#history;
    this.#root.hidden = entries.length === 0;
    const shown = Math.min(entries.length, SHOWN);
    this.#root.querySelector(".strip-count").textContent =
      shown < entries.length ? `the newest ${shown} of ${entries.length}` : `${shown}`;
    this.#root.querySelector(".strip-starred").hidden = !entries.some(({ starred }) => starred);
  }
}

const clock = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
