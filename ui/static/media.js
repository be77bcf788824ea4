// Pictures and clips as a visitor brings them: dropped, pasted or chosen, shown from memory, sent once.

import { ApiError, call, get } from "./api.js";

const CLIP_NAMES = /\.(mp4|m4v|mov|webm|mkv|avi)$/i;

/** One picture or clip. Nothing leaves the browser before `part` or `preview` is called. */
export class Medium {
  #upload = null; // promise of an id of /v1/images
  #previews = new Map();
  tokens = 0; // vision tokens, once a preview told
  cached = null; // of the last answer: {tokens, of}

  /** @param file a File or Blob */
  constructor(file) {
    this.file = file;
    this.name = file.name ?? "";
    this.isClip = file.type.startsWith("video/") || CLIP_NAMES.test(this.name);
    this.url = URL.createObjectURL(file);
    this.detail = "auto";
  }

  /** Frees the memory, here and on the server. */
  close() {
    URL.revokeObjectURL(this.url);
    this.leave();
  }

  /** Frees the server's memory only: the page is left, and a browser may bring it back as it was. */
  leave() {
    const forget = (id) => id.startsWith("file-") && call(`/v1/images/${id}`, { method: "DELETE", keepalive: true });
    this.#upload?.then(forget).catch(() => {});
    this.#upload = null;
  }

  /** Must be sent anew: the server has forgotten what was uploaded. */
  forget() {
    this.#upload = null;
  }

  /** The content part of a chat message. */
  async part() {
    await this.#check();
    if (this.isClip) return { type: "video_url", video_url: { url: await dataUrl(this.file) } };
    return { type: "image_url", image_url: { url: await this.#address(), detail: this.detail } };
  }

  /** What the model sees of it, as `POST /v1/previews` answers. */
  preview() {
    const kept = this.#previews.get(this.detail) ?? this.#preview();
    this.#previews.set(this.detail, kept);
    kept.then(
      (seen) => (this.tokens = (seen.image ?? seen.clip).num_tokens),
      () => this.#previews.delete(this.detail),
    );
    return kept;
  }

  // A folder that was dropped, or a file that has gone since: browsers tell that no better than a dead network.
  async #check() {
    try {
      await this.file.slice(0, 1).arrayBuffer();
    } catch {
      throw new ApiError({ status: 400, message: "This cannot be read: it is a folder, or it is no longer there." });
    }
  }

  async #preview() {
    await this.#check();
    const form = new FormData();
    form.append(this.isClip ? "video" : "file", this.file, this.name || "file");
    if (!this.isClip) form.append("detail", this.detail);
    return get("/v1/previews", { method: "POST", body: form });
  }

  // Uploaded once and named afterwards; where the server keeps no uploads, or not such large ones, sent every time.
  #address() {
    this.#upload ??= call("/v1/images", {
      method: "POST",
      body: this.file,
      headers: { "content-type": "application/octet-stream" },
    })
      .then((response) => response.json())
      .then(({ id }) => id)
      .catch((error) => {
        this.#upload = null;
        if (error instanceof ApiError && ["uploads_off", "image_too_large"].includes(error.code)) {
          return dataUrl(this.file);
        }
        throw error;
      });
    return this.#upload;
  }
}

/** Takes what is dropped on, pasted into and chosen in an element, while it can be seen: whatever it is, the server
 * says whether it can read it. Gives a function that stops. */
export function intake(element, input, take) {
  const visible = () => element.checkVisibility();
  const carriesFiles = (event) => visible() && event.dataTransfer?.types.includes("Files");
  const over = (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    element.classList.add("dragging");
  };
  const leave = (event) => event.relatedTarget === null && element.classList.remove("dragging");
  const drop = (event) => {
    element.classList.remove("dragging");
    if (!carriesFiles(event)) return;
    event.preventDefault();
    take([...event.dataTransfer.files]);
  };
  const paste = (event) => {
    const pasted = visible() ? [...(event.clipboardData?.files ?? [])] : [];
    if (!pasted.length) return;
    event.preventDefault();
    take(pasted);
  };
  const choose = () => {
    take([...input.files]);
    input.value = "";
  };
  const heard = [["dragover", over], ["dragleave", leave], ["drop", drop], ["paste", paste]];
  for (const [name, listener] of heard) document.addEventListener(name, listener);
  input.addEventListener("change", choose);
  return () => {
    for (const [name, listener] of heard) document.removeEventListener(name, listener);
    input.removeEventListener("change", choose);
  };
}

/** A file as a data URL. */
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new ApiError({ status: 400, message: "The file cannot be read any more." }));
    reader.readAsDataURL(file);
  });
}
