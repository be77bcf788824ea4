// Which camera is opened next: the visitor's choice among those that there are, or one that looks the other way.

import { listCameras } from "./live_source.js";

/** Owns the list of cameras, and the button for the other one. */
export class CameraChoice {
  #select;
  #flip;
  #facing = "environment"; // where there are two, the one that looks at what the visitor looks at
  #last = null; // the camera that was opened last; another may be on its way

  /** @param select <select> of cameras  @param flip button that is hidden where there is only one */
  constructor(select, flip) {
    [this.#select, this.#flip] = [select, flip];
  }

  /** What to open: {deviceId, facing}; deviceId "" leaves it to the browser. */
  get wanted() {
    return { deviceId: this.#select.value, facing: this.#facing };
  }

  /** A camera was opened: now all of them have names. @param source a LiveSource */
  async show(source) {
    this.#last = source;
    const cameras = await listCameras();
    const names = cameras.map(({ deviceId, label }) => new Option(label, deviceId));
    this.#select.replaceChildren(new Option("The browser's choice", ""), ...names);
    this.#select.value = source.deviceId;
    this.#flip.hidden = cameras.length < 2;
  }

  /** Wants the one that looks the other way; where cameras do not say which way they look, the next of them. */
  flip() {
    const { facing, deviceId } = this.#last;
    const ids = [...this.#select.options].map(({ value }) => value).filter(Boolean);
    this.#select.value = facing ? "" : ids[(ids.indexOf(deviceId) + 1) % ids.length];
    this.#facing = facing === "environment" ? "user" : "environment";
  }
}
