// A screen that goes dark would hide the page, and that would stop what looks.

/** Keeps the screen of this device on, where the browser can. */
export class Awake {
  #wanted = false;
  #lock = null;

  async keep(on) {
    this.#wanted = on;
    this.#lock?.release().catch(() => {});
    this.#lock = null;
    if (!on || !navigator.wakeLock) return;
    const lock = await navigator.wakeLock.request("screen").catch(() => null); // low battery
    if (this.#wanted && !this.#lock) this.#lock = lock;
    else lock?.release();
  }
}
