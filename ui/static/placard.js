// The tab Placard: a framed picture and its wall label. As `<beholder-placard wall>` it is the whole page of a screen on a
// wall (kiosk.html): no controls, and a new label whenever something new stands before the camera.

import { closeCamera, openCamera, watch } from "./camera_watch.js";
import { drawLabel, labelAddress } from "./label.js";
import { dataUrl, intake } from "./media.js";
import { writeLabel } from "./placard_writer.js";
import { sentence } from "./sentences.js";

const EMPTY = {
  title: "Untitled",
  text: "Drop a picture into the frame, paste one, choose a file, or hold something before the camera. The model then writes the label.",
};
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
  #label = null;
  #writing = new AbortController();
  #watching = null; // AbortController while the camera is on, or being opened
  #stopIntake = null;
  #home = new URLSearchParams(location.search).get("home") ?? "";

  connectedCallback() {
    this.innerHTML = PAGE;
    for (const name of PARTS) this.#parts[name] = this.querySelector(`.placard-${name}`);
    drawLabel(this.#article, EMPTY);
    this.#article.classList.add("empty");
    this.#stopIntake = intake(this, this.#parts.file, ([file]) => file && this.#take(file));
    this.#parts.choose.addEventListener("click", () => this.#parts.file.click());
    this.#parts["use-camera"].addEventListener("click", () => (this.#watching ? this.#endCamera() : this.#beginCamera()));
    this.#parts.again.addEventListener("click", () => this.#write());
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
    const { picture, camera, nothing } = this.#parts;
    URL.revokeObjectURL(picture.src);
    picture.src = URL.createObjectURL(blob);
    picture.decode().then(
      () => this.#fit(picture.naturalWidth / picture.naturalHeight),
      () => {}, // the browser cannot show it; the server may still read it
    );
    [picture.hidden, camera.hidden, nothing.hidden] = [false, true, true];
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
      this.#tell(cameraTrouble(problem));
      return false;
    }
    this.#fit(camera.videoWidth / camera.videoHeight);
    this.#parts["use-camera"].setAttribute("aria-pressed", "true");
    this.#parts["use-camera"].textContent = "Stop the camera";
    [picture.hidden, camera.hidden, nothing.hidden, recording.hidden] = [true, false, true, false];
    camera.srcObject.getVideoTracks()[0].addEventListener("ended", () => this.#endCamera());
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
    this.#parts.code.hidden = true;
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
    camera.hidden = true;
    picture.hidden = !this.#picture;
    nothing.hidden = Boolean(this.#picture);
  }

  // ---- the label -----------------------------------------------------------------------------------------------------

  // Gives whether there is a label now.
  async #write() {
    this.#writing.abort();
    const writing = (this.#writing = new AbortController());
    const { again, error, code } = this.#parts;
    [error.hidden, code.hidden, again.disabled] = [true, true, true];
    this.#article.classList.remove("empty");
    this.#article.classList.add("writing");
    let [begun, done] = [false, false];
    if (!this.#label) drawLabel(this.#article, { title: "…" });
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
      this.#label = await writeLabel(url, draw, writing.signal);
      draw(this.#label);
      this.#fitLabel();
      done = true;
      this.querySelector("[aria-live]").textContent = `${this.#label.title}. ${this.#label.text}`;
      this.#parts.picture.alt = this.#label.title;
      await this.#showCode();
    } catch (problem) {
      if (problem.name === "AbortError") return true;
      this.#tell(sentence(problem.message));
      if (!begun) this.#takeDown();
    }
    this.#article.classList.remove("writing");
    [again.hidden, again.disabled] = [false, false];
    return done;
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

  // A label must not hang beside another picture.
  #takeDown() {
    this.#label = null;
    drawLabel(this.#article, { title: "Untitled" });
    this.querySelector(".label-writer").hidden = true;
    this.#parts.picture.alt = "";
  }

  async #showCode() {
    const { code } = this.#parts;
    const address = await labelAddress(this.#label, this.#home);
    const query = new URLSearchParams({ text: address });
    code.querySelector("a").href = address;
    code.querySelector("img").src = new URL(`../qr.svg?${query}`, import.meta.url);
    code.querySelector("figcaption").textContent = LOOPBACK.test(new URL(address).host)
      ? "Take this label home. Phones reach it when this page is opened by the machine's network name."
      : "Take this label home: point your phone here.";
    code.hidden = false;
  }

  #tell(message) {
    this.#parts.error.textContent = message;
    this.#parts.error.hidden = false;
  }

  // ---- the wall ------------------------------------------------------------------------------------------------------

  async #beginWall() {
    this.firstElementChild.classList.add("on-wall");
    drawLabel(this.#article, { title: "Please wait", text: "The camera is being opened." });
    for (;;) {
      if (await this.#beginCamera()) return;
      await new Promise((resolve) => setTimeout(resolve, 3000)); // somebody may plug it in, or allow it
      if (!this.isConnected) return;
    }
  }
}

function cameraTrouble({ name, message }) {
  if (name === "NotAllowedError") return "The browser did not allow the camera. Allow it beside the address, then try again.";
  if (name === "NotFoundError") return "There is no camera here. Plug one in, or choose a picture.";
  if (name === "NotReadableError") return "Another program uses the camera. Close it, then try again.";
  return message;
}

customElements.define("beholder-placard", Placard);
