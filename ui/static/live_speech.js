// Reading captions aloud with a voice of this device. Voices that send text to another machine are not used.

const VOICES_MS = 1500;

// A remote voice would tell another machine what the camera sees.
const voices = () => speechSynthesis.getVoices().filter((voice) => voice.localService);

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

  /** Resolves to whether this device has a voice of its own; some browsers find them late. */
  async hasVoice() {
    if (voices().length) return true;
    await new Promise((resolve) => {
      speechSynthesis.addEventListener("voiceschanged", resolve, { once: true });
      setTimeout(resolve, VOICES_MS);
    });
    return voices().length > 0;
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
    const local = voices();
    if (local.length === 0) return;
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
