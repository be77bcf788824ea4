// What a screen reader hears of a live picture: finished captions only, never twice the same, and not so often that
// nothing else can be heard. A newer one takes the place of one that waits.

const PAUSE_MS = 3000;

/** Puts captions into a live region. */
export class Announcer {
  #region;
  #last = "";
  #lastMs = -Infinity;
  #waiting = null;
  #timer = null;

  /** @param region an element with aria-live="polite" */
  constructor(region) {
    this.#region = region;
  }

  /** A caption is finished. */
  say(text) {
    this.#waiting = text;
    this.#timer ??= setTimeout(() => this.#next(), Math.max(0, this.#lastMs + PAUSE_MS - performance.now()));
  }

  /** Forgets what waits. */
  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#waiting = null;
  }

  #next() {
    this.#timer = null;
    if (this.#waiting === this.#last) return;
    this.#last = this.#waiting;
    this.#lastMs = performance.now();
    this.#region.textContent = this.#last;
  }
}
