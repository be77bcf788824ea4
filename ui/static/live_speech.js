// Reading captions aloud with a voice of this device. Voices that send text to another machine are not used.

/** Speaks the newest caption; one that came meanwhile replaces those that wait. */
export class Speech {
  #waiting = null;
  #speaking = false;
  on = false;

  /** Why nothing can be read aloud here, or "". */
  get missing() {
    if (!("speechSynthesis" in window)) return "This browser cannot read aloud.";
    return "";
  }

  /** Turns it on or off. */
  set(on) {
    this.on = on && !this.missing;
    if (!this.on && !this.missing) {
      this.#waiting = null;
      speechSynthesis.cancel();
    }
  }

  /** Reads a finished caption. */
  say(text) {
    if (!this.on || !text.trim()) return;
    this.#waiting = text;
    if (!this.#speaking) this.#next();
  }

  #next() {
    const text = this.#waiting;
    this.#waiting = null;
    if (!text || !this.on) return;
    const local = speechSynthesis.getVoices().filter((voice) => voice.localService);
    if (local.length === 0) return; // a remote voice would tell another machine what the camera sees
    const words = new SpeechSynthesisUtterance(text);
    words.voice = local.find((voice) => voice.default) ?? local.find((voice) => voice.lang.startsWith("en")) ?? local[0];
    this.#speaking = true;
    words.onend = words.onerror = () => {
      this.#speaking = false;
      this.#next();
    };
    speechSynthesis.speak(words);
  }
}
