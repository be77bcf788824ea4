// What was said so far, in memory only: when, about which picture, what people thought of it. Knows no page.

const MOST = 1000;

/** Entries, oldest first. The same words again lengthen the last entry instead of making one more. */
export class History {
  entries = [];
  #lastId = 0;

  /**
   * @param entry {text, prompt, model, responseId, capturedAt (Date.now), thumbnail (URL or ""), figures}
   * @returns {entry, isNew}
   */
  add({ capturedAt, thumbnail, ...rest }) {
    const last = this.entries.at(-1);
    if (last && last.text === rest.text && last.prompt === rest.prompt) {
      if (last.thumbnail) URL.revokeObjectURL(last.thumbnail);
      Object.assign(last, { ...rest, thumbnail, lastAt: capturedAt, times: last.times + 1 });
      return { entry: last, isNew: false };
    }
    const entry = { ...rest, thumbnail, firstAt: capturedAt, lastAt: capturedAt, times: 1, starred: false, rating: null };
    entry.id = ++this.#lastId;
    this.entries.push(entry);
    if (this.entries.length > MOST) this.#forgetOne();
    return { entry, isNew: true };
  }

  /** The entry of an id. */
  find(id) {
    return this.entries.find((entry) => entry.id === id);
  }

  /** Forgets everything. */
  clear() {
    for (const entry of this.entries) this.#free(entry);
    this.entries = [];
  }

  // The oldest without a star, but never the one that just came; when all have one, the oldest.
  #forgetOne() {
    const index = Math.max(0, this.entries.slice(0, -1).findIndex((entry) => !entry.starred));
    this.#free(this.entries.splice(index, 1)[0]);
  }

  #free(entry) {
    if (entry.thumbnail) URL.revokeObjectURL(entry.thumbnail);
  }
}
