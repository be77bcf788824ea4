// The tab Placard: a framed picture and its wall label. As `<beholder-placard wall>` it is the whole page of a screen on a
// wall (kiosk.html): no controls, and a new label whenever something new stands before the camera.

import { withAdvice } from "./advice.js";
import { cameraTrouble, closeCamera, openCamera, watch } from "./camera_watch.js";
import { passFocusOn } from "./focus.js";
import { asTheServerSees, decoded } from "./framed.js";
import { codeAddress, drawLabel } from "./label.js";
import { dataUrl, intake } from "./media.js";
import { MARKUP, PARTS } from "./placard_markup.js";
import { writeLabel } from "./placard_writer.js";
import { sentence } from "./sentences.js";

const EMPTY = {
  title: "Untitled",
  text: "Drop a picture into the frame, paste one, choose a file, or hold something before the camera. The model then writes the label.",
};
const WAITING = {
  title: "Untitled",
  text: "Hold something before the camera. The model writes the label as soon as it stands still.",
};
const BY_ITSELF = "This page goes on by itself.";
const NEXT = { again: "Write it again", other: "Choose another picture" }; // what a visitor can do
const LOOPBACK = /^(localhost|127\.|\[::1\])/;

const SIZES = [1, 0.9, 0.8, 0.7, 0.6]; // of the words on a wall

class Placard extends HTMLElement {
  #parts = {};
  #picture = null; // blob
  #label = null; // of the picture, once it is written
  #writing = new AbortController();
  #watching = null; // AbortController while the camera is on, or being opened
  #stopIntake = null;
  #stopFocus = null;
  #hangs = "nothing"; // or "picture" or "camera", in the frame
  #isWriting = false;
  #home = new URLSearchParams(location.search).get("home") ?? "";

  connectedCallback() {
    this.innerHTML = MARKUP;
    for (const name of PARTS) this.#parts[name] = this.querySelector(`.placard-${name}`);
    this.#showLabel();
    this.#stopIntake = intake(this, this.#parts.file, ([file]) => file && this.#take(file));
    this.#parts.choose.addEventListener("click", () => this.#parts.file.click());
    this.#parts["use-camera"].addEventListener("click", () => (this.#watching ? this.#endCamera() : this.#beginCamera()));
    this.#parts.again.addEventListener("click", () => this.#isWriting || this.#write());
    this.#parts.wall.hidden = !document.fullscreenEnabled; // phones that fill their screen with videos only
    this.#parts.wall.addEventListener("click", () => this.firstElementChild.requestFullscreen());
    document.addEventListener("fullscreenchange", this.#onFullscreen);
    addEventListener("resize", this.#fitLabel);
    document.addEventListener("visibilitychange", this.#onHidden);
    this.#stopFocus = passFocusOn(this, [".placard-choose"]);
    if (this.isWall) this.#beginWall();
  }

  disconnectedCallback() {
    this.#stopIntake?.();
    this.#stopFocus?.();
    this.#endCamera();
    this.#writing.abort();
    document.removeEventListener("fullscreenchange", this.#onFullscreen);
    removeEventListener("resize", this.#fitLabel);
    document.removeEventListener("visibilitychange", this.#onHidden);
  }

  /** Whether this is the page of a screen on a wall. */
  get isWall() {
    return this.hasAttribute("wall");
  }

  get #article() {
    return this.querySelector(".label");
  }

  #onFullscreen = () => {
    const full = document.fullscreenElement === this.firstElementChild;
    this.firstElementChild.classList.toggle("on-wall", full || this.isWall);
    this.#fitLabel();
  };

  #onHidden = () => {
    if (document.hidden && this.#watching && !this.isWall) this.#endCamera();
  };

  // ---- the picture ---------------------------------------------------------------------------------------------------

  #take(blob) {
    this.#endCamera();
    this.#hang(blob);
    this.#write();
  }

  // A picture comes into the frame once it can be shown, so that the frame is never empty in between.
  async #hang(blob) {
    [this.#picture, this.#label, this.#hangs] = [blob, null, "picture"];
    const isWanted = () => this.#picture === blob && this.#hangs === "picture";
    let picture;
    try {
      picture = await decoded(URL.createObjectURL(blob));
    } catch {
      if (isWanted()) this.#put("nothing", "picture");
      picture = await asTheServerSees(blob).catch(() => null); // it cannot read it either, and says so
    }
    if (!picture || !isWanted()) return URL.revokeObjectURL(picture?.src);
    URL.revokeObjectURL(this.#parts.picture.src);
    this.#parts.picture.replaceWith(picture);
    this.#parts.picture = picture;
    picture.alt = this.#label?.title ?? "";
    this.#put("picture");
  }

  // What can be seen in the frame; `hangs` while something else is still to come there.
  #put(what, hangs = what) {
    this.#hangs = hangs;
    const { picture, camera, nothing } = this.#parts;
    [picture.hidden, camera.hidden, nothing.hidden] = ["picture", "camera", "nothing"].map((each) => each !== what);
    if (what === "picture") this.#fit(picture.naturalWidth / picture.naturalHeight);
    if (what === "camera") this.#fit(camera.videoWidth / camera.videoHeight);
  }

  // The frame is empty again.
  #unhang() {
    URL.revokeObjectURL(this.#parts.picture.src);
    this.#parts.picture.removeAttribute("src");
    this.#picture = null;
    this.#put("nothing");
  }

  // The frame is made for the picture; very long ones get a mat.
  #fit(ratio) {
    this.firstElementChild.style.setProperty("--ratio", Math.min(Math.max(ratio, 0.55), 2.4).toFixed(4));
  }

  async #beginCamera() {
    const { camera, recording, error } = this.#parts;
    error.hidden = true;
    const watching = (this.#watching = new AbortController());
    try {
      await openCamera(camera, watching.signal);
    } catch (problem) {
      if (watching.signal.aborted) return false; // ended before it had begun
      this.#watching = null;
      if (this.isWall) this.#pause(cameraTrouble(problem));
      else this.#tell(`${cameraTrouble(problem)} Then try again, or choose a picture.`);
      return false;
    }
    this.#put("camera");
    this.#parts["use-camera"].setAttribute("aria-pressed", "true");
    this.#parts["use-camera"].textContent = "Stop the camera";
    recording.hidden = false;
    this.#writing.abort(); // about what hung there
    this.#showLabel(WAITING);
    camera.srcObject.getVideoTracks()[0].addEventListener("ended", () => this.#onCameraGone());
    const seen = { onMoving: () => this.#showCamera(), onPicture: (blob) => (this.#hang(blob), this.#write()) };
    watch(camera, seen, watching.signal);
    return true;
  }

  // What stood there has gone: the camera again, and the old label stands back until there is a new one.
  #showCamera() {
    this.#put("camera");
    this.#article.classList.add("writing");
    this.#parts.code.hidden = true;
  }

  #onCameraGone() {
    this.#endCamera();
    if (this.isWall) this.#beginWall();
    else this.#tell("The camera was taken away. Connect it, then use it again, or choose a picture.");
  }

  #endCamera() {
    if (!this.#watching) return;
    this.#watching.abort();
    this.#watching = null;
    closeCamera(this.#parts.camera);
    this.#parts.recording.hidden = true;
    this.#parts["use-camera"].setAttribute("aria-pressed", "false");
    this.#parts["use-camera"].textContent = "Use the camera";
    this.#offerAgain();
    if (this.#hangs !== "camera") return; // the picture that was taken hangs there, with its label
    this.#put(this.#picture ? "picture" : "nothing");
    this.#showLabel();
  }

  // ---- the label -----------------------------------------------------------------------------------------------------

  // What belongs to what hangs there: its own label or, while there is none, what to do.
  #showLabel(words = this.#label ?? (this.#picture ? { title: "Untitled" } : EMPTY)) {
    const isOwn = words === this.#label;
    drawLabel(this.#article, words);
    this.#isWriting = false;
    this.#article.classList.remove("writing");
    this.#article.classList.toggle("empty", !isOwn);
    this.querySelector(".label-writer").hidden = !isOwn;
    this.#parts.code.hidden = !isOwn;
    this.#offerAgain();
    if (!isOwn) this.#parts.picture.alt = "";
  }

  // A camera writes by itself, whenever something new stands there.
  #offerAgain() {
    this.#parts.again.hidden = !this.#picture || Boolean(this.#watching);
    this.#parts.again.setAttribute("aria-disabled", this.#isWriting); // and keeps the focus that a disabled one would lose
  }

  // Gives whether there is a label now.
  async #write() {
    this.#writing.abort();
    const writing = (this.#writing = new AbortController());
    const { error, code } = this.#parts;
    [error.hidden, code.hidden, this.#isWriting] = [true, true, true];
    this.#offerAgain();
    this.#article.classList.remove("empty");
    this.#article.classList.add("writing");
    let [begun, done] = [false, false];
    if (!this.#hasText) drawLabel(this.#article, { title: "…" });
    const draw = (label) => {
      if (!begun) this.#article.style.removeProperty("--fit");
      begun = true;
      this.querySelector(".label-writer").hidden = false;
      this.#article.classList.remove("writing");
      drawLabel(this.#article, label);
      const text = this.querySelector(".label-text");
      text.scrollTop = text.scrollHeight; // where it ends on a wall: the newest words are seen
    };
    try {
      const url = await dataUrl(this.#picture);
      const label = await writeLabel(url, draw, writing.signal);
      writing.signal.throwIfAborted();
      this.#label = label;
      draw(label);
      this.#fitLabel();
      done = true;
      this.querySelector("[aria-live]").textContent = `${label.title}. ${label.text}`;
      this.#parts.picture.alt = label.title;
      await this.#showCode(label);
      writing.signal.throwIfAborted();
    } catch (problem) {
      if (writing.signal.aborted) return true; // what follows belongs to the next one
      this.#isWriting = false;
      if (this.isWall) return this.#pause(problem.message), false;
      this.#tell(this.#watching ? `${sentence(problem.message)} ${BY_ITSELF}` : withAdvice(problem, NEXT));
      if (problem.isRefusal && !this.#watching) this.#unhang(); // it is no picture
      if (!begun || !this.#picture) this.#showLabel(); // a label must not hang beside another picture
    }
    this.#article.classList.remove("writing");
    this.#isWriting = false;
    this.#offerAgain();
    return done;
  }

  // Whether words stand there that a new label takes the place of, so that nothing moves.
  get #hasText() {
    return !this.querySelector(".label-writer").hidden;
  }

  // Smaller, when a long one has not all its room on a wall. Only when it is finished: nothing jumps while it grows.
  #fitLabel = () => {
    const text = this.querySelector(".label-text");
    for (const size of SIZES) {
      this.#article.style.setProperty("--fit", size);
      if (text.scrollHeight <= text.clientHeight + 1) break;
    }
    text.scrollTop = 0;
  };

  async #showCode(label) {
    const { code } = this.#parts;
    const address = await codeAddress(label, this.#home);
    if (label !== this.#label) return; // another picture hangs there by now
    const query = new URLSearchParams({ text: address.code });
    code.querySelector("a").href = address.whole;
    code.style.setProperty("--dense", Math.max(1, Math.sqrt(address.code.length / 430)).toFixed(2)); // signs of one size
    code.querySelector("img").src = new URL(`../qr.svg?${query}`, import.meta.url);
    code.querySelector("figcaption").textContent = LOOPBACK.test(new URL(address.whole).host)
      ? "Take this label home. Phones reach it when this page is opened by the machine's network name."
      : "Take this label home: point your phone here.";
    code.hidden = this.#hangs === "camera";
  }

  #tell(message) {
    this.#parts.error.textContent = message;
    this.#parts.error.hidden = false;
  }

  // ---- the wall ------------------------------------------------------------------------------------------------------

  // People who stand before a wall can do nothing: its label asks for their patience.
  #pause(why) {
    this.#showLabel({ title: "Please wait", text: `${sentence(why)} ${BY_ITSELF}` });
  }

  async #beginWall() {
    this.firstElementChild.classList.add("on-wall");
    this.#showLabel({ title: "Please wait", text: "The camera is being opened." });
    for (;;) {
      if (await this.#beginCamera()) return;
      await new Promise((resolve) => setTimeout(resolve, 3000)); // somebody may plug it in, or allow it
      if (!this.isConnected) return;
    }
  }
}

customElements.define("beholder-placard", Placard);
