// The live picture on a whole screen: words over it, controls that go away, numbers for those who ask for them.

const IDLE_MS = 3000; // the controls go away after so long

/** Fills the screen with the stage of a <beholder-live>. */
export class LiveWall {
  #live;
  #stage;
  #button;
  #guests; // [element, its place beside the stage]
  #idle = 0;

  /** @param live <beholder-live>; @param parts {stage, button, guests} within it: guests come along onto the wall */
  constructor(live, { stage, button, guests }) {
    [this.#live, this.#stage, this.#button] = [live, stage, button];
    this.#guests = guests.map((guest) => [guest, guest.parentElement]);
    document.addEventListener("fullscreenchange", () => {
      if (!document.fullscreenElement && this.on) this.set(false);
    });
    for (const name of ["pointermove", "pointerdown"]) stage.addEventListener(name, () => this.wake());
  }

  get on() {
    return this.#live.dataset.wall === "true";
  }

  /** Fills the screen where the browser can, else the window; or no more. */
  async set(on) {
    const { dataset } = this.#live;
    [dataset.wall, dataset.wallNumbers] = [on, false];
    document.documentElement.classList.toggle("live-on-wall", on);
    this.#button.setAttribute("aria-pressed", on);
    // A full screen shows nothing outside of what fills it.
    for (const [guest, place] of this.#guests) (on ? this.#stage : place).append(guest);
    if (on) document.activeElement?.blur(); // controls that have the focus would stay
    else if (document.activeElement === document.body) this.#button.focus({ preventScroll: true });
    this.wake();
    try {
      if (on) await this.#stage.requestFullscreen();
      else if (document.fullscreenElement) await document.exitFullscreen();
    } catch {
      // phones of some makers: the window it is
    }
  }

  /** Shows the numbers over the picture, or hides them: a wall is for people who look, so first it has none. */
  toggleNumbers() {
    const { dataset } = this.#live;
    dataset.wallNumbers = dataset.wallNumbers !== "true";
  }

  /** Somebody is there: the controls come back for a while. */
  wake() {
    clearTimeout(this.#idle);
    this.#live.dataset.idle = false;
    this.#idle = setTimeout(() => (this.#live.dataset.idle = true), IDLE_MS);
  }
}
