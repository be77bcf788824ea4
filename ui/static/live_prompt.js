// What is asked about the pictures, and when: the presets of the server, whose words can be changed while it runs.

import { getAtLast } from "./api.js";

const FIRST = "one_line"; // short: a live picture changes before long answers are read
const QUIET_MS = 500; // nobody types for so long: the words are meant

const LONG = 80; // tokens
const QUESTION = "Is there a person?"; // of presets that ask the person for one, until they are told another

const MODES = [
  ["on_change", "On change", "Speaks when the picture has changed."],
  ["continuous", "Always", "Looks again as soon as the last answer is finished."],
  ["interval", "Every …", "Looks again and again, at most so often."],
  ["manual", "Snap", "Looks when you press Snap, or the space bar."],
];

/** The form. `change` events tell that `settings()` has changed. */
export class LivePrompt extends EventTarget {
  #presets = [];
  #preset = null;
  #root;
  #timer = null;

  constructor(root) {
    super();
    this.#root = root;
    root.innerHTML = `
      <label class="field"><span>What to say</span><select class="prompt-preset"></select></label>
      <label class="field"><span class="prompt-name">In these words</span>
        <textarea class="prompt-text" rows="2" dir="auto" spellcheck="true"></textarea></label>
      <fieldset class="segments" aria-label="When to look">
        ${MODES.map(
          ([value, name, title]) =>
            `<label title="${title}"><input type="radio" name="mode" value="${value}">${name}</label>`,
        ).join("")}
      </fieldset>
      <p class="prompt-when"><span class="prompt-hint"></span>
        <label class="prompt-every" hidden>Every <input type="number" min="0.2" max="3600" step="0.1" value="2"> s</label></p>`;
    root.addEventListener("submit", (event) => event.preventDefault());
    this.#find(`[value="on_change"]`).checked = true;
    this.#find(".prompt-preset").addEventListener("change", (event) => this.#choose(event.target.value));
    this.#find(".prompt-text").addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#changed(), QUIET_MS);
    });
    this.#find(".prompt-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault(); // these words now
      this.#changed();
    });
    this.#find(".segments").addEventListener("change", () => this.#changed());
    this.#find(".prompt-every input").addEventListener("change", ({ target }) => {
      target.value = this.intervalMs / 1000; // what is done stands there
      this.#changed();
    });
    this.#showMode();
  }

  /** Fetches the presets, once, as soon as there is a server. @param signal AbortSignal */
  async load(signal) {
    if (this.#presets.length) return;
    this.#presets = (await getAtLast("/v1/presets", signal)).data;
    const select = this.#find(".prompt-preset");
    select.replaceChildren(
      ...this.#presets.map(({ id, title, description }) => {
        const option = new Option(title, id);
        option.title = description;
        return option;
      }),
    );
    this.#choose((this.#presets.find(({ id }) => id === FIRST) ?? this.#presets[0]).id);
  }

  get mode() {
    return this.#find("[name=mode]:checked").value;
  }

  /** The least time between two looks, in milliseconds. */
  get intervalMs() {
    const { value, min, max, defaultValue } = this.#find(".prompt-every input");
    return Math.min(max, Math.max(min, value || defaultValue)) * 1000;
  }

  /** The words in the field. */
  get words() {
    return this.#find(".prompt-text").value.trim();
  }

  /** The words that were asked with, for the records: those in the field may be others by now. */
  wordsOf({ prompt, preset }) {
    return prompt ?? this.#presets.find(({ id }) => id === preset)?.prompt ?? this.words;
  }

  /** Whether more than a sentence or two is to be expected. */
  get isLong() {
    return (this.#preset?.sampling.max_tokens ?? LONG) >= LONG;
  }

  /** Fields of `session.update`. @param capabilities of the session, or null before there is one */
  settings(capabilities = null) {
    const trigger = { mode: this.mode };
    if (this.mode === "interval") trigger.interval_ms = this.intervalMs;
    if (this.mode === "on_change") trigger.interval_ms = 500;
    return { trigger, ...this.#question(capabilities) };
  }

  // An untouched preset is asked by its name. Changed words keep the preset's sampling and shape.
  #question(capabilities) {
    const preset = this.#preset;
    if (!preset) return { prompt: this.words || null, preset: null };
    const knows = capabilities?.presets?.includes(preset.id) ?? false;
    const asksMore = preset.prompt.includes("{prompt}");
    if (knows && asksMore) return { ...CLEARED, preset: preset.id, prompt: this.words || QUESTION };
    if (knows && this.words === preset.prompt) return { ...CLEARED, preset: preset.id, prompt: null };
    const words = this.words || preset.prompt;
    const prompt = asksMore ? preset.prompt.replace("{prompt}", this.words || QUESTION) : words;
    const shape = knows ? pick(preset, "response_format", "structured_outputs") : {};
    const cleared = knows ? CLEARED : pick(CLEARED, ...SAMPLING);
    return { ...cleared, ...preset.sampling, ...shape, prompt, preset: null };
  }

  #choose(id) {
    this.#preset = this.#presets.find((preset) => preset.id === id);
    this.#find(".prompt-preset").value = id;
    const asksMore = this.#preset.prompt.includes("{prompt}");
    this.#find(".prompt-name").textContent = asksMore ? "Your question" : "In these words";
    const words = asksMore ? QUESTION : this.#preset.prompt; // what is asked stands there to be read
    this.#find(".prompt-text").value = words;
    this.#find(".prompt-text").placeholder = words;
    this.#changed();
  }

  #changed() {
    clearTimeout(this.#timer);
    this.#showMode();
    this.dispatchEvent(new Event("change"));
  }

  #showMode() {
    const isInterval = this.mode === "interval";
    this.#find(".prompt-every").hidden = !isInterval;
    this.#find(".prompt-hint").textContent = isInterval ? "" : MODES.find(([value]) => value === this.mode)[2];
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }
}

const SAMPLING = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
const CLEARED = { ...Object.fromEntries(SAMPLING.map((name) => [name, null])), response_format: null, structured_outputs: null };

const pick = (object, ...names) =>
  Object.fromEntries(names.filter((name) => object[name] !== undefined).map((name) => [name, object[name]]));
