// Where the pictures of a live session come from: a camera, a shared screen, or a file. All are shown in the same
// <video> or <img>, and give JPEGs of what these show. Nothing is mirrored or cropped on its way to the server.

const QUALITY = 0.75;

/** Something that can be looked at. Make one with `openCamera`, `openScreen` or `openFile`. */
export class LiveSource {
  #canvas = document.createElement("canvas");
  #stop;
  #encoding = false;
  newestMs = performance.now(); // when the picture changed last
  /** Called when it ends by itself: a cable was pulled, sharing was stopped. */
  onEnded = () => {};

  constructor({ kind, element, label, facing = "", deviceId = "", stop }) {
    Object.assign(this, { kind, element, label, facing, deviceId });
    this.#stop = stop;
    this.isStill = element instanceof HTMLImageElement;
    this.tellsFrames = !this.isStill && "requestVideoFrameCallback" in element;
    if (this.tellsFrames) this.#watch();
  }

  get width() {
    return this.element.videoWidth ?? this.element.naturalWidth;
  }

  get height() {
    return this.element.videoHeight ?? this.element.naturalHeight;
  }

  /** Resolves at the next picture; after a while without: hidden pages get no frames, still ones have no next. */
  next(timeoutMs = this.tellsFrames || this.isStill ? 1000 : 100) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, timeoutMs);
      if (!this.tellsFrames || document.hidden) return;
      this.element.requestVideoFrameCallback(() => {
        clearTimeout(timer);
        resolve();
      });
    });
  }

  /** What it shows now as a JPEG whose longer side is at most `side`: {blob, capturedMs}, or null. */
  async capture(side) {
    if (!this.width || this.#encoding) return null;
    this.#encoding = true;
    try {
      const scale = Math.min(1, side / Math.max(this.width, this.height));
      this.#canvas.width = Math.max(1, Math.round(this.width * scale));
      this.#canvas.height = Math.max(1, Math.round(this.height * scale));
      const capturedMs = performance.now();
      this.#canvas.getContext("2d").drawImage(this.element, 0, 0, this.#canvas.width, this.#canvas.height);
      const blob = await new Promise((resolve) => this.#canvas.toBlob(resolve, "image/jpeg", QUALITY));
      return blob && { blob, capturedMs };
    } finally {
      this.#encoding = false;
    }
  }

  /** Lets go of the camera, screen or file. */
  close() {
    this.#stop();
  }

  #watch() {
    const seen = () => {
      this.newestMs = performance.now();
      if (this.element.srcObject || this.element.currentSrc) this.element.requestVideoFrameCallback(seen);
    };
    this.element.requestVideoFrameCallback(seen);
  }
}

/** Whether this page may ask for cameras at all. */
export const camerasAllowed = () => isSecureContext && Boolean(navigator.mediaDevices?.getUserMedia);

/** Whether screens can be shared here; phones cannot. */
export const screensAllowed = () => isSecureContext && Boolean(navigator.mediaDevices?.getDisplayMedia);

/** The cameras that there are; they have names only once one was allowed. */
export async function listCameras() {
  if (!camerasAllowed()) return [];
  const devices = await navigator.mediaDevices.enumerateDevices();
  return devices
    .filter(({ kind }) => kind === "videoinput")
    .map(({ deviceId, label }, index) => ({ deviceId, label: label || `Camera ${index + 1}` }));
}

/**
 * Throws an Error that says why there is none. What is opened after the signal has aborted is closed again, unseen.
 * @param facing "user" (front) or "environment" (rear), when no `deviceId` is given
 */
export async function openCamera(video, { deviceId = "", facing = "", side = 640, signal }) {
  const wanted = { width: { ideal: side }, height: { ideal: Math.round(side * 0.75) } };
  if (deviceId) wanted.deviceId = { exact: deviceId };
  else if (facing) wanted.facingMode = { ideal: facing };
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    if (error.name !== "OverconstrainedError") throw new Error(whyNoCamera(error));
    stream = await navigator.mediaDevices.getUserMedia({ video: true }); // the chosen camera is gone: any will do
  }
  return shown(video, stream, "camera", signal);
}

/** Asks the browser which screen, window or tab to share. */
export async function openScreen(video, signal) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getDisplayMedia({ video: { frameRate: { ideal: 10 } } });
  } catch (error) {
    throw new Error(
      error.name === "NotAllowedError" ? "No screen was chosen." : `The screen cannot be shared: ${error.message}`,
    );
  }
  return shown(video, stream, "screen", signal);
}

/** A picture or a clip of the visitor's; clips play in a loop. */
export async function openFile(video, image, file, signal) {
  const url = URL.createObjectURL(file);
  const isPicture = file.type.startsWith("image/");
  const element = isPicture ? image : video;
  const stop = () => {
    URL.revokeObjectURL(url);
    if (element.src !== url) return; // another file is shown already
    element.removeAttribute("src");
    if (!isPicture) element.load();
  };
  element.src = url;
  try {
    if (isPicture) {
      await image.decode();
    } else {
      video.loop = true;
      await video.play();
    }
    signal.throwIfAborted();
  } catch {
    stop();
    throw new Error(`This browser cannot show ${file.name}. The Picture page sends files as they are: try it there.`);
  }
  return new LiveSource({ kind: "file", element, label: file.name, stop });
}

async function shown(video, stream, kind, signal) {
  const [track] = stream.getVideoTracks();
  const stop = () => {
    for (const each of stream.getTracks()) each.stop();
    if (video.srcObject === stream) video.srcObject = null;
  };
  if (signal.aborted) {
    stop();
    signal.throwIfAborted();
  }
  video.loop = false;
  video.srcObject = stream;
  try {
    await video.play();
  } catch (error) {
    stop();
    throw new Error(`The picture cannot be shown: ${error.message}`);
  }
  const { facingMode: facing = "", deviceId = "" } = track.getSettings();
  const source = new LiveSource({ kind, element: video, label: track.label, facing, deviceId, stop });
  track.addEventListener("ended", () => source.onEnded());
  return source;
}

function whyNoCamera(error) {
  switch (error.name) {
    case "NotAllowedError":
      return (
        "The browser was told not to give this page the camera. Allow it at the camera or lock sign beside the " +
        "address, then start again."
      );
    case "NotFoundError":
      return "This device has no camera. Share a screen or open a file instead.";
    case "NotReadableError":
      return "The camera is used by another program. Close that one, then start again.";
    default:
      return `The camera cannot be used: ${error.message}`;
  }
}
