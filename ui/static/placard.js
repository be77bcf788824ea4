// The tab Placard: a framed picture and its wall label. As `<beholder-placard wall>` it is the whole page of a screen on a
// wall (kiosk.html): no controls, and a new label whenever something new stands before the camera.

import { closeCamera, openCamera, watch } from "./camera_watch.js";
import { drawLabel, labelAddress } from "./label.js";
import { Medium, dataUrl, intake } from "./media.js";
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
const LOOPBACK = /^(localhost|127\.|\[::1\])/;

const PAGE = `
  <div class="placard">
    <div class="placard-hang">
      <div class="placard-frame"><div class="placard-mat">
        <img class="placard-picture" alt="" hidden><video class="placard-camera" muted playsinline hidden></video>
        <div class="placard-nothing" aria-hidden="true"></div>
      </div></div>
      <p class="placard-recording" hidden><span aria-hidden="true"></span>The camera is on</p>
    </div>
    <div class="placard-side">
      <article class="label" aria-label="Wall label"><p class="label-writer" hidden>Written by a machine that looked at the
        picture. It can be mistaken.</p></article>
      <p class="notice bad placard-error" role="alert" hidden></p>
      <figure class="placard-code" hidden><a target="_blank" rel="noopener"><img alt="QR code of the label's own page"></a>
        <figcaption></figcaption></figure>
      <p class="unseen" aria-live="polite"></p>
    </div>
    <div class="placard-tools" role="toolbar" aria-label="Placard">
      <input class="placard-file unseen" type="file" accept="image/*" tabindex="-1" aria-hidden="true">
      <button type="button" class="button primary placard-choose">Choose a picture</button>
      <button type="button" class="button placard-use-camera" aria-pressed="false">Use the camera</button>
      <button type="button" class="button placard-again" hidden>Write it again</button>
      <button type="button" class="button placard-wall">Hang it on the wall</button>
    </div>
  </div>`;

const SIZES = [1, 0.9, 0.8, 0.7, 0.6]; // of the words on a wall
const PARTS = ["picture", "camera", "nothing", "recording", "error", "code", "file", "choose", "use-camera", "again", "wall"];

class Placard extends HTMLElement {
  #parts = {};
  #picture = null; // blob
  #label = null; // of the picture, once it is written
  #writing = new AbortController();
  #watching = null; // AbortController while the camera is on, or being opened
  #stopIntake = null;
  #home = new URLSearchParams(location.search).get("home") ?? "";

  connectedCallback() {
    this.innerHTML = PAGE;
    for (const name of PARTS) this.#parts[name] = this.querySelector(`.placard-${name}`);
    this.#showLabel();
    this.#stopIntake = intake(this, this.#parts.file, ([file]) => file && this.#take(file));
    this.#parts.choose.addEventListener("click", () => this.#parts.file.click());
    this.#parts["use-camera"].addEventListener("click", () => (this.#watching ? this.#endCamera() : this.#beginCamera()));
    this.#parts.again.addEventListener("click", () => this.#write());
    this.#parts.wall.hidden = !document.fullscreenEnabled; // phones that fill their screen with videos only
    this.#parts.wall.addEventListener("click", () => this.firstElementChild.requestFullscreen());
    document.addEventListener("fullscreenchange", this.#onFullscreen);
    addEventListener("resize", this.#fitLabel);
    document.addEventListener("visibilitychange", this.#onHidden);
    if (this.isWall) this.#beginWall();
  }

  disconnectedCallback() {
    this.#stopIntake?.();
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

  #hang(blob) {
    this.#picture = blob;
    this.#label = null;
    const { picture, camera, nothing } = this.#parts;
    URL.revokeObjectURL(picture.src);
    picture.src = URL.createObjectURL(blob);
    picture.decode().catch(() => this.#hangAsSeen(blob)).then(
      () => this.#fit(picture.naturalWidth / picture.naturalHeight),
      () => {}, // the server cannot read it either, and says so
    );
    [picture.hidden, camera.hidden, nothing.hidden] = [false, true, true];
  }

  // What the browser cannot show (TIFF, HEIC) is shown as the server decodes it.
  async #hangAsSeen(blob) {
    const { tiles } = await new Medium(blob).preview();
    if (this.#picture !== blob) return;
    this.#parts.picture.src = tiles.at(-1).url;
    await this.#parts.picture.decode();
  }

  // The frame is empty again.
  #unhang() {
    const { picture, nothing } = this.#parts;
    URL.revokeObjectURL(picture.src);
    picture.removeAttribute("src");
    [this.#picture, picture.hidden, nothing.hidden] = [null, true, false];
  }

  // The frame is made for the picture; very long ones get a mat.
  #fit(ratio) {
    this.firstElementChild.style.setProperty("--ratio", Math.min(Math.max(ratio, 0.55), 2.4).toFixed(4));
  }

  async #beginCamera() {
    const { camera, picture, nothing, recording, error } = this.#parts;
    error.hidden = true;
    const watching = (this.#watching = new AbortController());
    try {
      await openCamera(camera, watching.signal);
    } catch (problem) {
      if (watching.signal.aborted) return false; // ended before it had begun
      this.#watching = null;
      if (this.isWall) this.#showLabel({ title: "Please wait", text: `${cameraTrouble(problem)} ${BY_ITSELF}` });
      else this.#tell(`${cameraTrouble(problem)} Then try again, or choose a picture.`);
      return false;
    }
    this.#fit(camera.videoWidth / camera.videoHeight);
    this.#parts["use-camera"].setAttribute("aria-pressed", "true");
    this.#parts["use-camera"].textContent = "Stop the camera";
    [picture.hidden, camera.hidden, nothing.hidden, recording.hidden] = [true, false, true, false];
    this.#writing.abort(); // about what hung there
    this.#showLabel(WAITING);
    camera.srcObject.getVideoTracks()[0].addEventListener("ended", () => this.#onCameraGone());
    const seen = { onMoving: () => this.#showCamera(), onPicture: (blob) => (this.#hang(blob), this.#write()) };
    watch(camera, seen, watching.signal);
    return true;
  }

  // What stood there has gone: the camera again, and the old label stands back until there is a new one.
  #showCamera() {
    const { picture, camera } = this.#parts;
    [picture.hidden, camera.hidden] = [true, false];
    this.#fit(camera.videoWidth / camera.videoHeight);
    this.#article.classList.add("writing");
    [this.#parts.code.hidden, this.#parts.again.hidden] = [true, true];
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
    const { picture, camera, nothing } = this.#parts;
    if (camera.hidden) return; // the picture that was taken hangs there, with its label
    camera.hidden = true;
    picture.hidden = !this.#picture;
    nothing.hidden = Boolean(this.#picture);
    if (this.#picture) this.#fit(picture.naturalWidth / picture.naturalHeight);
    this.#showLabel();
  }

  // ---- the label -----------------------------------------------------------------------------------------------------

  // What belongs to what hangs there: its own label or, while there is none, what to do.
  #showLabel(words = this.#label ?? (this.#picture ? { title: "Untitled" } : EMPTY)) {
    const isOwn = words === this.#label;
    drawLabel(this.#article, words);
    this.#article.classList.remove("writing");
    this.#article.classList.toggle("empty", !isOwn);
    this.querySelector(".label-writer").hidden = !isOwn;
    this.#parts.code.hidden = !isOwn;
    [this.#parts.again.hidden, this.#parts.again.disabled] = [!this.#picture || words === WAITING, false];
    if (!isOwn) this.#parts.picture.alt = "";
  }

  // Gives whether there is a label now.
  async #write() {
    this.#writing.abort();
    const writing = (this.#writing = new AbortController());
    const { again, error, code } = this.#parts;
    [error.hidden, code.hidden, again.disabled] = [true, true, true];
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
    } catch (problem) {
      if (problem.name === "AbortError") return true;
      this.#tell(sentence(problem.message));
      if (problem.isRefusal && !this.#watching) this.#unhang(); // it is no picture
      if (!begun || !this.#picture) this.#showLabel(); // a label must not hang beside another picture
    }
    this.#article.classList.remove("writing");
    [again.hidden, again.disabled] = [!this.#picture, false];
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
    const address = await labelAddress(label, this.#home);
    if (label !== this.#label) return; // another picture hangs there by now
    const query = new URLSearchParams({ text: address });
    code.querySelector("a").href = address;
    code.querySelector("img").src = new URL(`../qr.svg?${query}`, import.meta.url);
    code.querySelector("figcaption").textContent = LOOPBACK.test(new URL(address).host)
      ? "Take this label home. Phones reach it when this page is opened by the machine's network name."
      : "Take this label home: point your phone here.";
    code.hidden = !this.#parts.camera.hidden;
  }

  #tell(message) {
    this.#parts.error.textContent = message;
    this.#parts.error.hidden = false;
  }

  // ---- the wall ------------------------------------------------------------------------------------------------------

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

function cameraTrouble({ name, message }) {
  if (name === "NotAllowedError") return "The browser did not allow the camera. Allow it beside the address.";
  if (name === "NotFoundError") return "There is no camera here. Plug one in.";
  if (name === "NotReadableError") return "Another program uses the camera. Close it.";
  return sentence(message);
}

customElements.define("beholder-placard", Placard);
